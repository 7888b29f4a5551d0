"""A training that knows nothing of torchobs: a model with a convolution, a DataLoader, AdamW, and a line at its end."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 2))
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randn(int(sys.argv[1]), 1, 8, 8), torch.randint(0, 2, (int(sys.argv[1]),)))
for x, y in DataLoader(data, batch_size=2, shuffle=True):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
print("the end of", sys.argv[1:])
