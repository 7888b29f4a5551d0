"""Random states, a model's buffers and attributes as they were: for what runs a model, or takes batches, beside a training."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
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
    import torch

    kept = [
        (module._buffers, name, buffer, None if buffer is None else buffer.detach().clone())  # noqa: SLF001  # no setter
        for module in model.modules()
        for name, buffer in module._buffers.items()  # noqa: SLF001  # with those that are None
    ]
    with random_states_kept():
        try:
            yield
        finally:
            for owned, name, buffer, before in kept:
                if owned[name] is not buffer:
                    owned[name] = buffer
                if buffer is not None and before is not None:
                    with torch.inference_mode(buffer.is_inference()), torch.no_grad():
                        buffer.data.copy_(before)  # which raises no version that a graph of the user's relies on


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Put the attributes of all modules back when the block ends, and what was in their lists, dictionaries and sets."""
    kept = [(vars(module), dict(vars(module))) for module in model.modules()]
    inner = [(value, _contents(value)) for _, before in kept for value in before.values() if type(value) in _CONTAINERS]
    try:
        yield
    finally:
        for attributes, before in kept:
            if not _same(attributes, before):
                attributes.clear()
                attributes.update(before)
        for value, contents in inner:
            if not _same(value, contents):
                value.clear()
                (value.extend if isinstance(value, (list, deque)) else value.update)(contents)


_CONTAINERS = frozenset({list, dict, set, deque, OrderedDict})


def _contents(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else list(value)


def _same(value: Any, before: Any) -> bool:
    """Return True for the same objects in the same order; they are not compared, which may be slow, or the user's code."""
    if len(value) != len(before):
        return False
    if isinstance(value, dict):
        return all(name in before and each is before[name] for name, each in value.items())
    return all(each is other for each, other in zip(value, before, strict=True))
