"""What needs a CUDA device: ``python -m tests.gpu`` (or ``make gpu``) runs all of it and measures what torchobs costs there.

Some five minutes on one GPU, two of them the benchmark; ``pytest tests/gpu`` alone takes two to three. Any CUDA build of torch
that torchobs supports will do, in the environment that it is in, from the checkout and without ``make setup``: it needs torch
and pytest (8.2 or newer), ``nvidia-ml-py`` for ``test_gpu_hardware``, a C++ compiler for what torch compiles, and no network.
Each file says at its beginning what it holds.
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
