"""Outputs of a model: refuse or replace those that are not finite, check them for useless answers; safe inference."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from math import inf, isfinite, isnan, log
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import torch

from torchobs import catalog
from torchobs.guard.contracts import Contract, ordered_values, rounded
from torchobs.guard.records import Category, Severity, category_of, count, is_transient, record_event, record_recovery
from torchobs.guard.recovery import free_memory
from torchobs.support.arguments import is_number, is_whole
from torchobs.support.result import Checked, Problem, Result
from torchobs.tensors.batches import SEQUENCES, call, parts_of, walk, with_parts
from torchobs.tensors.losses import check_trained
from torchobs.tensors.running import evaluating
from torchobs.tensors.statistics import Moments, moments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


T = TypeVar("T")
_SUM_ERROR = 1e-3
"""Most distance from 1 of a sum of probabilities, in half precision"""
Policy = Literal["refuse", "clamp", "nan_to_num"]

UNIFORM_ENTROPY = 0.999
"""Mean entropy of class probabilities, as a share of the largest, at which predictions say nothing"""
CONSTANT_SPREAD = 1e-6
"""Standard deviation between samples, as a share of the mean size, below which all answers are the same; in a type of finer
resolution ``CONSTANT_UNITS`` times its ``eps``, since times of day in seconds since 1970 differ by less than 1e-6"""
CONSTANT_UNITS = 2.0
"""Rounding of the same answer gives at most one unit in the last place, up to the type's ``eps`` of it; rounding of the
operands as much again"""


class NonFiniteOutputError(ValueError):
    """A model's output has values that are not finite; with ``clamp``, NaN, which is in no range."""


@dataclass(frozen=True)
class OutputTensor(Result):
    """Numbers of one tensor of the outputs."""

    name: str
    numel: int
    nan_count: int
    inf_count: int
    entropy: float | None
    """mean entropy of the predicted classes as a share of the largest possible one; None without ``classes``"""
    spread: float | None
    """standard deviation between samples as a share of the mean size; None for fewer than two samples"""


@dataclass(frozen=True)
class OutputReport(Checked):
    """The result of :func:`check_outputs`: ``report["output.logits"]`` has the numbers of a tensor."""

    problems: tuple[Problem, ...]
    tensors: tuple[OutputTensor, ...]


def sanitize_outputs(
    outputs: T,
    policy: Policy = "refuse",
    *,
    low: float | None = None,
    high: float | None = None,
    nan: float = 0.0,
    name: str = "output",
) -> T:
    """Return finite outputs, or refuse them. Replaced values are counted, as a metric and an event of the run.

    Args:
        outputs: a tensor, or lists, tuples, dictionaries, dataclasses and ``ModelOutput`` of tensors; other values stay as
            they are.
        policy: ``refuse`` raises (a NaN is hidden only on request); ``clamp`` limits values to ``low`` and ``high``
            (the dtype's range by default), and raises for a NaN; ``nan_to_num`` also replaces NaN by ``nan``.
        low: least value, in ``clamp`` and ``nan_to_num``; like the others it is limited to the dtype's range.
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
    changed: T = _map_tensors(outputs, name, lambda tensor, path: _sanitize(tensor, path, policy, (low, high, nan)))
    return changed


def check_outputs(
    outputs: Any, *, contract: Contract | None = None, classes: int | None = None, name: str = "output"
) -> OutputReport:
    """Look for outputs that are not finite, out of range, uniform or constant.

    Args:
        outputs: as for :func:`sanitize_outputs`; samples are the first dimension of each floating-point tensor.
        contract: what each of these tensors has to be.
        classes: dimension of class scores (logits or probabilities), to find predictions that prefer no class.
        name: the outputs' name in messages; parts are named after their place, as ``output.logits`` or ``output[0]``.

    Raises:
        TypeError: there is no floating-point tensor in it, or ``contract`` is none.
        ValueError: no tensor has the dimension ``classes``, or one is on the device meta, where it has no values.
    """
    tensors = [(path, x) for path, x in walk(outputs, name) if x.is_floating_point() or x.is_complex()]
    if not tensors:
        raise TypeError(f"{name} has to have a tensor of floating-point numbers: {type(outputs).__name__} has none")
    if contract is not None and not isinstance(contract, Contract):
        raise TypeError(f"contract is {type(contract).__name__}: guard.Contract(...) is needed")
    if classes is not None and not is_whole(classes):
        raise ValueError(f"classes is {classes!r}: the number of a dimension of {name}")
    if classes is not None and not any(-x.dim() <= classes < x.dim() for _, x in tensors):
        shapes = ", ".join(f"{path} {tuple(x.shape)}" for path, x in tensors)
        raise ValueError(f"classes is {classes}: a dimension of {shapes}")
    if on_meta := [path for path, x in tensors if x.is_meta]:
        raise ValueError(f"{on_meta[0]} is on the device meta, where it has no values")
    rows, problems = list[OutputTensor](), list[Problem]()
    for path, x in tensors:
        row = _measure(path, x, classes if classes is not None and -x.dim() <= classes < x.dim() else None)
        rows.append(row)
        problems += _problems(row, x.dtype)
        problems += contract.inspect(x, path).problems if contract is not None else ()
    if problems:
        count(catalog.GUARD_FINDINGS, 1, Category.NUMERICS, Severity.WARNING, by="check_outputs")
        _event(problems[0].where, problems[0].text, "check", Severity.WARNING)
    return OutputReport(tuple(problems), tuple(rows))


def _measure(name: str, x: torch.Tensor, classes: int | None) -> OutputTensor:
    values = ordered_values(x.detach())
    values = values if values.dtype == torch.float64 else values.float()
    counts = Moments(*moments(values.reshape(-1)).tolist())
    entropy = spread = None
    if (
        counts.finite == values.numel() and values.shape == x.shape and values.numel()
    ):  # else it is sparse, nested, complex or a rank's part
        entropy, spread = _entropy(values, classes), _spread(values)
    return OutputTensor(name, values.numel(), int(counts.nan), int(counts.infinite), entropy, spread)


def _problems(row: OutputTensor, dtype: torch.dtype) -> Iterator[Problem]:
    if wrong := row.nan_count + row.inf_count:
        yield Problem("nonfinite", row.name, f"{wrong:,} of {row.numel:,} values are not finite")
    if row.entropy is not None and row.entropy >= UNIFORM_ENTROPY:
        text = f"predictions prefer no class: their mean entropy is {row.entropy:.2%} of the largest"
        yield Problem("uniform", row.name, text)
    if row.spread is not None and row.spread <= min(CONSTANT_SPREAD, CONSTANT_UNITS * torch.finfo(dtype).eps):
        yield Problem("constant", row.name, "the same output for every sample")


def _sanitize(x: torch.Tensor, name: str, policy: Policy, limits: tuple[float | None, float | None, float]) -> torch.Tensor:
    if not (x.dtype.is_floating_point or x.dtype.is_complex) or x.device.type == "meta" or not x.numel():
        return x
    values = ordered_values(x.detach())
    if not values.numel():
        return x
    dtype = x.dtype if x.dtype.itemsize == 1 else values.dtype
    range_ = torch.finfo(dtype)
    least, most, nan = (
        # torch refuses a bound outside the type; a value that was replaced by a rounded bound is within it the next time
        rounded(max(range_.min, min(range_.max, default if limit is None else limit)), dtype)
        for limit, default in zip(limits, (range_.min, range_.max, 0.0), strict=True)
    )
    if policy == "refuse":
        least, most = -inf, inf
    smallest, largest = (float(value) for value in torch.aminmax(values))  # NaN, if there is one: no comparison holds
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
    record_event(catalog.EVENT_GUARD_OUTPUTS, Category.NUMERICS, severity, output=name, problem=problem, policy=policy)


def _map_tensors(value: Any, name: str, function: Callable[[torch.Tensor, str], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value, name)
    if (parts := parts_of(value)) is None:
        return value
    place = "{}[{}]" if isinstance(value, SEQUENCES) else "{}.{}"
    changed = {key: _map_tensors(item, place.format(name, key), function) for key, item in parts.items()}
    return value if all(item is parts[key] for key, item in changed.items()) else with_parts(value, changed)


def _entropy(values: torch.Tensor, classes: int | None) -> float | None:
    if classes is None or values.shape[classes] < 2:  # noqa: PLR2004  # of one class there is nothing to prefer
        return None
    rows = values.movedim(classes, -1)
    sums = rows.sum(-1)
    are_probabilities = bool((rows >= 0).all()) and bool(((sums - 1).abs() < _SUM_ERROR).all())
    probabilities = rows if are_probabilities else rows.softmax(-1)
    return float(torch.special.entr(probabilities).sum(-1).mean()) / log(rows.shape[-1])


def _spread(values: torch.Tensor) -> float | None:
    if values.dim() == 0 or values.shape[0] < 2:  # noqa: PLR2004  # one sample has no spread
        return None
    size = float(values.abs().mean())
    # around the first sample: far from 0, sums have no digits left for the differences
    return float((values - values[:1]).std(0, correction=0).max()) / size if size > 0 else 0.0


@dataclass(frozen=True)
class InferenceResult(Checked):
    """What :func:`safe_inference` returns."""

    problems: tuple[Problem, ...]
    data: Any
    """the output; None if there is a problem"""
    error: Exception | None
    attempts: int
    severity: Severity
    category: Category | None
    """what the error is about; None without one"""
    evaluation_mode: bool
    """True if the model was put into evaluation mode; False for a function, which has none"""


def safe_inference(model: Callable[..., Any], batch: Any, *, max_retries: int = 3, backoff_s: float = 0.1) -> InferenceResult:
    """Call a model in evaluation mode and without gradients, and return its output or its error instead of raising.

    Errors that may be gone the next time are retried: out of memory, after freeing cached memory, and transient errors of input
    or output. An output that is not finite is a problem, and is not retried. Each module's own mode is put back.

    Args:
        model: a module, or a function.
        batch: a tensor, a tuple of arguments, or a mapping of keyword arguments.
        max_retries: further attempts after the first.
        backoff_s: wait before the first of them in seconds; doubled each time.

    Raises:
        ValueError: ``max_retries`` or ``backoff_s`` is negative, or no number, or the model is on the device meta.
        TypeError: the model cannot be called.
    """
    if not is_whole(max_retries) or max_retries < 0:
        raise ValueError(f"max_retries is {max_retries!r}; it is a whole number, 0 or more")
    if not (is_number(backoff_s) and 0 <= backoff_s < inf):
        raise ValueError(f"backoff_s is {backoff_s!r}; it is a time in seconds, 0 or more")
    if not callable(model):
        raise TypeError(f"model is a torch.nn.Module or a function, not {type(model).__name__}, which cannot be called")
    module = model if isinstance(model, torch.nn.Module) else None
    if module is not None:
        check_trained(module)
    attempt, is_module = 0, module is not None
    while True:
        attempt += 1
        try:
            # no inference mode: tables that a model caches in its first pass would break a later training
            with nullcontext() if module is None else evaluating(module), torch.no_grad():
                data = call(model, batch)
            sanitize_outputs(data)
        except Exception as error:  # noqa: BLE001  # returned to the caller
            category = Category.NUMERICS if isinstance(error, NonFiniteOutputError) else category_of(error)
            if attempt > max_retries or not (category is Category.MEMORY or is_transient(error)):
                record_recovery(category, Severity.ERROR, "return", error)
                problem = Problem(category.value, "", f"{type(error).__name__}: {error}")
                return InferenceResult(
                    (problem,), None, error.with_traceback(None), attempt, Severity.ERROR, category, is_module
                )
            record_recovery(category, Severity.INFO, "retry", error)
        else:
            severity = Severity.INFO if attempt == 1 else Severity.WARNING
            return InferenceResult((), data, None, attempt, severity, None, is_module)
        free_memory()
        time.sleep(backoff_s * 2 ** (attempt - 1))
