"""A training that knows nothing of torchobs: `plain_training.py STEPS`; it prints each step that it has taken."""

import sys
import time

import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(32, 8)
targets = inputs.sum(1, keepdim=True)
for step in range(1, int(sys.argv[1]) + 1):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    time.sleep(0.02)
    print(step, flush=True)
