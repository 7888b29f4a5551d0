"""``benchmark``: modes of ``optimize`` timed against each other on one model, with their loss of accuracy."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import islice
from pathlib import Path
from random import Random
from statistics import quantiles
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchobs import api, catalog
from torchobs.support.arguments import is_whole
from torchobs.support.result import Checked, Problem, Result
from torchobs.tensors.batches import FAILURES, call, first_line
from torchobs.tensors.losses import check_trained, mean_loss
from torchobs.tensors.running import Buffers, generators, random_states_kept
from torchobs.tune.difference import outputs
from torchobs.tune.plan import Plan, optimize

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    LossFunction = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Quartiles(Result):
    """The median of some values and their quartiles, with the middle half of the values between these."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return self.text("{:.4g}".format)

    def text(self, number: Callable[[float], str]) -> str:
        """Return the median with the quartiles in brackets."""
        return f"{number(self.median)} [{number(self.low)}, {number(self.high)}]"


def quartiles(values: Sequence[float]) -> Quartiles:
    """Return the quartiles of two or more values, by linear interpolation between them."""
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Quartiles(middle, low, high)


def orders(count: int) -> Iterator[list[int]]:
    """Yield each round's order of that many things: a random one, then its reverse, and so on; the same in every call.

    A step's place in its round has an effect of 1 % or so. Randomised blocks (Fisher, The Design of Experiments, 1935) spread
    it evenly, and each of two things comes before the other equally often.
    """
    chance = Random(0)  # noqa: S311  # an order is no secret
    while True:
        order = chance.sample(range(count), count)
        yield order
        yield order[::-1]


@dataclass(frozen=True)
class ModeResult(Result):
    """One mode's measurements. Times are of one step, in seconds."""

    mode: str
    used: tuple[str, ...]
    """techniques that were in use"""
    step_s: Quartiles
    speedup_factor: Quartiles
    """the first mode's time divided by this one's, in the same round"""
    first_step_s: float
    """the first step, compilation included; no other field includes it"""
    peak_bytes: int | None
    """most bytes allocated during one step, beyond those before it; None without a GPU"""
    memory_savings: float | None
    """share of the first mode's peak that this one saves; negative if it needs more"""
    difference: float | None
    """relative difference of outputs to float32 eager; None if the output has no floating tensor"""
    ok: bool
    """the difference is within the plan's tolerance"""

    @property
    def is_noise(self) -> bool:
        """Return whether 1 lies between the quartiles of the speed-up: faster in some rounds, slower in others."""
        return self.speedup_factor.low <= 1.0 <= self.speedup_factor.high


_FORMATS = ("pdf", "png", "svg")
_GAIN, _LOSS, _NOISE = "#2c8a5f", "#b3231d", "#7d8792"


@dataclass(frozen=True)
class Benchmark(Checked):
    """Modes compared, and which to use: ``result["amp"]`` is one of them."""

    device: str
    rounds: int
    recommended: str
    reason: str
    modes: tuple[ModeResult, ...]
    problems: tuple[Problem, ...] = ()
    """modes that failed and were not measured"""

    def plot(self, path: str | os.PathLike[str]) -> str:
        """Draw speed-ups with their quartiles into a ``.png``, ``.svg`` or ``.pdf``; return the file's name.

        Raises:
            ImportError: matplotlib is missing: ``pip install 'torchobs[report]'``.
            OSError: the file cannot be written.
            ValueError: another ending.
        """
        try:
            import matplotlib as mpl
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ModuleNotFoundError as missing:
            raise ImportError(f"{missing.name} is missing: pip install 'torchobs[report]'") from None
        name, names, factors = Path(path), [row.mode for row in self.modes], [row.speedup_factor for row in self.modes]
        if (form := name.suffix.removeprefix(".").lower()) not in _FORMATS:
            raise ValueError(f"{name.name!r} ends in none of these: {', '.join(f'.{ending}' for ending in _FORMATS)}")
        with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
            figure = Figure(figsize=(7.2, 1.3 + 0.35 * len(names)), dpi=150, layout="constrained")
            FigureCanvasAgg(figure)
            axes = figure.subplots()
            around = [[factor.median - factor.low for factor in factors], [factor.high - factor.median for factor in factors]]
            colours = [_NOISE if factor.low <= 1 <= factor.high else _GAIN if factor.low > 1 else _LOSS for factor in factors]
            axes.barh(names, [factor.median for factor in factors], color=colours, xerr=around, error_kw={"capsize": 3})
            axes.axvline(1.0, color="black", linewidth=0.8)
            axes.set_xlabel(f"times as fast as {names[0]} (grey: noise)")
            axes.invert_yaxis()
            figure.savefig(name, format=form)
        return str(name)


def recommend(modes: Sequence[ModeResult]) -> tuple[str, str]:
    """Return the mode to use, and why: the fastest mode with a gain beyond noise and outputs within the tolerance."""
    base, *others = modes
    better = [mode for mode in others if mode.ok and mode.speedup_factor.low > 1.0]
    if better:
        best = max(better, key=lambda mode: mode.speedup_factor.median)
        return best.mode, f"{best.speedup_factor} times as fast as {base.mode}"
    refused = [mode.mode for mode in others if not mode.ok and mode.speedup_factor.low > 1.0]
    if refused:
        return base.mode, f"{', '.join(refused)}: faster, but with outputs too far from float32"
    noise = [mode.mode for mode in others if mode.is_noise]
    if noise:
        return base.mode, f"{', '.join(noise)}: the difference is within the noise"
    return base.mode, "no other mode is faster"


def copied(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, loss_fn: Callable[..., Any] | None
) -> tuple[nn.Module, torch.optim.Optimizer | None, Any]:
    """Return copies that belong together; a plain function is not copied.

    A module's tensor with a graph, such as the weight of ``nn.utils.weight_norm``, is copied without it.
    """
    owner: Any = loss_fn
    while isinstance(owner, partial):
        owner = owner.func
    owner = getattr(owner, "__self__", owner)
    modules = [*model.modules(), *(owner.modules() if isinstance(owner, nn.Module) else ())]
    tensors = [value for module in modules for value in vars(module).values() if isinstance(value, torch.Tensor)]
    computed = {id(tensor): tensor.detach().clone() for tensor in tensors if not tensor.is_leaf}
    buffers = [buffer for module in modules for buffer in module.buffers(recurse=False)]
    # deepcopy fails for these (CSR, nested), as for tensors with a graph
    odd = {id(x): x.detach().clone() for x in buffers if x.layout is not torch.strided or x.is_nested}
    return deepcopy((model, optimizer, loss_fn), {**computed, **odd})


@contextmanager
def _kept_state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Put the caller's gradients and buffers back at the end: a loss function may refer to the caller's model."""
    groups = optimizer.param_groups if optimizer is not None else ()
    weights = [*model.parameters(), *(weight for group in groups for weight in group["params"])]
    buffers, gradients = Buffers(model), [(weight, weight.grad) for weight in weights]
    for weight in weights:
        weight.grad = None
    try:
        yield
    finally:
        buffers.put_back()
        for weight, gradient in gradients:
            weight.grad = gradient


def synchronize(device: str) -> None:
    """Wait until the device has finished; a CPU has."""
    kind = device.partition(":")[0]
    if kind in {"cuda", "xpu"}:
        getattr(torch, kind).synchronize(device)  # which need not be the current one
    elif kind == "mps":
        torch.mps.synchronize()


def peak_bytes(function: Callable[[], None], device: str) -> int | None:
    """Return the most bytes of tensors on a GPU during a call, beyond those before; None on other devices.

    It resets the allocator's peak.
    """
    kind = device.partition(":")[0]
    if kind not in {"cuda", "xpu"}:
        return None
    module = getattr(torch, kind)
    module.reset_peak_memory_stats(device)
    before = module.memory_allocated(device)
    function()
    module.synchronize(device)
    return int(module.max_memory_allocated(device) - before)


_LEAST_ROUNDS = 6
"""With fewer, a quartile is hardly more than the second largest value"""


def benchmark(  # noqa: PLR0913  # one keyword for each thing that can be asked for
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    modes: Sequence[str] = ("none", "amp", "compile"),
    level: str = "basic",
    rounds: int = 20,
    warmup: int = 3,
    progress: bool | None = None,
    **options: Any,
) -> Benchmark:
    """Time steps of a model in each mode, in rounds of all modes, so that a change of the machine's speed affects all alike.

    Copies do the steps, and need memory beside the originals: model, optimizer, gradients and random state do not change. A
    loss function is copied if it is a module or a method of one. If a session runs, it records steps with an optimizer as
    training steps. On a GPU torch's peak of allocated memory is reset.

    Args:
        model: the model, on its device.
        batch: a tensor, a tuple of arguments (with a loss function the last may be the target), or a mapping of keyword
            arguments; or a DataLoader, for its first batch.
        loss_fn: ``loss_fn(model, batch)``, or ``loss_fn(output, target)``, for a backward pass. Without it only forward passes
            are timed, in evaluation mode and without gradients (with them if the forward pass differentiates).
        optimizer: an optimizer over the model's parameters, for steps with an update.
        modes: modes of :func:`optimize`; the others are compared with the first.
        level: level of all plans.
        rounds: timed steps of each mode, at least 6.
        warmup: steps of each mode before the timed ones.
        progress: print the progress on stderr; by default if that is a terminal.
        options: further arguments of :func:`optimize`.

    Raises:
        TypeError: ``model`` is no ``torch.nn.Module``, ``optimizer`` no optimizer, or ``loss_fn`` no function.
        ValueError: modes are unknown, doubled or none; too few rounds; an optimizer without a loss function, or one of another
            model; a model on the device meta; a loader without a batch.
    """
    if isinstance(modes, str):
        raise ValueError(f"modes are a tuple of names, such as ('none', {modes!r})")  # noqa: TRY004  # as of every other
    _check_arguments(modes, rounds, warmup)
    arguments = {"loss_fn": loss_fn, "optimizer": optimizer}
    check_trained(model, **{name: value for name, value in arguments.items() if value is not None})
    if optimizer is not None and loss_fn is None:
        raise ValueError("an optimizer needs gradients: pass loss_fn, and what it needs as batch")
    batch = _first_batch(batch)
    with random_states_kept(), _kept_state(model, optimizer):
        step = _Step(*copied(model, optimizer, loss_fn), batch)
        options = {"example": step.input, **options}
        plans, problems, first_s = _first_steps(
            step, [optimize(step.model, mode=mode, level=level, **options) for mode in modes]
        )
        differences = [_difference(plan, step.input) for plan in plans]
        times, peaks = _measure(step, plans, rounds, warmup, shows=sys.stderr.isatty() if progress is None else progress)
    results = tuple(
        ModeResult(
            mode=plan.mode,
            used=tuple(name for name in plan.used if name not in {"fused_optimizer", "loader"}),  # for the caller to pass on
            step_s=quartiles(times[index]),
            speedup_factor=quartiles([a / b for a, b in zip(times[0], times[index], strict=True)]),
            first_step_s=first_s[index],
            peak_bytes=peaks[index],
            memory_savings=None if not peaks[0] or (peak := peaks[index]) is None else 1 - peak / peaks[0],
            difference=differences[index][0],
            ok=differences[index][1],
        )
        for index, plan in enumerate(plans)
    )
    result = Benchmark(plans[0].device, len(times[0]), *recommend(results), results, tuple(problems))
    for row in results:
        api.set_gauge(catalog.TUNE_SPEEDUP, row.speedup_factor.median, mode=row.mode)
    about = {"recommended": result.recommended, "reason": result.reason, "rounds": result.rounds}
    speedups = "; ".join(f"{row.mode} {row.speedup_factor}" for row in results)
    api.record_event(catalog.EVENT_TUNE_BENCHMARK, {**about, "speedups": speedups})
    return result


def _first_batch(batch: Any) -> Any:
    """Return a DataLoader's first batch, any other value as it is; random states do not change."""
    if not isinstance(batch, torch.utils.data.DataLoader):
        return batch
    with random_states_kept(generators(batch)):
        for first in batch:
            return first
    raise ValueError("the loader has no batch")


def _input_of(model: nn.Module, batch: Any, loss_fn: LossFunction) -> Any:
    """Return the arguments with which a loss function calls the model, as a batch."""
    calls: list[tuple[Any, Any]] = []
    handle = model.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    try:
        mean_loss(model, batch, loss_fn)
    finally:
        handle.remove()
    if not calls:
        raise ValueError("loss_fn does not call the model")
    args, kwargs = calls[0]
    names = signature(model.forward).parameters if args and kwargs else ()
    return {**dict(zip(names, args, strict=False)), **kwargs} if kwargs else args


class _Step:
    """A step like the caller's: forward, and backward and optimizer if given."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, loss_fn: LossFunction | None, batch: Any
    ) -> None:
        self.model, self._optimizer, self._loss_fn = model, optimizer, loss_fn
        self._batch = batch
        self.input = batch if loss_fn is None else _input_of(model, batch, loss_fn)
        of_optimizer = [weight for group in optimizer.param_groups for weight in group["params"]] if optimizer else []
        of_loss = loss_fn.parameters() if isinstance(loss_fn, nn.Module) else ()
        self._weights = list({id(weight): weight for weight in (*model.parameters(), *of_optimizer, *of_loss)}.values())
        self._gradients = False
        if loss_fn is None:
            model.eval()
            _, self._gradients = outputs(model, self.input)

    def clear(self) -> None:
        """Free the gradients of the step before, so that the next step's memory is without them."""
        for weight in self._weights:
            weight.grad = None

    def __call__(self) -> None:
        if self._loss_fn is None:
            with torch.set_grad_enabled(self._gradients):
                call(self.model, self.input)
            return
        self.clear()
        mean_loss(self.model, self._batch, self._loss_fn).backward()  # type: ignore[no-untyped-call]
        if self._optimizer is not None:
            self._optimizer.step()


def _first_steps(step: _Step, plans: Sequence[Plan]) -> tuple[list[Plan], list[Problem], list[float]]:
    """Do each plan's first step, which compiles; return the plans that work, problems of the others, and the times."""
    kept, problems, first_s = list[Plan](), list[Problem](), list[float]()
    for plan in plans:
        try:
            with plan:
                spent_s = _timed(step, plan.device)
        except FAILURES as error:
            if not kept:
                raise  # the first plan's error is the caller's
            problems.append(Problem("failed", plan.mode, first_line(error)))
            continue
        kept.append(plan)
        first_s.append(spent_s)
    return kept, problems, first_s


def _measure(
    step: _Step, plans: Sequence[Plan], rounds: int, warmup: int, *, shows: bool
) -> tuple[list[list[float]], list[int | None]]:
    """Return each plan's times of all rounds and peak memory."""
    peaks = []
    for plan in plans:
        with plan:
            for _ in range(warmup):
                step()
            step.clear()
            peaks.append(peak_bytes(step, plan.device))
    times: list[list[float]] = [[] for _ in plans]
    for done, order in enumerate(islice(orders(len(plans)), rounds), start=1):
        for index in order:
            with plans[index]:
                step()  # refills caches and the allocator's blocks, which other modes have used since
                times[index].append(_timed(step, plans[index].device))
        if shows:
            names, end = ", ".join(plan.mode for plan in plans), "\n" if done == rounds else ""
            print(f"\rround {done} of {rounds} of {names}", end=end, file=sys.stderr, flush=True)  # noqa: T201  # for a person
    return times, peaks


def _timed(step: _Step, device: str) -> float:
    synchronize(device)
    started = perf_counter()
    step()
    synchronize(device)
    return perf_counter() - started


def _difference(plan: Plan, batch: Any) -> tuple[float | None, bool]:
    try:
        difference = plan.inspect(batch)
    except ValueError:
        return None, True
    return difference.relative, difference.ok


def _check_arguments(modes: Sequence[str], rounds: int, warmup: int) -> None:
    if not modes or len(set(modes)) < len(modes):
        raise ValueError(f"modes are one or more different names, not {list(modes)}")
    if not is_whole(rounds) or rounds < _LEAST_ROUNDS:
        raise ValueError(f"rounds is a whole number, at least {_LEAST_ROUNDS}, not {rounds!r}")
    if not is_whole(warmup) or warmup < 0:
        raise ValueError(f"warmup is a number of steps, not {warmup!r}")
