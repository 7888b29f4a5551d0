"""A training loop, watched and summed up."""

import torch

from torchobs import debug

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

with debug.enable("basic", gradients_every=10) as run:
    for step in range(100):
        with debug.context("step", batch=step):
            x = torch.randn(64, 8)
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
print(run.summary())  # what the switches saw
print(debug.summary())  # time and memory of each operation
print("all is well" if run.ok else run.problems)
