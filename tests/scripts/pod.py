"""What the pods of `tests/e2e/test_kubernetes.py` train: `pod.py STEPS`; it prints each step that it has taken.

`pod.py STEPS HOARD_AFTER`: after so many steps a Job's first pod takes memory until the kernel ends it.
"""

import os
import sys
import time

import torch

import torchobs

HOARDED = 3 << 20  # a step: slow enough for the sampler to see it near the limit, at which it looks ten times a second
steps, *hoard_after = map(int, sys.argv[1:])
if os.environ.get("FAILURES", "0") != "0":
    hoard_after = []

torchobs.init()
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(32, 8)
targets = inputs.sum(1, keepdim=True)


def train() -> None:
    """Take one step, and 20 ms for it."""
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    time.sleep(0.02)


hoard = []
for step in range(1, steps + 1):
    train()
    print(step, flush=True)
    if hoard_after and step > hoard_after[0]:
        hoard.append(b"x" * HOARDED)
