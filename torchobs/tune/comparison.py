"""Modes of tune.optimize() timed against each other on one model: which is faster, by how much, at what loss of accuracy."""

from __future__ import annotations

from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchobs import api, catalog
from torchobs.support.arguments import is_number, is_whole
from torchobs.support.kept_state import random_states_kept
from torchobs.support.model_calls import call
from torchobs.support.samplers import generators
from torchobs.tune.copies import OthersGradients, copied, originals_kept
from torchobs.tune.difference import outputs, pair_of
from torchobs.tune.measurements import Benchmark, LeftOut, ModeResult, recommend
from torchobs.tune.peak_memory import peak_bytes, synchronize
from torchobs.tune.plan import Plan, optimize
from torchobs.tune.progress import Progress
from torchobs.tune.quartiles import quartiles
from torchobs.tune.rounds import orders
from torchobs.tune.techniques import FAILURES, first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    LossFunction = Callable[[Any, Any], torch.Tensor]

_BEGINNING = 0.5
"""Share of a budget within which modes are tried for the first time; the rest is for rounds"""
_LEAST_ROUNDS = 6
"""Of fewer a quartile is hardly more than the second largest value"""


def benchmark(  # noqa: PLR0913  # one keyword for each thing that can be asked for
    model: nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer | None = None,
    loss_fn: LossFunction | None = None,
    *,
    modes: Sequence[str] = ("none", "amp", "compile"),
    level: str = "basic",
    rounds: int = 20,
    warmup: int = 3,
    budget_s: float | None = None,
    progress: bool | None = None,
    **options: Any,
) -> Benchmark:
    """Time steps of a model in each mode, in rounds of all modes, so that a change of the machine's speed meets all alike.

    Model, optimizer, loss function and random state are as before afterwards: the steps are done by copies, which need room
    beside them, and what a loss function refers to besides gets its gradients and buffers back. Steps with an optimizer are
    recorded as training steps, if a session runs. On a GPU torch's peak of allocated memory is reset.

    Args:
        model: the model, on its device.
        batch: the model's input as ``Plan.check`` takes it, or, with a loss function, a pair of input and target; or a
            DataLoader, of which the first batch is taken.
        optimizer: an optimizer over the model's parameters, if steps are to have one.
        loss_fn: called with output and target; its result starts a backward pass. Without it only forward passes are timed,
            in evaluation mode and without gradients (with them if the forward pass differentiates).
        modes: modes of :func:`optimize`; the first is what the others are compared with.
        level: level of all plans.
        rounds: timed steps of each mode, at least 6; with a budget at most.
        warmup: steps of each mode before them.
        budget_s: seconds that it may take. Modes that do not fit are left out, with the reason; a step or a compilation that
            has begun is not interrupted, and the fewest rounds are done of what is left.
        progress: show a bar on stderr while it runs; by default if that is a terminal.
        options: what else :func:`optimize` takes.

    Raises:
        TypeError: ``model`` is no ``torch.nn.Module``, or ``optimizer`` none.
        ValueError: modes are unknown, doubled or fewer than one; too few rounds; an optimizer without a loss function, or of
            another model; with a loss function, a batch that is no pair; a loader without a batch.
    """
    if isinstance(modes, str):
        raise ValueError(f"modes are a tuple of names, such as ('none', {modes!r})")  # noqa: TRY004  # as of every other
    _check_arguments(modes, rounds, warmup, budget_s)
    if not isinstance(model, nn.Module):
        raise TypeError(f"tune.benchmark() takes a torch.nn.Module, not {type(model).__name__}")
    _check_optimizer(model, optimizer, has_loss=loss_fn is not None)
    batch = _first_batch(batch)
    with random_states_kept(), originals_kept(model, loss_fn):
        step = _Step(*copied(model, optimizer, loss_fn), batch)
        trial = _Trial(step, warmup, budget_s, Progress(progress))
        options = {"example": step.input, **options}
        plans = [optimize(step.model, mode=mode, level=level, **options) for mode in modes]
        try:
            plans = trial.begin(plans)
            differences = [_difference(plan, step.input) for plan in plans]
            times, peaks = trial.measure(plans, rounds)
        finally:
            step.others.put_back()
    results = tuple(
        ModeResult(
            mode=plan.mode,
            used=plan.used,
            step_s=quartiles(times[index]),
            speedup_factor=quartiles([a / b for a, b in zip(times[0], times[index], strict=True)]),
            first_step_s=trial.first_s[plan.mode],
            peak_bytes=peaks[index],
            memory_savings=_savings(peaks[0], peaks[index]),
            difference=differences[index][0],
            accepted=differences[index][1],
        )
        for index, plan in enumerate(plans)
    )
    return _told(Benchmark(plans[0].device, len(times[0]), *recommend(results), results, tuple(trial.left_out)))


def _first_batch(batch: Any) -> Any:
    """Return a DataLoader's first batch, and any other value as it is; random states are as before."""
    if not isinstance(batch, torch.utils.data.DataLoader):
        return batch
    with random_states_kept(generators(batch)):
        for first in batch:
            return first
    raise ValueError("the loader has no batch")


def _told(result: Benchmark) -> Benchmark:
    """Record the benchmark as an event of the run and its speed-ups as metrics, if one is recorded."""
    for each in result.modes:
        api.set_gauge(catalog.TUNE_SPEEDUP, each.speedup_factor.median, mode=each.mode)
    about = {"recommended": result.recommended, "reason": result.reason, "rounds": result.rounds}
    speedups = "; ".join(f"{each.mode} {each.speedup_factor}" for each in result.modes)
    api.record_event(catalog.EVENT_TUNE_BENCHMARK, {**about, "speedups": speedups})
    return result


class _Step:
    """One step as the caller's training does it: forward, and backward and optimizer where given."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, loss_fn: LossFunction | None, batch: Any
    ) -> None:
        self.model, self._optimizer, self._loss_fn = model, optimizer, loss_fn
        self.input: Any
        self._target: Any
        self.input, self._target = pair_of(batch) if loss_fn is not None else (batch, None)
        of_optimizer = [weight for group in optimizer.param_groups for weight in group["params"]] if optimizer else []
        of_loss = loss_fn.parameters() if isinstance(loss_fn, nn.Module) else ()
        self._weights = list({id(weight): weight for weight in (*model.parameters(), *of_optimizer, *of_loss)}.values())
        self.others = OthersGradients(self._weights)
        self._gradients = False
        if loss_fn is None:
            model.eval()
            _, self._gradients = outputs(model, self.input)

    def clear(self) -> None:
        """Free the gradients of the step before, which are no memory that a step finds."""
        for weight in self._weights:
            weight.grad = None

    def __call__(self) -> None:
        if self._loss_fn is None:
            with torch.set_grad_enabled(self._gradients):
                call(self.model, self.input)
            return
        self.clear()
        loss = self._loss_fn(call(self.model, self.input), self._target)
        self.others.keep(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._optimizer is not None:
            self._optimizer.step()


class _Trial:
    """Steps of several plans in turn, within a budget of time where there is one."""

    def __init__(self, step: _Step, warmup: int, budget_s: float | None, progress: Progress) -> None:
        self._step, self._warmup, self._budget_s, self._progress = step, warmup, budget_s, progress
        self._started = perf_counter()
        self.first_s: dict[str, float] = {}
        self.left_out: list[LeftOut] = []
        self._step_s: dict[str, float] = {}

    def begin(self, plans: list[Plan]) -> list[Plan]:
        """Do two steps of each plan; return those that work and fit into the budget. The first plan is always among them."""
        base, *others = plans
        self._first_steps(base)
        kept = [base]
        for plan in others:
            if self._budget_s is not None and self._passed() > _BEGINNING * self._budget_s:
                self._leave_out(plan, "no time was left to try it")
                continue
            try:
                self._first_steps(plan)
            except FAILURES as error:  # of the first plan it is the caller's
                self._leave_out(plan, f"{type(error).__name__}: {first_line(error)}")
                continue
            kept.append(plan)
        while len(kept) > 1 and self._budget_s is not None and self._least_s(kept) > self._budget_s - self._passed():
            slowest = max(kept[1:], key=lambda plan: self._step_s[plan.mode])
            kept.remove(slowest)
            self._leave_out(slowest, f"its steps of {self._step_s[slowest.mode]:.3g} s do not fit into the budget")
        return kept

    def measure(self, plans: list[Plan], rounds: int) -> tuple[list[list[float]], list[int | None]]:
        """Return times of all rounds, and peak memory, of each plan."""
        peaks = []
        for plan in plans:
            with plan:
                for _ in range(self._warmup):
                    self._step()
                self._step.clear()
                peaks.append(peak_bytes(self._step, plan.device))
        times: list[list[float]] = [[] for _ in plans]
        for done, order in enumerate(islice(orders(len(plans)), rounds)):
            if self._budget_s is not None and done >= _LEAST_ROUNDS and self._passed() > self._budget_s:
                break
            self._progress.show(done / rounds, f"round {done + 1} of {rounds}")
            for index in order:
                with plans[index]:
                    self._step()  # brings caches and the allocator's blocks back, which the other modes have used since
                    times[index].append(_timed(self._step, plans[index].device))
        self._progress.show(1.0, f"{len(times[0])} rounds of {', '.join(plan.mode for plan in plans)}")
        self._progress.end()
        return times, peaks

    def _first_steps(self, plan: Plan) -> None:
        self._progress.show(0.0, f"first step of {plan.mode}")
        with plan:  # before anything else, so that the first has all of the compilation
            self.first_s[plan.mode] = _timed(self._step, plan.device)
            self._step_s[plan.mode] = _timed(self._step, plan.device) if self._budget_s is not None else 0.0

    def _least_s(self, plans: list[Plan]) -> float:
        """Return what the fewest rounds of these plans take: two steps each, and those before them."""
        return sum(self._step_s[plan.mode] for plan in plans) * (2 * _LEAST_ROUNDS + self._warmup + 1)

    def _passed(self) -> float:
        return perf_counter() - self._started

    def _leave_out(self, plan: Plan, reason: str) -> None:
        self.left_out.append(LeftOut(plan.mode, reason))


def _timed(step: _Step, device: str) -> float:
    synchronize(device)
    started = perf_counter()
    step()
    synchronize(device)
    return perf_counter() - started


def _difference(plan: Plan, batch: Any) -> tuple[float | None, bool]:
    try:
        difference = plan.measure(batch)
    except ValueError:
        return None, True
    return difference.relative, difference.accepted


def _savings(base: int | None, peak: int | None) -> float | None:
    return None if not base or peak is None else 1 - peak / base


def _check_arguments(modes: Sequence[str], rounds: int, warmup: int, budget_s: float | None) -> None:
    if not modes or len(set(modes)) < len(modes):
        raise ValueError(f"modes are one or more different names, not {list(modes)}")
    if not is_whole(rounds) or rounds < _LEAST_ROUNDS:
        raise ValueError(f"rounds is a whole number, at least {_LEAST_ROUNDS}, not {rounds!r}")
    if not is_whole(warmup) or warmup < 0:
        raise ValueError(f"warmup is a number of steps, not {warmup!r}")
    if budget_s is not None and not (is_number(budget_s) and 0 < budget_s < float("inf")):
        raise ValueError(f"budget_s is a number of seconds above 0, not {budget_s!r}")


def _check_optimizer(model: nn.Module, optimizer: Any, *, has_loss: bool) -> None:
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is one of torch.optim over the model's parameters, not {type(optimizer).__name__}")
    if not has_loss:
        raise ValueError("an optimizer needs gradients: pass loss_fn, and as batch a pair of input and target")
    own = set(map(id, model.parameters()))
    if own and not any(id(each) in own for group in optimizer.param_groups for each in group["params"]):
        raise ValueError("the optimizer has none of the model's parameters: make it of model.parameters()")
