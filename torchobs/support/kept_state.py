"""Random states and a model's buffers as they were: for functions that run a model, or take batches, beside a training."""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torchobs.support.import_hooks import imported

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Put the global random states back when the block ends: those of Python, of torch, of NumPy if it is imported."""
    import torch  # torch is optional until training begins

    python, host = random.getstate(), torch.get_rng_state()
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's
    devices = torch.cuda.get_rng_state_all() if on_gpu else []
    numpy: Any = imported("numpy")
    legacy = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(host)
        if devices:
            torch.cuda.set_rng_state_all(devices)
        if numpy is not None:
            numpy.random.set_state(legacy)


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Put random states and the model's buffers back when the block ends, those that a forward pass has replaced, too."""
    buffers = Buffers(model)
    with random_states_kept():
        try:
            yield
        finally:
            buffers.put_back()


class Buffers:
    """A model's buffers as they are now. ``put_back`` undoes what a forward pass did to them, in place or by another tensor."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (module._buffers, name, buffer, None if buffer is None else buffer.detach().clone())  # noqa: SLF001  # no setter
            for module in model.modules()
            for name, buffer in module._buffers.items()  # noqa: SLF001  # with those that are None
        ]

    def put_back(self) -> None:
        """Make them what they were. May be called again."""
        import torch

        for owned, name, buffer, before in self._kept:
            if owned[name] is not buffer:
                owned[name] = buffer
            if buffer is not None and before is not None:
                with torch.inference_mode(buffer.is_inference()), torch.no_grad():
                    buffer.data.copy_(before)  # which raises no version that a graph of the user's relies on
