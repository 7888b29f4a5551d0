"""A real training for the soak: ``python -m tests.long.soak_training DIRECTORY STEPS``; who it is stands in the environment."""

from __future__ import annotations

import sys
from itertools import islice

import torch

import torchobs
from bench.workloads import mlp

if __name__ == "__main__":
    torch.set_num_threads(1)
    with torchobs.init(flight_dir=sys.argv[1]):
        for _ in islice(mlp(), int(sys.argv[2])):
            pass
