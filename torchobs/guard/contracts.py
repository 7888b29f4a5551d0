"""Contracts on tensors: shape, dtype, device, range, finite; and checks that say what is wrong, and where.

:meth:`Contract.check` of a tensor on a device waits for one transfer of three numbers.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf, isfinite, isnan
from typing import Any, NamedTuple, NoReturn

import torch

from torchobs import catalog
from torchobs.guard.records import Category, Severity, count, record_event
from torchobs.support.arguments import is_number
from torchobs.support.result import Checked, Problem
from torchobs.tensors.losses import wide_type
from torchobs.tensors.values import dense, is_without_data, name_of, shape_of, unwrapped


@dataclass(frozen=True, slots=True)
class Violation(Problem):
    """A broken part of a contract: ``type``, ``shape``, ``dtype``, ``device``, ``finite``, ``min``, ``max`` or ``norm``."""

    expected: str
    found: str
    index: tuple[int, ...] | None = None
    """Index of the first wrong element; in a batch its first number is the sample"""


def _violation(kind: str, name: str, expected: str, actual: str, index: tuple[int, ...] | None = None) -> Violation:
    actual += f", the first at {list(index)}" if index else ""
    return Violation(kind, name, f"{kind}: {actual}; expected {expected}", expected, actual, index)


@dataclass(frozen=True)
class ContractReport(Checked):
    """The result of :meth:`Contract.inspect`."""

    problems: tuple[Violation, ...]


def _wrong_values(contract: Contract, x: torch.Tensor, name: str) -> list[Violation]:
    """Return what is wrong by least value, largest value and norm; only then find out where."""
    has_range = contract.min is not None or contract.max is not None
    is_floating = x.dtype.is_floating_point or x.dtype.is_complex
    if not (has_range or contract.max_norm is not None or (contract.finite and is_floating)) or is_without_data(x):
        return []
    if has_range and x.dtype.is_complex:
        raise ValueError(f"{name} is complex, and complex numbers are in no order: use max_norm")
    values = ordered_values(x.detach())
    if not values.numel():
        return []
    numbers = [*torch.aminmax(values), *([norm_of(values)] if contract.max_norm is not None else [])]
    least, largest, *norm = torch.stack([number.to(wide_type(values.device)) for number in numbers]).tolist()
    violations = list[Violation]()

    def add(kind: str, expected: str, text: str, wrong: torch.Tensor) -> None:
        violations.append(_violation(kind, name, expected, text, _place(wrong, _shape(x))))

    if contract.finite and not (isfinite(least) and isfinite(largest)):
        wrong, nans = ~torch.isfinite(values), int(torch.isnan(values).sum())
        counts = ((nans, "NaN"), (int(wrong.sum()) - nans, "Inf"))
        text = " and ".join(f"{number:,} {word}" for number, word in counts if number)
        add("finite", "finite values", f"{text} among {wrong.numel():,} values", wrong)
    if isnan(least) and has_range:
        comparable = values[~values.isnan()]
        least, largest = map(float, torch.aminmax(comparable)) if comparable.numel() else (inf, -inf)
    for kind, bound, extreme, is_beyond, words in (
        ("min", contract.min, least, operator.lt, "or more"),
        ("max", contract.max, largest, operator.gt, "or less"),
    ):
        if bound is not None and is_beyond(extreme, limit := rounded(bound, values.dtype)):
            wrong = is_beyond(values, limit)
            shown = f"{extreme:g}" if is_beyond(float(f"{extreme:g}"), limit) else repr(extreme)
            text = f"{shown}, and {int(wrong.sum()):,} of {wrong.numel():,} values are beyond"
            add(kind, f"{bound:g} {words}", text, wrong)
    if norm and contract.max_norm is not None and not norm[0] <= contract.max_norm:
        violations.append(_violation("norm", name, f"{contract.max_norm:g} or less", f"{norm[0]:.6g}"))
    return violations


def _place(wrong: torch.Tensor, shape: tuple[Any, ...]) -> tuple[int, ...] | None:
    """Return the index of the first wrong element; None if the values do not have the tensor's own shape."""
    if wrong.shape[: len(shape)] != shape:
        return None
    index = torch.unravel_index(wrong.reshape(-1).to(torch.uint8).argmax(), wrong.shape)
    return tuple(map(int, index[: len(shape)]))


@lru_cache(maxsize=256)
def rounded(bound: float, dtype: torch.dtype) -> float:
    """Return a bound in the tensor's type: 0.1 in float32 is more than 0.1, and is within ``max=0.1``."""
    return float(torch.tensor(bound, dtype=dtype, device="cpu")) if dtype.is_floating_point and isfinite(bound) else bound


def norm_of(values: torch.Tensor) -> torch.Tensor:
    """Return the 2-norm; half precision is squared in float32, which does not overflow."""
    wide = torch.float64 if not values.is_floating_point() or values.dtype == torch.float64 else torch.float32
    norm: torch.Tensor = torch.linalg.vector_norm(values.to(wide))
    return norm


def ordered_values(x: torch.Tensor) -> torch.Tensor:
    """Return values that torch.aminmax takes: of a sparse tensor the stored ones, of a complex one both parts."""
    x, _ = dense(x)
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj().clone())  # torch has no real view of a view of compressed values
    if x.dtype is torch.bool:
        return x.to(torch.uint8)
    if not x.dtype.is_signed and x.dtype.itemsize > 1:  # uint16 to uint64: torch has no aminmax for them
        return x.to(torch.int64 if x.dtype.itemsize < 8 else torch.float64)  # noqa: PLR2004  # bytes
    return x.float() if x.is_floating_point() and x.dtype.itemsize == 1 else x


def _shape(x: Any) -> tuple[Any, ...]:
    """Return the shape; that of a jagged tensor has torch's symbolic sizes, which differ between different lengths."""
    return shape_of(x) if x.is_nested and x.layout is torch.strided else tuple(x.shape)


_NAME = re.compile(r"\*?[A-Za-z_]\w*", re.ASCII)
_ANY = "_"
_ELLIPSIS = "..."


class ShapePattern(NamedTuple):
    """A parsed pattern: ``rest`` names the part of any length between ``before`` and ``after``; ``None``: there is none."""

    text: str
    before: tuple[int | str, ...]
    rest: str | None
    after: tuple[int | str, ...]

    def mismatch(self, shape: Sequence[int], sizes: dict[str, object]) -> str | None:
        """Return why a shape does not match, or None if it does.

        Args:
            shape: the tensor's shape.
            sizes: sizes by name so far, shared by the tensors of one check; new names are added.
        """
        least = len(self.before) + len(self.after)
        if len(shape) < least or (len(shape) > least and self.rest is None):
            return f"{len(shape)} dimensions where {least}{' or more' if self.rest is not None else ''} are expected"
        end = len(shape) - len(self.after)
        positions = (*range(len(self.before)), *range(end, len(shape)))
        for position, wanted in zip(positions, (*self.before, *self.after), strict=True):
            size = shape[position]
            expected = wanted if isinstance(wanted, int) else size if wanted == _ANY else sizes.setdefault(wanted, size)
            if size != expected:
                why = f"{wanted} is expected" if isinstance(wanted, int) else f"{wanted} was {expected} before"
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
        ValueError: a word is none of these, or two of them stand for any number of dimensions.
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


KINDS = ("floating", "integer", "complex", "bool")
"""Groups of dtypes that a contract takes in place of a dtype"""
MOST_NAMED = 8
"""Most tensors that an event names"""


class ContractError(ValueError):
    """A tensor does not keep its contract. ``problems`` has everything that is wrong."""

    def __init__(self, problems: tuple[Violation, ...]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,)  # by its argument, not by its message: it travels between processes


@dataclass(frozen=True)
class Contract:
    """What a tensor has to be. Only given fields are checked; but floating-point values have to be finite by default.

    Raises:
        ValueError: an argument makes no sense; the message says what would.
    """

    shape: str | Sequence[int | None] | None = None
    """a pattern such as ``"batch 3 height width"``, see :func:`torchobs.guard.contracts.parse`"""
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

    def __post_init__(self) -> None:
        if self.shape is not None:
            object.__setattr__(self, "_pattern", parse(self.shape))
        if self.device is not None:
            object.__setattr__(self, "_device", _device(self.device))
        if not all(isinstance(kind, torch.dtype) or kind in KINDS for kind in _as_tuple(self.dtype)):
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
        """Return if ``x`` keeps the contract. Nothing is checked while torch.compile traces.

        Args:
            x: the tensor; its values are read without its gradients. Values of meta and fake tensors are not checked.
            name: its name in messages.
            sizes: sizes of named dimensions, shared by the tensors of one check.

        Raises:
            ContractError: it does not; the error says what is wrong, and where.
            ValueError: ``x`` is complex and the contract has a range.
        """
        if torch.compiler.is_compiling():
            return  # there are no values yet
        if problems := self.inspect(x, name, sizes).problems:
            refuse(problems)

    def inspect(self, x: torch.Tensor, name: str = "tensor", sizes: dict[str, object] | None = None) -> ContractReport:
        """Return what :meth:`check` would raise; nothing is recorded."""
        outer = self._check_metadata(x, name, {} if sizes is None else sizes)
        return ContractReport(tuple(outer or _wrong_values(self, unwrapped(x), name)))

    def _check_metadata(self, x: Any, name: str, sizes: dict[str, object]) -> list[Violation]:
        """Check type, shape, dtype and device."""
        if not isinstance(x, torch.Tensor):
            return [_violation("type", name, "a tensor", type(x).__name__)]
        violations = []
        if self._pattern is not None and (why := self._pattern.mismatch(_shape(x), sizes)) is not None:
            violations.append(_violation("shape", name, repr(self._pattern.text), f"{_shape(x)}, {why}"))
        if self.dtype is not None and not any(_is_dtype(x.dtype, kind) for kind in _as_tuple(self.dtype)):
            expected = " or ".join(map(name_of, _as_tuple(self.dtype)))
            violations.append(_violation("dtype", name, expected, name_of(x.dtype)))
        if self._device is not None and not (
            x.device.type == self._device.type and self._device.index in {None, x.device.index}
        ):
            violations.append(_violation("device", name, str(self.device), str(x.device)))
        return violations


def validate_inputs(
    inputs: Mapping[str, torch.Tensor | tuple[torch.Tensor, Contract]], contracts: Mapping[str, Contract] | None = None
) -> None:
    """Check several tensors together: a named dimension has the same size in all of them.

    Args:
        inputs: by name a tensor, or a tensor and its contract. Without a contract it has to be finite.
        contracts: by name.

    Raises:
        ContractError: with the problems of all tensors.
        ValueError: a contract names no input.
        TypeError: an argument is no dictionary, or a contract no ``Contract``.
    """
    contracts = contracts or {}
    if not all(isinstance(mapping, Mapping) for mapping in (inputs, contracts)):
        raise TypeError("inputs are a dictionary of tensors by name, as {'images': x}, and so are contracts")
    unknown = contracts.keys() - inputs.keys()
    if unknown:
        raise ValueError(f"there is no input {', '.join(sorted(unknown))}; there is {', '.join(inputs) or 'none'}")
    sizes: dict[str, object] = {}
    violations: list[Violation] = []
    for name, value in inputs.items():
        x, contract = value if isinstance(value, tuple) and len(value) == 2 else (value, contracts.get(name, Contract()))  # noqa: PLR2004
        if not isinstance(contract, Contract):
            raise TypeError(f"{name} has {type(contract).__name__} for a contract: guard.Contract(...) is needed")
        violations += contract.inspect(x, name, sizes).problems
    if violations:
        refuse(tuple(violations))


def refuse(problems: tuple[Violation, ...]) -> NoReturn:
    """Record what is wrong, and raise ``ContractError``."""
    for kind, number in Counter(problem.kind for problem in problems).items():
        count(catalog.GUARD_VIOLATIONS, number, Category.CONTRACT, Severity.ERROR, what=kind)
    first, named = problems[0], ", ".join(list(dict.fromkeys(problem.where for problem in problems))[:MOST_NAMED])
    about = {"what": first.kind, "tensor": named, "found": first.found, "expected": first.expected}
    record_event(catalog.EVENT_GUARD_VIOLATION, Category.CONTRACT, Severity.ERROR, **about)
    raise ContractError(problems)


def _as_tuple(dtype: Any) -> tuple[Any, ...]:
    return dtype if isinstance(dtype, tuple) else () if dtype is None else (dtype,)


def _is_dtype(dtype: torch.dtype, kind: torch.dtype | str) -> bool:
    kinds = {"floating": dtype.is_floating_point, "complex": dtype.is_complex, "bool": dtype is torch.bool}
    kinds["integer"] = not any(kinds.values())
    return kinds[kind] if isinstance(kind, str) else dtype is kind


def _device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device {device!r}: as torch.device takes it, such as 'cuda' or 'cuda:0'") from error
