"""A training that dies: `python dying.py raise` diverges first and raises then, `wait` waits to be killed, `finish` ends."""

import sys
import time

import torch

import torchobs

torchobs.init(grad_interval=1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(32, 8)
targets = inputs.sum(1, keepdim=True)
for step in range(60):
    if step == 45 and sys.argv[1] == "raise":
        optimizer.param_groups[0]["lr"] = 1e4
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]  # torch says nothing of it
    optimizer.step()
if sys.argv[1] == "raise":
    raise RuntimeError("the loss is gone")
print("trained", flush=True)
if sys.argv[1] == "wait":
    time.sleep(60)
