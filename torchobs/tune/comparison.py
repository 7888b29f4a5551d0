"""Modes of tune.optimize() timed against each other on one model: which is faster, by how much, at what loss of accuracy."""

from __future__ import annotations

import inspect
import json
import sys
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from random import Random
from statistics import quantiles
from time import perf_counter
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._C._profiler import _EventType

from torchobs import api, catalog
from torchobs.probes.core.torch_profiler import ProfilerBusyError, recorded
from torchobs.support.arguments import is_number, is_whole
from torchobs.support.result import Result
from torchobs.tensors.batches import call
from torchobs.tensors.running import Buffers, generators, leaves_of, random_states_kept
from torchobs.tune.difference import outputs, pair_of
from torchobs.tune.plan import Plan, optimize
from torchobs.tune.techniques import FAILURES, first_line

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Sequence

    LossFunction = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Quartiles(Result):
    """The median of some values, and the quartiles between which the middle half of them lies."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.4g} [{self.low:.4g}, {self.high:.4g}]"


def quartiles(values: Sequence[float]) -> Quartiles:
    """Return the quartiles of two or more values, by linear interpolation between them."""
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Quartiles(middle, low, high)


def orders(count: int) -> Iterator[list[int]]:
    """Yield each round's order of that many things: one by chance, then its reverse, and so on; the same ones in every call.

    A step's place in its round has an effect of its own, 1 % or so. Randomised blocks (Fisher, The Design of Experiments, 1935)
    have it meet all alike, and so each of two things comes before the other equally often.
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
    """techniques that really ran"""
    step_s: Quartiles
    speedup_factor: Quartiles
    """first mode's time by this one's, of the same round"""
    first_step_s: float
    """the first step, compilation included; no other figure has it"""
    peak_bytes: int | None
    """most bytes allocated during one step, beyond those before it; None where torch does not tell"""
    memory_savings: float | None
    """share of the first mode's peak that this one does without; negative if it needs more"""
    difference: float | None
    """relative difference of outputs to float32 eager; None if the output has no floating tensor"""
    accepted: bool
    """the difference is within the plan's tolerance"""

    @property
    def is_noise(self) -> bool:
        """Return whether 1 lies between the quartiles of the speed-up: faster in some rounds, slower in others."""
        return self.speedup_factor.low <= 1.0 <= self.speedup_factor.high


@dataclass(frozen=True)
class LeftOut(Result):
    """A mode that was not measured to the end."""

    mode: str
    reason: str


_FORMATS = ("pdf", "png", "svg")
_GAIN, _LOSS, _NOISE = "#2c8a5f", "#b3231d", "#7d8792"


@dataclass(frozen=True)
class Benchmark(Result):
    """Modes compared, and which to use."""

    device: str
    rounds: int
    recommended: str
    reason: str
    modes: tuple[ModeResult, ...]
    left_out: tuple[LeftOut, ...] = ()

    def __getitem__(self, mode: str) -> ModeResult:
        """Return a mode's measurements."""
        found = next((each for each in self.modes if each.mode == mode), None)
        if found is None:
            raise KeyError(f"{mode!r} was not measured; these were: {', '.join(each.mode for each in self.modes)}")
        return found

    def to_json(self) -> str:
        """Return all of it as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def plot(self, path: str | os.PathLike[str]) -> str:
        """Draw speed-ups with their quartiles, and memory, into a ``.png``, ``.svg`` or ``.pdf``; return the file's name.

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
        name, names, factors = Path(path), [each.mode for each in self.modes], [each.speedup_factor for each in self.modes]
        if (form := name.suffix.removeprefix(".").lower()) not in _FORMATS:
            raise ValueError(f"{name.name!r} ends in none of these: {', '.join(f'.{each}' for each in _FORMATS)}")
        with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "torchobs"}):
            figure = Figure(figsize=(7.2, 1.3 + 0.35 * len(names)), dpi=150, layout="constrained")
            FigureCanvasAgg(figure)
            speed, memory = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
            around = [[each.median - each.low for each in factors], [each.high - each.median for each in factors]]
            colours = [_NOISE if each.low <= 1 <= each.high else _GAIN if each.low > 1 else _LOSS for each in factors]
            bars = {"color": colours, "xerr": around, "error_kw": {"capsize": 3, "elinewidth": 1}}
            speed.barh(names, [each.median for each in factors], **bars)
            speed.axvline(1.0, color="black", linewidth=0.8)
            speed.set_xlabel(f"times as fast as {names[0]} (grey: noise)")
            speed.invert_yaxis()
            memory.barh(names, [(each.peak_bytes or 0) / 2**20 for each in self.modes], color="#2f6fdb")
            memory.set_xlabel("peak memory of a step, MiB")
            figure.savefig(name, format=form, metadata={"Date": None} if form == "svg" else None)
        return str(name)


def recommend(modes: Sequence[ModeResult]) -> tuple[str, str]:
    """Return the mode to use, and why: the fastest of those that gain beyond noise with outputs within the tolerance."""
    base, *others = modes
    better = [each for each in others if each.accepted and each.speedup_factor.low > 1.0]
    if better:
        best = max(better, key=lambda each: each.speedup_factor.median)
        return best.mode, f"{best.speedup_factor} times as fast as {base.mode}"
    refused = [each.mode for each in others if not each.accepted and each.speedup_factor.low > 1.0]
    if refused:
        return base.mode, f"{', '.join(refused)}: faster, but with outputs too far from float32"
    noise = [each.mode for each in others if each.is_noise]
    if noise:
        return base.mode, f"{', '.join(noise)}: the difference is within the noise"
    return base.mode, "no other mode is faster"


def copied(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, loss_fn: Callable[..., Any] | None
) -> tuple[nn.Module, torch.optim.Optimizer | None, Any]:
    """Return copies of them that belong together; of a loss function if it is a module, or has one bound to it.

    A tensor that a module keeps with its graph, as the weight of ``nn.utils.weight_norm``, is copied without it.
    """
    bound = _bound(loss_fn)
    with _without_graphs([model, *bound]):
        buffers = [buffer for module in (model, *bound) for buffer in module.buffers()]
        # deepcopy of torch copies none of these (CSR, nested)
        odd = {id(x): x.detach().clone() for x in buffers if x.layout is not torch.strided or x.is_nested}
        model, optimizer, loss = deepcopy((model, optimizer, loss_fn if bound else None), odd)
    return model, optimizer, loss if bound else loss_fn


@contextmanager
def _without_graphs(models: Iterable[nn.Module]) -> Iterator[None]:
    """Give modules the values alone of the tensors that they computed and keep: torch copies none that has a graph."""
    computed = [
        (vars(module), name, value)
        for model in models
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and not value.is_leaf
    ]
    for owned, name, value in computed:
        owned[name] = value.detach()
    try:
        yield
    finally:
        for owned, name, value in computed:
            owned[name] = value


@contextmanager
def originals_kept(model: nn.Module, loss_fn: Callable[..., Any] | None) -> Iterator[None]:
    """Put back the buffers of the caller's model, and of modules that a loss function refers to, when the block ends."""
    kept = [Buffers(module) for module in (model, *_referred(loss_fn))]
    try:
        yield
    finally:
        for buffers in kept:
            buffers.put_back()


class OthersGradients:
    """Gradients of the tensors beneath a loss that are none of the copies': of what a loss function or a batch refers to."""

    def __init__(self, own: Iterable[torch.Tensor]) -> None:
        self._own = {id(tensor) for tensor in own}
        self._kept: list[tuple[torch.Tensor, torch.Tensor | None]] | None = None

    def keep(self, loss: object) -> None:
        """Set them aside, before the first backward pass from such a loss; later calls do nothing."""
        if self._kept is not None or not isinstance(loss, torch.Tensor):  # which the backward pass says
            return
        leaves = [loss] if loss.is_leaf else leaves_of(loss)
        self._kept = [(leaf, leaf.grad) for leaf in leaves if id(leaf) not in self._own]
        for leaf, _ in self._kept:
            leaf.grad = None

    def put_back(self) -> None:
        """Give each its gradient again, or none."""
        for leaf, gradient in self._kept or ():
            leaf.grad = gradient


def _bound(loss_fn: Any) -> list[nn.Module]:
    """Return the modules of which a copy of the loss function has copies."""
    if isinstance(loss_fn, partial):
        parts = (loss_fn.func, *loss_fn.args, *loss_fn.keywords.values())
        return [module for part in parts for module in _bound(part)]
    owner = loss_fn.__self__ if isinstance(loss_fn, MethodType) else loss_fn
    return [owner] if isinstance(owner, nn.Module) else []


def _referred(loss_fn: Any) -> list[nn.Module]:
    """Return the modules that a function names, or that an object has as attributes."""
    if isinstance(loss_fn, partial):
        return _referred(loss_fn.func)
    values: list[Any] = []
    if inspect.isfunction(loss_fn) or inspect.ismethod(loss_fn):
        with suppress(ValueError):  # a name without a value yet
            named = inspect.getclosurevars(loss_fn)
            values += [*named.nonlocals.values(), *named.globals.values()]
    owner = loss_fn.__self__ if isinstance(loss_fn, MethodType) else loss_fn
    if not isinstance(owner, nn.Module):
        values += getattr(owner, "__dict__", {}).values()
    return list({id(value): value for value in values if isinstance(value, nn.Module)}.values())


def synchronize(device: str) -> None:
    """Wait until the device has done all that it was given. A CPU has."""
    kind = device.partition(":")[0]
    if kind in {"cuda", "xpu"}:
        getattr(torch, kind).synchronize(device)  # which need not be the current one
    elif kind == "mps":
        torch.mps.synchronize()


def peak_bytes(function: Callable[[], None], device: str) -> int | None:
    """Return the most bytes that tensors on the device had during a call beyond those before it; None where torch cannot tell.

    On CUDA and XPU by the allocator's own count, whose peak is reset; on a CPU by the allocations that torch's profiler
    records. There the size of memory that was allocated before is not known: a call that frees some seems to need more.
    """
    kind = device.partition(":")[0]
    if kind in {"cuda", "xpu"}:
        module = getattr(torch, kind)
        module.reset_peak_memory_stats(device)
        before = module.memory_allocated(device)
        function()
        module.synchronize(device)
        return int(module.max_memory_allocated(device) - before)
    return _profiled_peak(function) if kind == "cpu" else None


def _profiled_peak(function: Callable[[], None]) -> int | None:
    try:
        profiler = recorded("torchobs.tune, memory of a step", function, profile_memory=True)
    except ProfilerBusyError:
        return None
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    return None if results is None else _peak(_changes(results.experimental_event_tree()))


def _changes(events: Iterable[Any]) -> list[tuple[int, int]]:
    """Return address and size of each allocation that the profiler saw, and with a size below 0 each free, as they came."""
    found: list[tuple[int, int, int]] = []
    pending = list(events)
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag == _EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    return [(address, size) for _, address, size in sorted(found, key=itemgetter(0))]


def _peak(changes: Iterable[tuple[int, int]]) -> int:
    """Return the most bytes that were live at a time.

    A free counts with the size that was allocated at its address since the beginning, and not if nothing was: torch keeps the
    sizes of earlier profiles, whose memory was freed between them, and takes them for those of what is at the address now.
    """
    live: dict[int, int] = {}
    current = most = 0
    for address, size in changes:
        current -= live.pop(address, 0)
        if size > 0:
            live[address] = size
            current += size
            most = max(most, current)
    return most


_BEGINNING = 0.5
"""Share of a budget within which modes are tried for the first time; the rest is for rounds"""
_WIDTH = 24
"""Characters of the bar that shows how far it is"""
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
        trial = _Trial(step, warmup, budget_s, shows=sys.stderr.isatty() if progress is None else progress)
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
            memory_savings=None if not peaks[0] or (peak := peaks[index]) is None else 1 - peak / peaks[0],
            difference=differences[index][0],
            accepted=differences[index][1],
        )
        for index, plan in enumerate(plans)
    )
    result = Benchmark(plans[0].device, len(times[0]), *recommend(results), results, tuple(trial.left_out))
    for each in results:
        api.set_gauge(catalog.TUNE_SPEEDUP, each.speedup_factor.median, mode=each.mode)
    about = {"recommended": result.recommended, "reason": result.reason, "rounds": result.rounds}
    speedups = "; ".join(f"{each.mode} {each.speedup_factor}" for each in results)
    api.record_event(catalog.EVENT_TUNE_BENCHMARK, {**about, "speedups": speedups})
    return result


def _first_batch(batch: Any) -> Any:
    """Return a DataLoader's first batch, and any other value as it is; random states are as before."""
    if not isinstance(batch, torch.utils.data.DataLoader):
        return batch
    with random_states_kept(generators(batch)):
        for first in batch:
            return first
    raise ValueError("the loader has no batch")


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

    def __init__(self, step: _Step, warmup: int, budget_s: float | None, *, shows: bool) -> None:
        self._step, self._warmup, self._budget_s, self._shows = step, warmup, budget_s, shows
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
        steps = 2 * _LEAST_ROUNDS + self._warmup + 1  # the fewest rounds, of two steps each, and those before them
        while len(kept) > 1 and self._budget_s is not None:
            if sum(self._step_s[plan.mode] for plan in kept) * steps <= self._budget_s - self._passed():
                break
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
            self._show(done / rounds, f"round {done + 1} of {rounds}")
            for index in order:
                with plans[index]:
                    self._step()  # brings caches and the allocator's blocks back, which the other modes have used since
                    times[index].append(_timed(self._step, plans[index].device))
        self._show(1.0, f"{len(times[0])} rounds of {', '.join(plan.mode for plan in plans)}", end="\n")
        return times, peaks

    def _first_steps(self, plan: Plan) -> None:
        self._show(0.0, f"first step of {plan.mode}")
        with plan:  # before anything else, so that the first has all of the compilation
            self.first_s[plan.mode] = _timed(self._step, plan.device)
            self._step_s[plan.mode] = _timed(self._step, plan.device) if self._budget_s is not None else 0.0

    def _show(self, share: float, words: str, end: str = "") -> None:
        """Show the share that is done, from 0 to 1, and what is being done, as a line of stderr that is written over."""
        if self._shows:
            bar = f"[{'#' * round(_WIDTH * share):.<{_WIDTH}}] {100 * share:3.0f} %  {self._passed():.0f} s  {words:<40}"
            sys.stderr.write(f"\r{bar}{end}")
            sys.stderr.flush()

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
