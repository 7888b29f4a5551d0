"""Tells while it goes on that the loss does not fall for a reason: weight decay, or steps that are too short."""

from __future__ import annotations

from math import isfinite, nan
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.detect.no_progress import Cause, Course, Hyperparameters, Rule, cause_of, rule_of
from torchobs.flight.metrics.loss_course import course
from torchobs.probes.optimizer.hyperparameters import number_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchobs.flight.writer.series_table import Cell
    from torchobs.probes.core.context import ProbeContext

_FIRST = "0"
"""The first parameter group"""
_READ = ((catalog.OPTIMIZER_WEIGHT_DECAY, _FIRST), (catalog.OPTIMIZER_MOMENTUM, _FIRST), (catalog.GRAD_CLIP_MAX_NORM, ""))


class ProgressWatch:
    """One per session, for the sampler thread. It costs a comparison where the loss has fallen."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._given = Hyperparameters()
        self._cells: list[Cell | None] = []
        self._rates: list[Cell] = []
        self._known: set[tuple[Any, ...]] = set()
        self._rule = Rule()
        self._series = 0
        self._told: Cause | None = None
        self._told_at = 0
        """number of losses at the last event"""

    def sample(self) -> None:
        """Set the gauge, and write an event where the loss has newly been found not to fall, or for twice as long."""
        seen = course(self._context.writer.table.core.totals)
        given = self._hyperparameters()
        cause = cause_of(seen, given)
        before, self._told = self._told, cause
        if cause is None and before is None:
            return
        for kind in catalog.PROGRESS_CAUSES:
            is_it = cause is not None and kind == cause.kind
            if is_it or (before is not None and kind == before.kind):
                self._context.set_gauge(catalog.PROGRESS_BLOCKED, is_it, {"cause": kind})
        is_other = before is None or cause is None or before.kind != cause.kind
        if cause is not None and (is_other or seen.losses >= 2 * self._told_at):
            self._told_at = seen.losses
            self._tell(cause, seen, given)

    def _tell(self, cause: Cause, seen: Course, given: Hyperparameters) -> None:
        attributes = {
            "cause": cause.kind, "first": seen.first, "last": seen.late, "steps": seen.steps, "amount": cause.amount,
            "learning_rate": seen.rate, "weight_decay": given.weight_decay, "grad_norm": seen.norm, "max_norm": given.max_norm,
        }  # fmt: skip
        known = {name: value for name, value in attributes.items() if value is not None}
        self._context.event(catalog.EVENT_NO_PROGRESS, known)
        what = f"the loss has not fallen since the first step ({seen.first:.4g}, now {seen.late:.4g})"
        self._context.warn_limited("no progress", f"{what}; likely cause: {cause.kind.replace('_', ' ')}")

    def _hyperparameters(self) -> Hyperparameters:
        """Return them as they are, or as they were if the optimizer is gone: a function that trained has returned."""
        table = self._context.writer.table
        if len(table) != self._series:
            self._series = len(table)
            self._cells = [table.cells_of(metric).get(attribute) for metric, attribute in _READ]
            self._rates = [cell for group, cell in table.cells_of(catalog.LEARNING_RATE).items() if group != _FIRST]
        values = [cell.read() if cell is not None else nan for cell in self._cells]
        decay, momentum, limit = (value if isfinite(value) else None for value in values)
        if optimizers := self._context.recorder.optimizers():
            self._note_rule(optimizers)
            rates = [rate for cell in self._rates if isfinite(rate := cell.read())]
            other, initial = max(rates, default=0.0), _initial_rate(optimizers)
            self._given = Hyperparameters(self._rule, decay, momentum, other_rates=other, initial_rate=initial)
        return self._given._replace(max_norm=limit, resumed=self._context.recorder.models.resumed)

    def _note_rule(self, optimizers: list[Any]) -> None:
        """Find the optimizers' rule, where all have the same; else nothing is known."""
        kinds = {(type(one), *_deciding(one.param_groups[0])): one for one in optimizers}
        if kinds.keys() != self._known:
            self._known = set(kinds)
            rules = {rule_of([each.__name__ for each in type(one).__mro__], one.param_groups[0]) for one in kinds.values()}
            self._rule = rules.pop() if len(rules) == 1 else Rule()


def _deciding(group: Mapping[str, Any]) -> tuple[object, ...]:
    """Return what of a group decides about its rule."""
    return "d" in group, group.get("decoupled_weight_decay") is True, number_of(group.get("dampening"))


def _initial_rate(optimizers: list[Any]) -> float | None:
    """Return the highest rate that a scheduler has found in a group when it was made."""
    found = [number_of(group.get("initial_lr")) for one in optimizers for group in one.param_groups]
    return max((rate for rate in found if rate is not None), default=None)
