"""Random states and a model's buffers as they were: for functions that run a model, or take batches, beside a training."""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torchobs.support.import_hooks import imported

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch
    from torch import nn


def random_state(generators: Iterable[torch.Generator] = ()) -> dict[str, Any]:
    """Return the state of Python, torch on CPU and CUDA, NumPy where it is imported, and of a loader's own generators.

    It is data that ``torch.load`` reads safely.
    """
    import torch  # torch is optional until training begins

    numpy = imported("numpy")
    return {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
        "numpy": None if numpy is None else _plain(numpy.random.get_state()),
        "generators": [generator.get_state() for generator in generators],
    }


def restore_random_state(state: dict[str, Any], generators: Iterable[torch.Generator] = ()) -> None:
    """Continue from a state that :func:`random_state` returned."""
    import torch

    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    if state["numpy"] is not None:
        import numpy as np

        name, keys, *rest = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002  # the global one, which others draw from
    for generator, own in zip(generators, state["generators"], strict=False):  # of another loader there may be fewer
        generator.set_state(own)


def _plain(state: tuple[Any, ...]) -> list[Any]:
    name, keys, *rest = state
    return [name, keys.tolist(), *rest]


@contextmanager
def random_states_kept(generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Put the global random states, and those of these generators, back when the block ends."""
    state = random_state(generators)
    try:
        yield
    finally:
        restore_random_state(state, generators)


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
            (module._buffers, name, buffer, None if buffer is None else _unrepeated(buffer.detach()).clone())  # noqa: SLF001  # no setter
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
                    _unrepeated(buffer.data).copy_(before)  # which raises no version that a graph of the user's relies on


def _unrepeated(buffer: torch.Tensor) -> torch.Tensor:
    """Return a view of each number in memory once: torch copies nothing into a tensor that ``expand`` has made."""
    import torch

    if buffer.layout is torch.strided and not buffer.is_nested:
        for dimension, stride in enumerate(buffer.stride()):
            if stride == 0 and buffer.shape[dimension] > 1:
                buffer = buffer.narrow(dimension, 0, 1)
    return buffer
