"""What a tensor has to be: shape, dtype, device, range, finite; and checks that say what was found, and where.

A tensor on a device costs one transfer of three numbers: :meth:`Contract.check` waits for it, :meth:`Contract.acheck` lets an
event loop go on, :meth:`Contract.check_later` returns at once.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isnan
from typing import Any, NamedTuple, NoReturn

import torch

from torchobs import catalog
from torchobs.guard.record import Category, Severity, count, record
from torchobs.guard.tensor_values import TensorValues, Violation, norm_of, rounded, shape_of
from torchobs.support.arguments import is_number

_NAME = re.compile(r"\*?[A-Za-z_]\w*", re.ASCII)
_ANY = "_"
_ELLIPSIS = "..."


class ShapePattern(NamedTuple):
    """A parsed pattern: ``before`` and ``after`` stand around a part of any length, which ``rest`` names (``None``: none)."""

    text: str
    before: tuple[int | str, ...]
    rest: str | None
    after: tuple[int | str, ...]

    def mismatch(self, shape: Sequence[int], sizes: dict[str, object]) -> str | None:
        """Return why a shape does not match, or None if it does.

        Args:
            shape: the tensor's shape.
            sizes: sizes of the names seen so far, which other tensors of one check share; new names are added.
        """
        if self.rest is None and len(shape) == len(self.before):  # of most patterns; fast
            for wanted, size in zip(self.before, shape, strict=True):
                if wanted != size and (isinstance(wanted, int) or (wanted != _ANY and sizes.setdefault(wanted, size) != size)):
                    break
            else:
                return None
        least = len(self.before) + len(self.after)
        if len(shape) < least or (len(shape) > least and self.rest is None):
            return f"{len(shape)} dimensions where {least}{' or more' if self.rest is not None else ''} are expected"
        end = len(shape) - len(self.after)
        pairs = [*zip(self.before, shape, strict=False), *zip(self.after, shape[end:], strict=True)]
        for index, (wanted, size) in enumerate(pairs):
            position = index if index < len(self.before) else end + index - len(self.before)
            why = _size_mismatch(wanted, size, sizes)
            if why is not None:
                return f"dimension {position} is {size} where {why}"
        if self.rest is not None and self.rest not in {_ELLIPSIS, _ANY}:
            between = tuple(shape[len(self.before) : end])
            if sizes.setdefault(f"*{self.rest}", between) != between:
                return f"*{self.rest} is {between} where it was {sizes[f'*{self.rest}']}"
        return None


def parse(shape: str | Sequence[int | None]) -> ShapePattern:
    """Parse a pattern.

    Args:
        shape: words separated by spaces, one for each dimension: a number is an exact size, a name any size (but the same
            wherever the name occurs), ``_`` any size, ``...`` or ``*name`` any number of dimensions, once. ``""`` is a scalar.
            Or a sequence of sizes, where ``None`` is any size.

    Raises:
        ValueError: a word is none of these, or two of them may have any length.
    """
    if not isinstance(shape, (str, Sequence)):
        raise ValueError(f"shape {shape!r}: a pattern such as 'batch 3 height width', or a sequence of sizes")  # noqa: TRY004
    words = shape.split() if isinstance(shape, str) else [_ANY if size is None else str(size) for size in shape]
    parts: list[list[int | str]] = [[]]
    rest: str | None = None
    for word in words:
        if word == _ELLIPSIS or (word.startswith("*") and _NAME.fullmatch(word)):
            if rest is not None:
                raise ValueError(f"shape {' '.join(words)!r}: only one of its words may stand for any number of dimensions")
            rest = word.removeprefix("*")
            parts.append([])
        elif word.isdecimal() or _NAME.fullmatch(word):
            parts[-1].append(int(word) if word.isdecimal() else word)
        else:
            raise ValueError(f"shape {' '.join(words)!r}: {word!r} is no size, name, _, ... or *name")
    return ShapePattern(" ".join(words), tuple(parts[0]), rest, tuple(parts[1]) if rest is not None else ())


def _size_mismatch(wanted: int | str, size: int, sizes: dict[str, object]) -> str | None:
    if isinstance(wanted, int):
        return None if size == wanted else f"{wanted} is expected"
    if wanted != _ANY and sizes.setdefault(wanted, size) != size:
        return f"{wanted} was {sizes[wanted]} before"
    return None


KINDS = ("floating", "integer", "complex", "bool")
"""Names for groups of dtypes, which a contract takes in place of a dtype"""
_CPU = torch.device("cpu")
_PLAIN = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
"""Dtypes of most tensors, for which a check is fast"""
MOST_NAMED = 8
"""Tensors that an event names"""
POLL_S = 0.0005
"""How often an awaited answer of a device is looked for"""


class ContractError(ValueError):
    """A tensor is not what its contract says. ``violations`` has everything that is wrong."""

    def __init__(self, violations: tuple[Violation, ...]) -> None:
        super().__init__("\n".join(map(str, violations)))
        self.violations = violations

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.violations,)  # by its argument, not by its message: it travels between processes


@dataclass(frozen=True)
class Contract:
    """What a tensor has to be. What is not given is not checked, except that floating-point values have to be finite.

    Raises:
        ValueError: an argument makes no sense; the message says what does.
    """

    shape: str | Sequence[int | None] | None = None
    """pattern such as ``"batch 3 height width"``, see :func:`torchobs.guard.contracts.parse`"""
    dtype: torch.dtype | str | tuple[torch.dtype | str, ...] | None = None
    """a dtype, one of ``floating``, ``integer``, ``complex`` and ``bool``, or several of these"""
    device: torch.device | str | None = None
    """``"cuda"`` is any CUDA device"""
    min: float | None = None
    max: float | None = None
    finite: bool = True
    max_norm: float | None = None
    """largest 2-norm of all elements"""
    _pattern: ShapePattern | None = field(init=False, repr=False, compare=False, default=None)
    _device: torch.device | None = field(init=False, repr=False, compare=False, default=None)
    _passed: set[torch.dtype] = field(init=False, repr=False, compare=False, default_factory=set)
    """dtypes that were seen to be right"""

    def __post_init__(self) -> None:
        if self.shape is not None:
            object.__setattr__(self, "_pattern", parse(self.shape))
        if self.device is not None:
            object.__setattr__(self, "_device", _device(self.device))
        if not all(isinstance(kind, torch.dtype) or kind in KINDS for kind in _several(self.dtype)):
            raise ValueError(f"dtype {self.dtype!r}: a torch.dtype, one of {', '.join(KINDS)}, or a tuple of these")
        for name in ("min", "max", "max_norm"):
            bound = getattr(self, name)
            if bound is not None and (not is_number(bound) or isnan(bound)):
                raise ValueError(f"{name} is {bound!r}: a number, or None for no limit")
        if self.min is not None and self.max is not None and not self.min <= self.max:
            raise ValueError(f"min is {self.min} and max is {self.max}: nothing is between them")
        if self.max_norm is not None and not self.max_norm >= 0:
            raise ValueError(f"max_norm is {self.max_norm}, and a norm is 0 or more")

    def check(self, x: torch.Tensor, name: str = "tensor", sizes: dict[str, object] | None = None) -> None:
        """Return if ``x`` keeps the contract.

        Args:
            x: the tensor; its values are read without its gradients. Values of meta and fake tensors are not checked.
            name: its name in messages.
            sizes: sizes of named dimensions, shared by the tensors of one check.

        In a region that torch.compile traces nothing is checked.

        Raises:
            ContractError: it does not; the error says what was found, and where.
            ValueError: ``x`` is complex and the contract has a range.
        """
        if torch.compiler.is_compiling():
            return  # values are not known while a graph is made of them
        if self._surely_keeps(x, sizes):
            return
        found = self.violations(x, name, sizes)
        if found:
            refuse(found)

    def violations(
        self, x: torch.Tensor, name: str = "tensor", sizes: dict[str, object] | None = None
    ) -> tuple[Violation, ...]:
        """Return what :meth:`check` would raise; nothing is recorded."""
        return tuple(self._outer(x, name, {} if sizes is None else sizes)) or tuple(TensorValues(self, x, name).wait())

    def check_later(self, x: torch.Tensor, name: str = "tensor", sizes: dict[str, object] | None = None) -> PendingCheck:
        """Check shape, dtype and device now, and the values once the device has them: nothing waits for it.

        The result keeps ``x`` alive. Raises ``ContractError`` as :meth:`check` does.
        """
        outer = tuple(self._outer(x, name, {} if sizes is None else sizes))
        if outer:
            refuse(outer)
        return PendingCheck(TensorValues(self, x, name))

    async def acheck(self, x: torch.Tensor, name: str = "tensor", sizes: dict[str, object] | None = None) -> None:
        """As :meth:`check`; other tasks of the event loop run while a device computes."""
        pending = self.check_later(x, name, sizes)
        while not pending.done():  # noqa: ASYNC110  # a CUDA event can only be asked
            await asyncio.sleep(POLL_S)
        pending.result()

    def _surely_keeps(self, x: Any, sizes: dict[str, object] | None) -> bool:
        """Return True if a plain tensor on the CPU keeps the contract; False says nothing. It is there for its speed."""
        if (
            type(x) is not torch.Tensor
            or x.layout is not torch.strided
            or x.dtype not in _PLAIN
            or sizes is not None
            or x.is_nested
        ):
            return False
        if x.device != _CPU or (self._device is not None and self._device != _CPU) or not x.numel():
            return False
        if x.dtype not in self._passed:
            if self.dtype is not None and not any(_is_dtype(x.dtype, kind) for kind in _several(self.dtype)):
                return False
            self._passed.add(x.dtype)
        return (self._pattern is None or self._pattern.mismatch(x.shape, {}) is None) and self._surely_has_values(x.detach())

    def _surely_has_values(self, values: torch.Tensor) -> bool:
        low, high = self.min, self.max
        if self.finite or low is not None or high is not None:
            least, largest = (extreme.item() for extreme in torch.aminmax(values))
            # a comparison with NaN is False, and a NaN is both the least and the largest
            low, high = (
                rounded(-inf if low is None else low, values.dtype),
                rounded(inf if high is None else high, values.dtype),
            )
            if not low <= least or not largest <= high:
                return False
            if self.finite and (least == -inf or largest == inf):
                return False
        return self.max_norm is None or bool(norm_of(values).item() <= self.max_norm)

    def _outer(self, x: Any, name: str, sizes: dict[str, object]) -> list[Violation]:
        """Check what needs no values."""
        if not isinstance(x, torch.Tensor):
            return [Violation(name, "type", "a tensor", type(x).__name__)]
        found = []
        if self._pattern is not None and (why := self._pattern.mismatch(shape_of(x), sizes)) is not None:
            found.append(Violation(name, "shape", repr(self._pattern.text), f"{shape_of(x)}, {why}"))
        if self.dtype is not None and not any(_is_dtype(x.dtype, kind) for kind in _several(self.dtype)):
            found.append(Violation(name, "dtype", " or ".join(map(_dtype_name, _several(self.dtype))), _dtype_name(x.dtype)))
        if self._device is not None and not _is_on(x.device, self._device):
            found.append(Violation(name, "device", str(self.device), str(x.device)))
        return found


class PendingCheck:
    """A check whose answer a device has not delivered yet."""

    def __init__(self, values: TensorValues) -> None:
        self._values: TensorValues | None = values

    def done(self) -> bool:
        """Return True if :meth:`result` would not wait."""
        return self._values is None or self._values.done()

    def result(self) -> None:
        """Wait for the answer; return if the contract is kept. Raises ``ContractError``, once."""
        values, self._values = self._values, None
        found = tuple(values.wait()) if values is not None else ()
        if found:
            refuse(found)


def validate_inputs(
    inputs: Mapping[str, torch.Tensor | tuple[torch.Tensor, Contract]], contracts: Mapping[str, Contract] | None = None
) -> None:
    """Check several tensors together: a named dimension has the same size in all of them.

    Args:
        inputs: by name a tensor, or a tensor and its contract. One that ``contracts`` does not name has to be finite.
        contracts: by name.

    Raises:
        ContractError: with the violations of all tensors.
        ValueError: a contract names no input.
        TypeError: an argument is no dictionary, or a contract none.
    """
    contracts = contracts or {}
    if not all(isinstance(each, Mapping) for each in (inputs, contracts)):
        raise TypeError("inputs are a dictionary of tensors by name, as {'images': x}, and so are contracts")
    unknown = contracts.keys() - inputs.keys()
    if unknown:
        raise ValueError(f"there is no input {', '.join(sorted(unknown))}; there is {', '.join(inputs) or 'none'}")
    sizes: dict[str, object] = {}
    found: list[Violation] = []
    for name, given in inputs.items():
        x, contract = given if isinstance(given, tuple) and len(given) == 2 else (given, contracts.get(name, Contract()))  # noqa: PLR2004
        if not isinstance(contract, Contract):
            raise TypeError(f"{name} has {type(contract).__name__} for a contract: guard.Contract(...) is needed")
        found += contract.violations(x, name, sizes)
    if found:
        refuse(tuple(found))


def refuse(found: tuple[Violation, ...]) -> NoReturn:
    """Record what is wrong, and raise ``ContractError``."""
    for what, number in Counter(violation.what for violation in found).items():
        count(catalog.GUARD_VIOLATIONS, number, Category.CONTRACT, Severity.ERROR, what=what)
    first, tensors = found[0], dict.fromkeys(violation.tensor for violation in found)
    attributes = {"tensor": ", ".join(list(tensors)[:MOST_NAMED]), "found": first.found, "expected": first.expected}
    record(catalog.EVENT_GUARD_VIOLATION, Category.CONTRACT, Severity.ERROR, what=first.what, **attributes)
    raise ContractError(found)


def _several(dtype: Any) -> tuple[Any, ...]:
    return dtype if isinstance(dtype, tuple) else () if dtype is None else (dtype,)


def _is_dtype(dtype: torch.dtype, kind: torch.dtype | str) -> bool:
    if kind == "floating":
        return dtype.is_floating_point
    if kind == "complex":
        return dtype.is_complex
    if kind == "bool":
        return dtype is torch.bool
    if kind == "integer":
        return not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool
    return dtype is kind


def _dtype_name(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


def _device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device {device!r}: as torch.device takes it, such as 'cuda' or 'cuda:0'") from error


def _is_on(device: torch.device, wanted: torch.device) -> bool:
    return device.type == wanted.type and wanted.index in {None, device.index}
