"""Outputs of a model: refused or replaced where they are not finite, judged as answers; safe_inference."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite, isnan, log
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import torch

from torchobs import catalog
from torchobs.guard.contracts import Contract, dense_values, rounded
from torchobs.guard.record import Category, Severity, category_of, count, is_transient, record, recovered
from torchobs.guard.recovery import free_memory
from torchobs.support.arguments import is_number, is_whole
from torchobs.support.result import Result
from torchobs.tensors.batches import SEQUENCES, parts_of, with_parts

if TYPE_CHECKING:
    from collections.abc import Callable


T = TypeVar("T")
_SUM_ERROR = 1e-3
"""Distance from 1 of probabilities' sum in half precision"""
Policy = Literal["refuse", "clamp", "nan_to_num"]

UNIFORM_ENTROPY = 0.999
"""Mean entropy of class probabilities, as a share of that of equal ones, from which predictions say nothing"""
CONSTANT_SPREAD = 1e-6
"""Standard deviation between samples, as a share of the mean size, below which a model gives the same answer to everything;
where its type tells finer ones apart, ``CONSTANT_UNITS`` of its rounding: times of day in seconds since 1970 differ by less"""
CONSTANT_UNITS = 2.0
"""Rounding of the same answer gives one unit in the last place at most, which is up to the type's ``eps`` of it; and as much
again in what it was computed of"""


class NonFiniteOutputError(ValueError):
    """A model's output has values that are not finite (or, for ``clamp``, are NaN, which no range helps)."""


@dataclass(frozen=True)
class OutputReport(Result):
    """What :func:`check_outputs` found."""

    ok: bool
    problems: tuple[str, ...]
    elements: int
    nan: int
    inf: int
    entropy: float | None
    """mean entropy of the predicted classes as a share of the largest possible one; None without ``classes``"""
    spread: float | None
    """standard deviation between samples as a share of the mean size; None for fewer than two samples"""


def sanitize_outputs(
    outputs: T,
    policy: Policy = "refuse",
    *,
    low: float | None = None,
    high: float | None = None,
    nan: float = 0.0,
    name: str = "output",
) -> T:
    """Return outputs that are finite, or refuse them. What is replaced is counted, as a metric and an event of the run.

    Args:
        outputs: a tensor, or lists, tuples, dictionaries, dataclasses and ``ModelOutput`` of tensors; other values stay as
            they are.
        policy: ``refuse`` raises (hiding a NaN is for those who ask for it); ``clamp`` limits values to ``low`` and ``high``
            (the dtype's range by default), and raises for a NaN; ``nan_to_num`` also replaces NaN by ``nan``.
        low: least value, in ``clamp`` and ``nan_to_num``; one beyond the dtype's range is the end of that, as the others are.
        high: largest value, likewise.
        nan: what a NaN becomes.
        name: the outputs' name in messages; parts are named after their place, as ``output.logits`` or ``output[0]``.

    Returns:
        The same structure. Tensors that need no change are the same objects.

    Raises:
        NonFiniteOutputError: see ``policy``.
        ValueError: the policy is none of these, a bound is no number, or the policy would have to change values that are
            complex, sparse, nested or distributed.
    """
    if policy not in get_args(Policy):
        raise ValueError(f"policy {policy!r}: one of {', '.join(get_args(Policy))}")
    for what, bound in (("low", low), ("high", high), ("nan", nan)):
        if bound is not None and (not is_number(bound) or isnan(bound)):
            raise ValueError(f"{what} is {bound!r}: a number is needed")
    if low is not None and high is not None and not low <= high:
        raise ValueError(f"low is {low} and high is {high}: nothing is between them")
    changed: T = _mapped(outputs, name, lambda tensor, path: _sanitized(tensor, path, policy, (low, high, nan)))
    return changed


def check_outputs(
    outputs: Any,
    *,
    contract: Contract | None = None,
    classes: int | None = None,
    name: str = "output",
) -> OutputReport:
    """Look for outputs that are not finite, out of range, uniform or constant.

    Args:
        outputs: floating point, the samples in its first dimension.
        contract: what the outputs have to be.
        classes: dimension of class scores (logits or probabilities), to find predictions that prefer no class.
        name: the outputs' name in messages.

    Raises:
        TypeError: ``outputs`` is no tensor of real floating-point numbers.
        ValueError: ``classes`` is no dimension.
    """
    _refuse_nonsense(outputs, contract, classes, name)
    values = outputs.detach() if outputs.dtype == torch.float64 else outputs.detach().float()
    nans, wrong = int(torch.isnan(values).sum()), int((~torch.isfinite(values)).sum())
    problems = [f"{wrong:,} of {values.numel():,} values are not finite"] if wrong else []
    if contract is not None:
        problems += [f"{found.what}: {found.found}; expected {found.expected}" for found in contract.violations(outputs, name)]
    entropy = spread = None
    if not wrong and values.numel():
        entropy, spread = _entropy(values, classes), _spread(values)
    if entropy is not None and entropy >= UNIFORM_ENTROPY:
        problems.append(f"predictions prefer no class: their mean entropy is {entropy:.2%} of the largest")
    if spread is not None and spread <= min(CONSTANT_SPREAD, CONSTANT_UNITS * torch.finfo(outputs.dtype).eps):
        problems.append("the same output for every sample")
    if problems:
        count(catalog.GUARD_FINDINGS, 1, Category.NUMERICS, Severity.WARNING, by="check_outputs")
        _event(name, problems[0], "check", Severity.WARNING)
    return OutputReport(not problems, tuple(problems), values.numel(), nans, wrong - nans, entropy, spread)


def _refuse_nonsense(outputs: Any, contract: Any, classes: Any, name: str) -> None:
    """Raise for what :func:`check_outputs` cannot look at."""
    if not isinstance(outputs, torch.Tensor) or not outputs.is_floating_point():
        raise TypeError(f"{name} has to be a tensor of floating-point numbers")
    if outputs.layout is not torch.strided or outputs.device.type == "meta" or hasattr(outputs, "to_local"):
        raise TypeError(f"{name} has to be dense, on a device, and whole: not sparse, nested, meta or distributed")
    if contract is not None and not isinstance(contract, Contract):
        raise TypeError(f"contract is {type(contract).__name__}: guard.Contract(...) is needed")
    if classes is not None and not is_whole(classes):
        raise ValueError(f"classes is {classes!r}: the number of a dimension of {name}")
    if classes is not None and not -outputs.dim() <= classes < outputs.dim():
        raise ValueError(f"classes is {classes}: a dimension of {name}, whose shape is {tuple(outputs.shape)}")


def _sanitized(x: torch.Tensor, name: str, policy: Policy, limits: tuple[float | None, float | None, float]) -> torch.Tensor:
    if not (x.dtype.is_floating_point or x.dtype.is_complex) or x.device.type == "meta" or not x.numel():
        return x
    values = dense_values(x.detach())
    if not values.numel():
        return x
    dtype = x.dtype if x.dtype.itemsize == 1 else values.dtype
    range_ = torch.finfo(dtype)
    least, most, nan = (
        # torch refuses a bound that the type cannot hold; what was replaced by one is within it the next time
        rounded(max(range_.min, min(range_.max, default if each is None else each)), dtype)
        for each, default in zip(limits, (range_.min, range_.max, 0.0), strict=True)
    )
    if policy == "refuse":
        least, most = -inf, inf
    smallest, largest = (float(each) for each in torch.aminmax(values))  # NaN, if there is one: no comparison holds
    if least <= smallest and largest <= most and isfinite(smallest) and isfinite(largest):
        return x
    nans, infinite = int(torch.isnan(values).sum()), int(torch.isinf(values).sum())
    if (policy == "refuse" and nans + infinite) or (policy == "clamp" and nans):
        _record(name, nans + infinite, policy, Severity.ERROR)
        advice = " (clamp keeps NaN: use nan_to_num)" if policy == "clamp" else ""
        raise NonFiniteOutputError(f"{name}: {nans:,} NaN and {infinite:,} Inf among {x.numel():,} values{advice}")
    if x.is_complex() or x.layout is not torch.strided or hasattr(x, "to_local"):
        raise ValueError(f"{name} is complex, sparse, nested or distributed: its only policy is refuse")
    x = x.float() if dtype.itemsize == 1 else x  # float8 has no comparisons
    changed = int((~((x >= least) & (x <= most))).sum())
    _record(name, changed, policy, Severity.WARNING)
    return torch.where(torch.isnan(x), nan, x.clamp(least, most)).to(dtype)


def _record(name: str, number: int, policy: Policy, severity: Severity) -> None:
    count(catalog.GUARD_SANITIZED, number, Category.NUMERICS, severity, policy=policy)
    _event(name, f"{number:,} values", policy, severity)


def _event(name: str, problem: str, policy: str, severity: Severity) -> None:
    record(catalog.EVENT_GUARD_OUTPUTS, Category.NUMERICS, severity, output=name, problem=problem, policy=policy)


def _mapped(value: Any, name: str, function: Callable[[torch.Tensor, str], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value, name)
    if (parts := parts_of(value)) is None:
        return value
    place = "{}[{}]" if isinstance(value, SEQUENCES) else "{}.{}"
    changed = {key: _mapped(item, place.format(name, key), function) for key, item in parts.items()}
    return value if all(item is parts[key] for key, item in changed.items()) else with_parts(value, changed)


def _entropy(values: torch.Tensor, classes: int | None) -> float | None:
    if classes is None or values.shape[classes] < 2:  # noqa: PLR2004  # of one class there is nothing to prefer
        return None
    rows = values.movedim(classes, -1)
    sums = rows.sum(-1)
    given = bool((rows >= 0).all()) and bool(((sums - 1).abs() < _SUM_ERROR).all())
    probabilities = rows if given else rows.softmax(-1)
    return float(torch.special.entr(probabilities).sum(-1).mean()) / log(rows.shape[-1])


def _spread(values: torch.Tensor) -> float | None:
    if values.dim() == 0 or values.shape[0] < 2:  # noqa: PLR2004  # one sample has no spread
        return None
    size = float(values.abs().mean())
    # around the first sample: sums of values far from 0 have no digits left for what is between them
    return float((values - values[:1]).std(0, correction=0).max()) / size if size > 0 else 0.0


@dataclass(frozen=True)
class InferenceResult(Result):
    """What :func:`safe_inference` returns."""

    success: bool
    data: Any
    """the output; None without success"""
    error: Exception | None
    attempts: int
    severity: Severity
    category: Category | None
    """what the error is about; None if there was none"""


def safe_inference(model: Callable[..., Any], x: Any, max_retries: int = 3, *, backoff_s: float = 0.1) -> InferenceResult:
    """Call a model for its output, without gradients, and return what became of it instead of raising.

    What may be better next time is tried again: an out-of-memory error after freeing cached memory, a transient error of input
    or output. An output that is not finite is no success, and is not tried again.

    Args:
        model: called with ``x``, or with ``**x`` for a mapping. A module is called in the mode that it is in.
        x: the input.
        max_retries: further attempts after the first.
        backoff_s: wait before the first of them in seconds; doubled each time.

    Raises:
        ValueError: ``max_retries`` or ``backoff_s`` is negative, or no number.
        TypeError: the model cannot be called.
    """
    if not is_whole(max_retries) or max_retries < 0:
        raise ValueError(f"max_retries is {max_retries!r}; it is a whole number, 0 or more")
    if not (is_number(backoff_s) and 0 <= backoff_s < inf):
        raise ValueError(f"backoff_s is {backoff_s!r}; it is a time in seconds, 0 or more")
    if not callable(model):
        raise TypeError(f"model is {type(model).__name__}, which cannot be called")
    attempt = 0
    while True:
        attempt += 1
        try:
            with torch.no_grad():  # tables that a first pass makes, in inference mode, would break a training that comes after
                data = model(**x) if isinstance(x, Mapping) else model(x)
            sanitize_outputs(data)
        except Exception as error:  # noqa: BLE001  # returned to the caller, who asked for that
            category = Category.NUMERICS if isinstance(error, NonFiniteOutputError) else category_of(error)
            if attempt > max_retries or not (category is Category.MEMORY or is_transient(error)):
                recovered(category, Severity.ERROR, "return", error)
                return InferenceResult(False, None, error.with_traceback(None), attempt, Severity.ERROR, category)  # noqa: FBT003
            recovered(category, Severity.INFO, "retry", error)
        else:
            return InferenceResult(True, data, None, attempt, Severity.INFO if attempt == 1 else Severity.WARNING, None)  # noqa: FBT003
        free_memory()
        time.sleep(backoff_s * 2 ** (attempt - 1))
