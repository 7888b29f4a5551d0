"""A training of `tests/e2e/test_kubernetes.py` that fails: `sick_pod.py explode` or `sick_pod.py crash`.

`explode`: the learning rate makes every loss NaN after some steps, and it trains on. `crash`: raises after some steps; of
torchrun's first start after more than a minute, for nobody is woken up by a run that never lived.
"""

import os
import sys
import time

import torch

import torchobs

PAUSE_S = 0.02
first = sys.argv[1] == "crash" and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
HEALTHY = int(70 / PAUSE_S) if first else 20
torchobs.init()
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(32, 8)
targets = inputs.sum(1, keepdim=True)
for step in range(1, 10_000):
    if step > HEALTHY:
        if sys.argv[1] == "crash":
            raise RuntimeError("as it was told")
        optimizer.param_groups[0]["lr"] = 1e30
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    time.sleep(PAUSE_S)
