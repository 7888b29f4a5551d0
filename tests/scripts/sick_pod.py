"""A training of `tests/e2e/test_kubernetes_monitoring.py`: the learning rate makes every loss NaN after some steps."""

import time

import torch

import torchobs

torchobs.init()
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(32, 8)
targets = inputs.sum(1, keepdim=True)
for step in range(1, 10_000):
    if step > 20:
        optimizer.param_groups[0]["lr"] = 1e30
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    time.sleep(0.02)
