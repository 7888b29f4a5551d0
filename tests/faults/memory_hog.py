"""A rank that takes memory, for tests that have it killed: `python -m tests.faults.memory_hog DIRECTORY HOW`.

`HOW` is `grows` (until the kernel ends it), or `worker` (a child grows until the kernel ends that).
"""

import subprocess
import sys
import time

import torch

import torchobs
from tests.training import Recording

MIB = 1024**2
STEP = 2 * MIB
GROW = f"held = []\nimport time\nwhile True:\n    held.append(bytearray(b'x') * {STEP})\n    time.sleep(0.01)"

if __name__ == "__main__":
    directory, how = sys.argv[1:]
    torch.set_num_threads(1)
    recording = Recording(torchobs.init(flight_dir=directory))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if how == "worker":
        worker = subprocess.run([sys.executable, "-c", GROW], check=False)
        print(worker.returncode, flush=True)  # noqa: T201  # what the test waits for
    memory = [bytearray(b"x") * 80 * STEP] if how == "grows" else []  # the first part at once
    while True:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if how == "grows":
            memory.append(bytearray(b"x") * 8 * STEP)
            beat_ns = recording.view().live.heartbeat_ns
            while recording.view().live.heartbeat_ns == beat_ns:  # no faster than it can be told
                time.sleep(0.01)
        time.sleep(0.02)
