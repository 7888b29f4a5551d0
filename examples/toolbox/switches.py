"""Switches that are turned on and off while a training runs."""

import torch

from torchobs import debug

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for step in range(3000):
    if step == 1000:
        debug.enable(["gradient_norms", "forward_pass"], model=model, gradients_every=5)
    if step == 2000:
        debug.disable("forward_pass")
    optimizer.zero_grad()
    (model(torch.randn(4, 8)) - torch.randn(4, 1)).square().mean().backward()
    optimizer.step()
print(debug.disable())  # what each saw last, and how often it looked
