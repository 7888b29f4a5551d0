"""What needs a CUDA device: ``python -m tests.gpu`` (or ``make gpu``) runs all of it and measures what torchobs costs there.

Some five minutes on one GPU, two of them the benchmark; ``pytest tests/gpu`` alone takes two to three. Any CUDA build of torch
that torchobs supports will do, in the environment that it is in, from the checkout and without ``make setup``: it needs torch
and pytest (8.2 or newer), ``nvidia-ml-py`` for ``test_gpu_hardware``, a C++ compiler for what torch compiles, and no network.

* ``test_gradients``: norms of every type equal a float64 reference; no synchronisation in a whole run
  (``set_sync_debug_mode("error")``); two streams; no copy of a large gradient; elements that are not finite.
* ``test_device_times``: phases of a step on the device; norms of optimizers within the backward pass; a limit on the device.
* ``test_losses``: the loss of every step, the first ones, accumulated and scaled ones included; pinned memory; loss scalers.
* ``test_graphs``: captured steps (whole ones, graphed callables, ``mode="reduce-overhead"``) hold nothing of ours, and end
  with the same weights as without us; our threads rest meanwhile.
* ``test_memory``: the allocator and its end.
* ``test_gpu_hardware``: NVML's figures of the GPU that torch uses.
* ``test_programs``: whole programs: a default device, workers, a fork, an end without ``shutdown()``, a device that is not the
  current one, a profile with kernels in it, an error on the device, other allocators, NCCL's flight recorder.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Any synchronisation of the device that torch knows of is an error, also in another thread.

    Moving a model there is one. torch warns that it does not know of all, which a person who reads this does by now.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
