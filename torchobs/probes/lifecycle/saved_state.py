"""Recognizes model or optimizer state in saved objects: it makes a file a checkpoint rather than a data cache.

State is recognized by content, since names are the user's: modules, optimizers and their ``state_dict``, tensors that share
memory with a trained parameter, and mappings of tensors with names or shapes of parameters (copies on another device, averaged
weights, another precision).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAX_OBJECTS = 20_000
"""Most objects inspected: a microsecond each, compared with milliseconds for a save"""
_ENDINGS = (".weight", ".bias")
_NAMES = frozenset({"weight", "bias"})
_STATES = frozenset({"state_dict", "model_state_dict", "optimizer_state_dict", "model", "module", "optimizer", "optimizers"})
"""Keys under which trainers store a mapping of state, or parameters as one vector"""


def holds_state(saved: Any, parameters: Iterable[Any]) -> bool:
    """Return True if an object, or what it contains, is the state of a model or an optimizer.

    ``parameters``: the trained parameters as far as known. If none are known, any tensor counts.
    """
    import torch  # something is saved by it

    trained = list(parameters)
    addresses, shapes = {address for each in trained if (address := _address(each))}, {_shape(each) for each in trained}
    waiting, seen, inspected = deque([saved]), set[int](), 0
    while waiting and inspected < _MAX_OBJECTS:
        found = waiting.popleft()
        inspected += 1
        if isinstance(found, (str, bytes, int, float, complex, type(None))):
            continue
        if isinstance(found, (torch.nn.Module, torch.optim.Optimizer)):
            return True
        if isinstance(found, torch.Tensor):
            if not trained or isinstance(found, torch.nn.Parameter) or _address(found) in addresses:
                return True
        elif id(found) not in seen:
            seen.add(id(found))
            if isinstance(found, Mapping) and _is_state(found, shapes):
                return True
            waiting.extend(_content(found))
    return False


def _is_state(found: Mapping[object, object], shapes: set[tuple[int, ...]]) -> bool:
    if hasattr(found, "_metadata") or ("param_groups" in found and "state" in found):
        return True  # what Module.state_dict and Optimizer.state_dict return
    named = [value for name, value in found.items() if isinstance(name, str) and name in _STATES]
    if any((isinstance(value, Mapping) and value) or _shape(value) for value in named):
        return True
    arrays = [(name, shape) for name, value in found.items() if (shape := _shape(value))]
    if not arrays or not all(isinstance(name, str) for name, _ in arrays):
        return False
    like = sum(str(name) in _NAMES or str(name).endswith(_ENDINGS) or shape in shapes for name, shape in arrays)
    return like * 2 >= len(arrays)


def _content(found: Any) -> Iterable[Any]:
    if isinstance(found, Mapping):
        return list(found.values())
    if isinstance(found, (list, tuple, set, frozenset, deque)):
        return list(found)[:_MAX_OBJECTS]
    held = getattr(found, "__dict__", None)
    return list(held.values()) if isinstance(held, dict) and not isinstance(found, type) and not callable(found) else ()


def _shape(value: Any) -> tuple[int, ...]:
    """Return an array's shape, ``()`` for anything else and for single numbers."""
    shape = getattr(value, "shape", ())
    return tuple(shape) if isinstance(shape, tuple) else ()


def _address(tensor: Any) -> int:
    with suppress(RuntimeError):  # one without a storage
        return int(tensor.data_ptr())
    return 0
