"""Find the input that torch refused, as it was not finite, in a forward pass without a graph: a policy's that acts.

``torch.distributions`` and some losses raise then. The values are still in variables of the functions that the exception
leaves. Of these, only torch's own tensors and arrays of NumPy's are looked at, also in lists and dictionaries: no code of the
user's runs.
"""

from __future__ import annotations

import re
import sys
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs.probes.nonfinite.code import is_users, locals_of
from torchobs.probes.nonfinite.ending import is_idle
from torchobs.probes.nonfinite.values import Condition, condition, explains

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

MOST_ITEMS = 64
"""A batch has no more parts; what is longer is a data set, or a state"""
_MOST_COPIED = 1 << 24
"""Elements of an array"""
_ABOUT_VALUES = re.compile(
    r"\b(nan|inf|infinite|finite|infinity)\b|between 0 and 1|invalid values|within the support", re.IGNORECASE
)


class RefusedInput(NamedTuple):
    """An input that is not finite. ``by``: the class or function of torch's that raised; ``line``: where the variable is."""

    name: str
    value: Any
    line: str
    by: str


def refused_input(error: BaseException | None) -> RefusedInput | None:
    """Return the outermost variable that is not finite, where torch has refused such a value; ``None`` in all other cases.

    One whose samples agree with those of the value that was refused comes first: labels may be missing elsewhere.
    """
    frames = list(traceback.walk_tb(error.__traceback__)) if error is not None else []
    users = [(frame, line) for frame, line in frames if is_users(frame.f_code)]
    if not users or users[-1][0] is frames[-1][0] or not _is_about_values(error):
        return None
    torchs = [frame for frame, _ in frames[frames.index(users[-1]) + 1 :]]
    refused = [value for frame in torchs for _, value in _held(frame)]
    if not refused:
        return None
    found = [
        RefusedInput(name, value, f"{frame.f_code.co_filename}:{line}", _title(torchs[0]))
        for frame, line in users for name, value in _held(frame)
    ]  # fmt: skip
    agreeing = (each for each in found if any(explains(each.value, value) for value in refused))
    return next(agreeing, found[0] if found else None)


def _is_about_values(error: BaseException | None) -> bool:
    """Return True for what torch raises of a value: others, as of a shape, say nothing about what is not finite nearby."""
    words = error.args[0] if type(error) in {ValueError, RuntimeError} and error is not None and error.args else ""
    return type(words) is str and _ABOUT_VALUES.search(words) is not None


def _title(frame: FrameType) -> str:
    owner = locals_of(frame).get("self")
    return frame.f_code.co_name if owner is None else type(owner).__name__


def _held(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Yield what a function's variables hold that is not finite, each by its name; arrays as tensors."""
    import torch  # torch is optional until training begins

    for name, value in locals_of(frame).items():
        for path, item in _parts(name, value):
            tensor = item if type(item) is torch.Tensor else _tensor_of_array(item)
            if tensor is not None and tensor.grad_fn is None and is_idle(tensor.device) and condition(tensor) is Condition.BAD:
                yield path, tensor


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) in {list, tuple}:
        yield from ((f"{name}[{index}]", each) for index, each in enumerate(value[:MOST_ITEMS]))
    elif type(value) is dict and len(value) <= MOST_ITEMS:
        yield from ((f"{name}[{key!r}]", each) for key, each in value.items() if type(key) in {str, int})
    else:
        yield name, value


def _tensor_of_array(value: Any) -> Any:
    """Return the values of an array of NumPy's as a tensor; ``None`` for anything else."""
    import torch  # torch is optional until training begins

    numpy: Any = sys.modules.get("numpy")
    array = getattr(numpy, "ndarray", None)  # absent while it is imported
    if array is None or type(value) is not array or value.dtype.kind != "f" or not value.dtype.isnative:
        return None
    if value.dtype.itemsize > torch.float64.itemsize or value.size > _MOST_COPIED:
        return None
    return torch.from_numpy(value.copy())  # of one that is read-only torch would warn
