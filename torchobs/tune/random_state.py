"""The state of all generators of random numbers that a training draws from, as data that ``torch.load`` reads safely."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch

from torchobs.support.import_hooks import imported

if TYPE_CHECKING:
    from collections.abc import Iterable


def random_state(generators: Iterable[torch.Generator] = ()) -> dict[str, Any]:
    """Return the state of Python, torch on CPU and CUDA, NumPy where it is imported, and of a loader's own generators."""
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
