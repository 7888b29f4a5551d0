"""``early_stopping``: when to stop; ``validation``: time and mean metrics of a validation; both as events and series."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, Literal

import torch

from torchobs import api, catalog
from torchobs.debug.findings import record_finding, record_findings, record_series
from torchobs.debug.tensors import require
from torchobs.support.arguments import is_number, is_text, is_whole
from torchobs.support.result import Checked, Problem, fill
from torchobs.tensors.losses import wide_type
from torchobs.tensors.running import evaluating

if TYPE_CHECKING:
    from collections.abc import Iterator

Mode = Literal["min", "max"]


@dataclass(frozen=True, slots=True)
class StopDecision(Checked):
    """A stopper's decision about one value: ``bool()`` is true if training should stop, ``ok`` if it goes on."""

    monitor: str
    value: float
    check: int
    """Number of this check, from 1"""
    improved: bool
    best: float | None
    """``None`` before the first finite value"""
    best_check: int | None
    patience: int
    patience_left: int
    """Checks without improvement until it stops"""
    stop: bool
    reason: str

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Why training should stop."""
        return (Problem("early_stop", self.monitor, self.reason),) if self.stop else ()

    def __bool__(self) -> bool:
        """Return whether training should stop."""
        return self.stop


class EarlyStopper:
    """Decides after each check; see :func:`early_stopping`."""

    def __init__(self, monitor: str, patience: int, mode: str, min_delta: float) -> None:
        self.monitor, self.patience, self.mode = monitor, patience, mode
        self._min_delta, self._sign = min_delta, 1.0 if mode == "min" else -1.0
        self._best, self._best_check, self._checks, self._stopped = inf, 0, 0, False
        self.last: StopDecision | None = None

    def __call__(self, value: Any) -> StopDecision:
        """Decide by the value of one more check.

        Args:
            value: a number, a tensor with one element, or a mapping that has the monitor's name.

        Raises:
            KeyError: the mapping does not have it.
        """
        if hasattr(value, "keys"):
            if self.monitor not in value:
                raise KeyError(f"{self.monitor!r} is not among {', '.join(map(str, value)) or 'the metrics, which are none'}")
            value = value[self.monitor]
        number = float(value)
        self._checks += 1
        directed = self._sign * number
        improved = isfinite(number) and directed < self._best - self._min_delta
        if improved:
            self._best, self._best_check = directed, self._checks
        left = max(0, self.patience - (self._checks - self._best_check))
        reason = self._reason(number, left)
        decision = StopDecision(
            self.monitor, number, self._checks, improved, self._sign * self._best if self._best_check else None,
            self._best_check or None, self.patience, left, bool(reason), reason,
        )  # fmt: skip
        self.last = decision
        self._record(decision)
        return decision

    def _reason(self, number: float, left: int) -> str:
        if not isfinite(number):
            return f"{self.monitor} is {number}"
        if left == 0:
            best = f"its best, {self._sign * self._best:.6g}" if self._best_check else "the beginning"
            return f"{self.monitor} has not improved in {self._checks - self._best_check} checks since {best}"
        return ""

    def _record(self, decision: StopDecision) -> None:
        record_series({f"{self.monitor}.best": decision.best, f"{self.monitor}.patience_left": decision.patience_left})
        about = {
            "monitor": self.monitor, "value": decision.value, "best": decision.best, "patience_left": decision.patience_left,
            "stop": decision.stop, "improved": decision.improved,
        }  # fmt: skip
        api.record_event(catalog.EVENT_DEBUG_EARLY_STOPPING, {name: x for name, x in about.items() if x is not None})
        if decision.stop and not self._stopped:
            self._stopped = True
            record_finding("early_stop", decision.reason, function="early_stopping", name=self.monitor)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"monitor": self.monitor, "best": self._best, "best_check": self._best_check, "checks": self._checks}

    def load_state_dict(self, state: Any) -> None:
        """Go on from a checkpoint.

        Raises:
            ValueError: it is no stopper's state, or that of a stopper with another monitor.
        """
        if not isinstance(state, Mapping) or not {"monitor", "best", "best_check", "checks"} <= state.keys():
            raise ValueError(f"a stopper's state_dict() is needed, not {state!r:.100}")
        if state["monitor"] != self.monitor:
            raise ValueError(f"the state is of a stopper that goes by {state['monitor']!r}, not by {self.monitor!r}")
        self._best, self._best_check, self._checks = state["best"], state["best_check"], state["checks"]


def early_stopping(monitor: str, patience: int = 10, *, mode: Mode, min_delta: float = 0.0) -> EarlyStopper:
    """Return a stopper to call with the value of each check; its decision is true if training should stop.

    Each decision is a ``torchobs.debug.early_stopping`` event; ``<monitor>.best`` and ``<monitor>.patience_left`` are series.

    Args:
        monitor: name of the value.
        patience: checks without an improvement after which it stops.
        mode: ``min`` if smaller is better, as of a loss, ``max`` if larger is, as of an accuracy.
        min_delta: an improvement is greater than this.

    Raises:
        ValueError: ``patience`` below 1, ``min_delta`` below 0, an unknown mode, or no name.
    """
    if not (is_text(monitor) and monitor and is_whole(patience) and patience >= 1 and is_number(min_delta) and min_delta >= 0):
        raise ValueError(f"early_stopping() needs a name, patience >= 1, min_delta >= 0, not {(monitor, patience, min_delta)}")
    if mode not in {"min", "max"}:
        raise ValueError(f"mode is 'min' or 'max', not {mode!r}")
    return EarlyStopper(monitor, patience, mode, min_delta)


@dataclass(frozen=True, slots=True)
class Validation(Checked):
    """One validation, filled at its end. ``add`` counts its batches."""

    name: str
    samples: int = 0
    batches: int = 0
    time_s: float | None = None
    samples_per_s: float | None = None
    metrics: dict[str, float] | None = None
    """Mean of each metric over the samples of the batches that have it"""
    problems: tuple[Problem, ...] = ()
    error: str | None = None
    """Class of the exception that ended it"""
    _sums: dict[str, tuple[Any, int]] = field(default_factory=dict, repr=False, compare=False)
    """Sum of each metric over its samples so far, and their number"""

    def add(self, samples: int = 1, **values: Any) -> None:
        """Count one batch with its values (numbers, or tensors with one element, which are read at the end)."""
        for name, value in values.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + _wide(value) * samples, count + samples
        fill(self, samples=self.samples + samples, batches=self.batches + 1)


def _wide(value: Any) -> Any:
    """Return a value in a type with exact enough sums: a sum in bfloat16 stops growing at 256 times its terms."""
    if not hasattr(value, "detach"):
        return float(value)
    return value.detach().to(wide_type(value.device))


@contextmanager
def validation(model: Any = None, name: str = "validation", *, stopper: EarlyStopper | None = None) -> Iterator[Validation]:
    """Enclose a validation: its time is the phase ``evaluation``; the values given to ``add`` are averaged and recorded.

    Gradients are off inside. A given model is in eval mode, and each module gets its mode back (by its own ``train()`` if it
    overrides that). Metrics become series (``<name>.<metric>``), the whole a ``torchobs.debug.validation`` event; the stopper
    is called with the metrics.

    Raises:
        TypeError: ``model`` is no module.
    """
    if model is not None:
        require(model, "nn.Module", "validation")
    result, begun = Validation(name), time.perf_counter()
    try:
        with api.phase("evaluation"), nullcontext() if model is None else evaluating(model), torch.no_grad():
            yield result
    except BaseException as error:
        fill(result, error=type(error).__name__)
        raise
    finally:
        _finish(result, time.perf_counter() - begun)
    if stopper is not None:
        stopper(result.metrics or {})


def _finish(result: Validation, elapsed: float) -> None:
    """Fill a validation that has ended, and record it."""
    metrics = {key: float(total) / max(count, 1) for key, (total, count) in result._sums.items()}
    texts = [f"{name} is {value}" for name, value in metrics.items() if not isfinite(value)]
    texts += ["no batch was added: call add(samples, ...) for each"] * (not result.batches and result.error is None)
    problems = record_findings("validation", [("validation", result.name, text) for text in texts])
    fill(result, time_s=elapsed, metrics=metrics, problems=problems, samples_per_s=elapsed and result.samples / elapsed)
    record_series({f"{result.name}.{name}": value for name, value in metrics.items()})
    about = {"name": result.name, "samples": result.samples, "batches": result.batches, "seconds": elapsed, **metrics}
    api.record_event(catalog.EVENT_DEBUG_VALIDATION, about)
