"""The mode to train in, found by timing what this device and this model can have within a budget of time."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torchobs.support.result import Result
from torchobs.tune.comparison import benchmark, first_batch
from torchobs.tune.difference import pair_of
from torchobs.tune.measurements import Benchmark, LeftOut
from torchobs.tune.plan import Plan, optimize

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import nn

_TRAINING = ("none", "amp", "compile", "full")
_INFERENCE = ("none", "amp", "compile", "inference")
_MOST_ROUNDS = 100


@dataclass(frozen=True)
class Recommendation(Result):
    """What :func:`auto` found. ``plan`` is None where nothing is faster than the model as it is, beyond noise."""

    plan: Plan | None
    """not applied yet, on the caller's own model"""
    reason: str
    left_out: tuple[LeftOut, ...]
    """modes that were not measured, and why"""
    took_s: float
    evidence: Benchmark | None
    """None where there was nothing to compare"""


def auto(  # noqa: PLR0913  # one keyword for each thing that can be asked for
    model: nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer | None = None,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    *,
    budget_s: float = 60.0,
    modes: Sequence[str] | None = None,
    level: str = "basic",
    progress: bool | None = None,
    **options: Any,
) -> Recommendation:
    """Time the modes that differ here, and return a plan of the fastest with the evidence; nothing is applied.

    Modes of which this device and model can have nothing, or the same as of another, are not timed. The model and the optimizer
    stay as they are (see :func:`benchmark`, which measures).

    Args:
        model: the model, on its device.
        batch: as :func:`benchmark` takes it.
        optimizer: an optimizer over the model's parameters, if steps are to have one.
        loss_fn: called with output and target; without it only forward passes are timed, as for inference.
        budget_s: seconds that it may take, more only for a compilation or a step that has begun, and for the fewest rounds.
        modes: modes to try; ``none`` is what they are compared with. By default those that can be faster.
        level: level of the plans.
        progress: show a bar on stderr; by default if that is a terminal.
        options: what else :func:`optimize` takes.

    Raises:
        ValueError: as :func:`benchmark`.
    """
    started = perf_counter()
    if isinstance(modes, str):
        raise ValueError(f"modes are a tuple of names, such as ({modes!r},)")  # noqa: TRY004  # as of every other
    wanted = tuple(modes) if modes is not None else _TRAINING if loss_fn is not None else _INFERENCE
    batch = first_batch(batch)
    options = {"example": pair_of(batch)[0] if loss_fn is not None else batch, **options}
    chosen, left_out = _different(model, ["none", *(mode for mode in wanted if mode != "none")], level, options)
    if len(chosen) == 1:
        return Recommendation(None, "no mode changes anything here", tuple(left_out), perf_counter() - started, None)
    found = benchmark(
        model,
        batch,
        optimizer,
        loss_fn,
        modes=chosen,
        level=level,
        rounds=_MOST_ROUNDS,
        budget_s=budget_s,
        progress=progress,
        **options,
    )
    left_out += found.left_out
    reason = found.reason if len(found.modes) > 1 else "no mode could be measured within the budget"
    plan = None
    if found.recommended != "none":
        plan = optimize(model, mode=found.recommended, level=level, **options)
    return Recommendation(plan, reason, tuple(left_out), perf_counter() - started, found)


def _different(model: nn.Module, modes: Sequence[str], level: str, options: dict[str, Any]) -> tuple[list[str], list[LeftOut]]:
    """Return the modes that do something else than those before them, and why the others are not to be timed."""
    seen: dict[frozenset[str], str] = {}
    chosen, left_out = [], []
    for mode in modes:
        changes = optimize(model, mode=mode, level=level, **options).changes
        if changes in seen:
            same = "nothing of it can be used here" if not changes else f"the same as {seen[changes]} here"
            left_out.append(LeftOut(mode, same))
        else:
            seen[changes] = mode
            chosen.append(mode)
    return chosen, left_out
