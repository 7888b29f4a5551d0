"""Techniques switched on and off between the steps of a training that knows nothing of it, and its steps timed in turn."""

from __future__ import annotations

import os
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from torchobs.tune import choices
from torchobs.tune.decisions import Choice, Request, skip, use
from torchobs.tune.peak_memory import synchronize
from torchobs.tune.plan import model_device
from torchobs.tune.rounds import orders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchobs.tune.techniques import Technique

AS_IT_IS = "as it is"


class Threads:
    """Lets torch compute with another number of threads."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._before = count

    def apply(self) -> None:
        """Set the number."""
        self._before = torch.get_num_threads()
        torch.set_num_threads(self._count)

    def undo(self) -> None:
        """Set it back."""
        torch.set_num_threads(self._before)


class Turn(NamedTuple):
    """One step: the mode it is done in, and whether it is timed."""

    mode: str
    timed: bool


class ScriptTrial:
    """Finds the model at its first training forward pass and the optimizer at its first step; from then on takes turns.

    Args:
        modes: techniques to try, one at a time.
        rounds: timed steps of each mode.
        warmup: steps of each mode before them.
        finished: called once after the last turn, within the script's ``optimizer.step()``.
    """

    def __init__(self, modes: list[str], rounds: int, warmup: int, finished: Callable[[], None]) -> None:
        self._wanted, self._rounds, self._warmup, self._finished = modes, rounds, warmup, finished
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._techniques: dict[str, list[Technique]] = {AS_IT_IS: []}
        self._now: Turn | None = None
        self._turns: Iterator[Turn] = iter(())
        self._device = "cpu"
        self._began = 0.0
        self._waited_before = 0.0
        self.steps = 0
        self.times: dict[str, list[float]] = {}
        self.first: dict[str, float] = {}
        self.skipped: dict[str, str] = {}
        self.waits: list[float] = []
        """share of each timed step, as it is, that the script waited for its DataLoader"""
        self._finder: Any = None
        self._clock = _DataClock()

    def start(self) -> None:
        """Watch torch from now on."""
        self._finder = register_module_forward_pre_hook(self._see_call)
        register_optimizer_step_post_hook(self._stepped)
        self._clock.install()

    def result(self) -> dict[str, Any]:
        """Return what was found, as plain data."""
        return {
            "device": self._device,
            "model": None if self._model is None else type(self._model).__name__,
            "steps": self.steps,
            "times": self.times,
            "first": self.first,
            "skipped": self.skipped,
            "waits": self.waits,
            "loader": self._clock.loader,
        }

    def _see_call(self, module: nn.Module, _inputs: Any) -> None:
        if torch.is_grad_enabled() and module.training and any(weight.requires_grad for weight in module.parameters()):
            self._model = module  # the outermost: its parts are called after it
            self._finder.remove()

    def _stepped(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._optimizer = self._optimizer or optimizer
        if optimizer is not self._optimizer or self._model is None:
            return  # a second optimizer belongs to the same step
        self.steps += 1
        synchronize(self._device)
        took, waited = perf_counter() - self._began, self._clock.waited_s - self._waited_before
        if self._now is None:
            self._prepare(self._model)
        else:
            self._note(self._now, took, waited)
        following = next(self._turns, None)
        self._switch(following)
        if following is None:
            self._finished()
            return
        self._began, self._waited_before = perf_counter(), self._clock.waited_s

    def _note(self, turn: Turn, took: float, waited: float) -> None:
        self.first.setdefault(turn.mode, took)
        if turn.timed:
            self.times[turn.mode].append(took)
            if turn.mode == AS_IT_IS:
                self.waits.append(waited / took)

    def _prepare(self, model: nn.Module) -> None:
        """Decide which techniques this model and device can have, and the order of turns."""
        self._device = str(model_device(model))
        for name in self._wanted:
            choice = self._choice(name, model)
            if choice.technique is None:
                self.skipped[name] = choice.decision.reason
            else:
                self._techniques[name] = [choice.technique]
        modes = list(self._techniques)
        warm = [Turn(mode, timed=False) for mode in modes for _ in range(self._warmup)]
        # the step after a switch is not timed: caches are another mode's then
        in_rounds = [modes[index] for order in islice(orders(len(modes)), self._rounds) for index in order]
        self._turns = iter(warm + [Turn(mode, timed) for mode in in_rounds for timed in (False, True)])
        self.times = {mode: [] for mode in modes}

    def _choice(self, name: str, model: nn.Module) -> Choice:
        if name == "threads":
            return _threads(self._device)

        def failed(technique: str, reason: str) -> None:
            self.skipped[technique] = f"failed, ran eagerly: {reason}"

        return choices.decide(name, Request(model, "full", "maximum", torch.device(self._device), failed))

    def _switch(self, to: Turn | None) -> None:
        before, after = (None if turn is None else turn.mode for turn in (self._now, to))
        self._now = to
        if before != after:
            for technique in reversed(self._techniques[before or AS_IT_IS]):
                technique.undo()
            for technique in self._techniques[after or AS_IT_IS]:
                technique.apply()


def _threads(device: str) -> Choice:
    now, cpus = torch.get_num_threads(), _cpus()
    if device != "cpu":
        return skip("threads", f"the model computes on {device}")
    count = now // 2 if now > 1 else cpus
    if count == now:
        return skip("threads", "there is one processor")
    return use("threads", f"{count} instead of {now}", Threads(count))


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _DataClock:
    """Adds up the time that DataLoaders are waited for."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        self.loader: dict[str, Any] | None = None

    def install(self) -> None:
        fetch = _BaseDataLoaderIter.__next__

        def timed(iterator: Any) -> Any:
            began = perf_counter()
            try:
                return fetch(iterator)
            finally:
                self.waited_s += perf_counter() - began
                self.loader = self.loader or {"workers": iterator._num_workers, "pinned": iterator._pin_memory}

        _BaseDataLoaderIter.__next__ = timed  # type: ignore[method-assign,assignment]


def give_loaders_workers(count: int) -> None:
    """Let DataLoaders that are made from now on and have no workers have ``count``, and pin memory where there is CUDA.

    Those of iterable datasets stay as they are: each worker would yield all samples.
    """
    made: Callable[..., None] = DataLoader.__init__

    def init(self: DataLoader[Any], dataset: Any, *args: Any, **options: Any) -> None:
        # four positional arguments come before num_workers
        if not isinstance(dataset, IterableDataset) and len(args) < 5 and not options.get("num_workers"):  # noqa: PLR2004
            options |= {"num_workers": count, "persistent_workers": True}
        if torch.cuda.is_available() and len(args) < 7:  # noqa: PLR2004
            options.setdefault("pin_memory", True)
        made(self, dataset, *args, **options)

    DataLoader.__init__ = init  # type: ignore[method-assign]
