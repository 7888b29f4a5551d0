"""The state of all generators of random numbers that a training draws from, as data that ``torch.load`` reads safely."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def random_state(generator: torch.Generator | None = None) -> dict[str, Any]:
    """Return the state of Python, torch on CPU and CUDA, NumPy where it is imported, and of a loader's own generator."""
    numpy = sys.modules.get("numpy")
    return {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
        "numpy": None if numpy is None else _plain(numpy.random.get_state()),
        "generator": None if generator is None else generator.get_state(),
    }


def restore_random_state(state: dict[str, Any], generator: torch.Generator | None = None) -> None:
    """Continue from a state that :func:`random_state` returned."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    if state["numpy"] is not None:
        import numpy as np

        name, keys, *rest = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002  # the global one, which others draw from
    if generator is not None and state["generator"] is not None:
        generator.set_state(state["generator"])


def _plain(state: tuple[Any, ...]) -> list[Any]:
    name, keys, *rest = state
    return [name, keys.tolist(), *rest]
