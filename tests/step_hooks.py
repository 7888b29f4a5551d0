"""Steps as tests tell them: hooks, in Python or compiled, around real state; the records of whole runs."""

from __future__ import annotations

import functools
import itertools
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import torchobs
from tests.flights import header
from torchobs.flight.layout import PHASE_NAMES
from torchobs.flight.step_record import RecordKind, StepFlag, unpack
from torchobs.flight.storage import Storage
from torchobs.flight.writer import FlightWriter
from torchobs.probes import backward, loss, steps
from torchobs.probes import data as loaders
from torchobs.probes.context import Hooks, TrainingState
from torchobs.probes.optimizer import RateSource
from torchobs.probes.step_recorder import StepRecorder
from torchobs.probes.timeline import EXHAUSTED
from torchobs.support.error_guard import CircuitBreaker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torchobs.flight.step_record import StepRecord


class Loss:
    """What a backward pass begins from: a number, or an error that reading it raises."""

    def __init__(self, value: Any, *, is_cpu: Any = True) -> None:
        """Take it."""
        self.value, self.is_cpu = value, is_cpu

    def item(self) -> Any:
        """See :class:`torch.Tensor`."""
        if isinstance(self.value, Exception):
            raise self.value
        return self.value

    def detach(self) -> Loss:
        """See :class:`torch.Tensor`."""
        return self

    def numel(self) -> int:
        """One, but where torch raises a ``RuntimeError`` of more."""
        return 2 if isinstance(self.value, RuntimeError) else 1


class StepHooks:
    """Every hook of a plain step; what is not plain is noted in ``calls``, in place of what the probes do then."""

    def __init__(self, *, native: bool) -> None:
        """Make them."""
        self.calls: list[Any] = []
        self.traced, self.gradients = 0, True
        made = header(64)
        self.writer = FlightWriter(made, Storage(memoryview(bytearray(made.file_size))), native=native)
        self.recorder, self.training, self.hooks = StepRecorder(self.writer), TrainingState(), Hooks({})
        self.recorder.record_phases(enabled=True)
        self.breaker, self.rates = CircuitBreaker("step"), RateSource()
        context: Any = SimpleNamespace(
            writer=self.writer, recorder=self.recorder, training=self.training, hooks=self.hooks,
            breaker=lambda _: self.breaker, record_overhead=self._note("overhead"),
        )  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backward, "dispatch_modes", lambda: lambda: self.traced)
            patch.setattr(backward, "graph_being_made", lambda: lambda: self.traced > 1)
            self._make(context)
        self.owners: dict[str, Any] = {
            "recorder": self.recorder, "training": self.training, "breaker": self.breaker, "rates": self.rates,
            "before_step": self.hooks.before_step, "loss": self.loss_probe, "data": self.data_probe,
            "step": self.step_probe, "self": self,
        }  # fmt: skip

    def _note(self, what: str) -> Callable[..., None]:
        return lambda *_, **__: self.calls.append(what)

    def _make(self, context: Any) -> None:
        watch = backward.BackwardWatch(context, self.breaker)
        loss_probe: Any = loss.LossProbe()
        self.loss_probe = loss_probe
        loss_probe._context, loss_probe._tensor, loss_probe._training = context, Loss, self.training
        loss_probe._take, loss_probe._nonfinite = self._note("take"), self._note("nonfinite")
        self.take_loss: Any = loss_probe._taker(self.breaker)
        self.hooks.takes_loss.register(self.breaker, self.take_loss, guarded=True)
        self.data_probe: Any = loaders.DataProbe()
        self.data_probe._context, self.data_probe._grad_enabled = context, lambda: self.gradients
        self.fetch: Any = self.data_probe._watched_next(_act, (), None)
        self.backward: Any = watch._watched(_act_given, (), None)
        probe = self.step_probe = steps.StepProbe(self.rates)
        probe._context, probe._recorder, probe._training, probe._before_step = (
            context, self.recorder, self.training, self.hooks.before_step,
        )  # fmt: skip
        probe._modes, probe._graph_being_made = (lambda: self.traced), (lambda: self.traced > 1)
        probe._others = SimpleNamespace(running={})  # type: ignore[assignment]
        probe._before, probe._after = self._note("before"), self._note("after")  # type: ignore[method-assign]
        self.hooks.before_step.register(self.breaker, self._note("due"))
        self.before, self.after = probe._compiled(
            self.breaker, probe._plain_before(self.breaker), probe._plain_after(self.breaker)
        )

    def plain(self, optimizer: Any, value: float = 0.5) -> None:
        """Make a step."""
        self.fetch(SimpleNamespace(_index_sampler=optimizer, act=lambda: 1))
        self.backward(Loss(value), None)
        self.before(optimizer, (optimizer,), {})
        self.after(optimizer, (optimizer,), {})

    def state(self) -> tuple[object, ...]:
        """Return all that hooks leave, but for times."""
        recorder, values = self.recorder, self.recorder.values
        trace = [stamp & 15 for stamp in recorder.trace]
        seen = [
            repr([getattr(owner, name, None) for name in names.split()])
            for owner, names in (
                (recorder, "sole in_pass step metered arguments log_wins _clean _timed _expected _tokens _samples"),
                (self.breaker, "is_open errors"),
                (self.data_probe, "_depth"),
                (self.training, "backwards in_closure"),
                (self.step_probe, "_depth _given _outer _untraced"),
                (self.hooks.before_step, "due_at"),
            )
        ]
        fields = repr([getattr(values, name, None) for name in getattr(values, "__slots__", ())])
        records = [unpack(raw, self.writer.header.seed) for raw in self.writer._recent]
        written = [
            None if made is None else (made.step, made.kind, made.flags, repr(made[7:10]), made.tokens) for made in records
        ]
        return seen, repr(trace), fields, written, list(self.calls)


def _act(iterator: Any) -> Any:
    return iterator.act()


def _act_given(*args: Any, **kwargs: Any) -> Any:
    for given in (*args, *kwargs.values()):
        if callable(given):
            return given()
    return None


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> object:
    """Return what it returns, or the class of its error."""
    try:
        return function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  # whichever: it has to be the same
        return type(error)


class Optimizer:
    """Has what the hooks look at."""

    def __init__(self, groups: Any) -> None:
        """Take it."""
        self.param_groups = groups


OPTIMIZERS = [
    Optimizer([{"lr": 0.1}]), Optimizer([{"lr": 3}]), Optimizer([]), Optimizer(None), Optimizer([{"lr": None}, {"lr": 0.5}]),
    Optimizer([{}]), Optimizer(({"lr": 0.2},)), SimpleNamespace(),
]  # fmt: skip
_SLOTS = {
    "recorder": "sole in_pass metered log_wins step _clean _timed _tokens _samples _expected _begun_ns",
    "training": "backwards in_closure thread",
    "values": "flags losses tokens samples step loss_sum norm_squared learning_rate norm_scale",
    "loss": "_scaled",
    "step": "_depth _given _outer _untraced",
    "breaker": "is_open",
    "rates": "key",
    "before_step": "due_at",
    "data": "_depth",
    "self": "traced gradients",
}
STATE = [f"{owner}.{name}" for owner, names in _SLOTS.items() for name in names.split()]
"""All that the hooks read"""


def ready(*, native: bool, optimizer: Any = OPTIMIZERS[0], **slots: Any) -> StepHooks:
    """Hooks of a training that has made two steps, so that the next is a plain one."""
    hooks = StepHooks(native=native)
    hooks.recorder.sole = hooks.recorder._pacemaker = hooks.rates.key = id(optimizer)
    hooks.recorder._alive[id(optimizer)] = lambda: optimizer  # type: ignore[assignment]
    for name, value in slots.items():
        setattr(hooks.recorder, name, value)
    for _ in range(2):
        hooks.plain(optimizer)
    return hooks


def perform(hooks: StepHooks, optimizer: Any, what: str, *given_values: Any) -> object:
    """Do it; return what comes of it."""
    if what == "set":
        return setattr(*owner_of(hooks, given_values[0]), given_values[1])  # type: ignore[func-returns-value]
    if what == "lengthen":
        return hooks.recorder.trace.extend([EXHAUSTED] * given_values[0])  # type: ignore[func-returns-value]
    error = given_values[-1]

    def act() -> int:
        if isinstance(error, Exception):
            raise error
        return 7

    if what == "plain":
        given_values = optimizer, *given_values
    elif what == "fetch":
        given_values = (SimpleNamespace(_index_sampler=optimizer, act=act),)
    elif what == "backward":
        return outcome(hooks.backward, *given_values[0], inputs=act)
    return outcome(getattr(hooks, what), *given_values)


def owner_of(hooks: StepHooks, name: str) -> tuple[Any, str]:
    """Return whose attribute one of ``STATE`` is, and its name there."""
    owner, attribute = name.split(".")
    return hooks.recorder.values if owner == "values" else hooks.owners[owner], attribute


KEPT = 45
"""Steps of a loop that are kept, its last ones: those before its end and around its last change"""
_FLAGS = {name.lower(): value for name, value in vars(StepFlag).items() if name.isupper()}
_NUMBERS = ("loss", "norm")

LOOPS = {
    "plain": "b X b X b X",
    "accumulation": "b b b X b b b X",
    "generative adversarial": "b D b G b D b G b D b G b D b G",
    "two groups after one pass": "b A B b A B b A B b A B",
    "three critics, one generator": "b C b C b C b G b C b C b C b G b C",
    "delayed actor": "b C b C b P b C b C b P b C",
    "soft actor-critic": "b q b p b a b q b p b a b q b p b a",
    "one optimizer called thrice a pass": "b X X X b X X X b X X X b X X X",
    "closure": "L! L! L!",
    "optimizers in the backward pass": "{x y z} {x y z} {x y z} {x y z}",
    "the same, and a head of its own": "{x y} H {x y} H {x y} H {x y} H",
    "a fold after another": "b A b A b A b Y b Y b Y",
    "generator twice": "b C b G b G b C b G b G b C b G b G",
    "made anew for each step": "b X~ b X~ b X~ b X~",
    "no backward pass at all": "X X X",
    "backward once, then gradients from elsewhere": "b X " + "X " * 300,
    "gradients given anew": "b X b X " + "X+ " * 40,
    "by hand": "b X u b X u b b X u",
    "by hand, without an optimizer": "b u b u",
    "two tasks in turn": "b A b B b A b B b A b B",
    "sharpness-aware": "b ^ b X b ^ b X b ^ b X",
    "warm-up of one player": "b G b G b D b G b D b G",
    "closure, and the backward pass before it": "b D? b G? b D? b G? b D? b G?",
    "skipped by the loss scaler": "b X b X- b X b X- b X",
    "updates by hand": "b = b = b = b = b =",
    "updates by hand behind an optimizer": "b X b X b = b = b = b X b X",
}
"""``b`` a backward pass; ``X`` optimizer X steps, ``X!`` with a closure that does the backward pass, ``X?`` with one that does
not, ``X~`` made anew, ``X+`` with other gradients, ``X-`` skipped; ``{x y}`` a backward pass in which optimizers step; ``u``
``torchobs.step()``; ``^`` and ``=``: the parameters are changed without an optimizer, and their gradients dropped."""


class EventLoop:
    """Real optimizers of torch's, by name, that do what the events say."""

    def __init__(self, events: str) -> None:
        self.events: list[str] = re.findall(r"\{[^}]*\}|\S+", events)
        names = sorted({name for event in self.events for name in re.findall(r"[A-Za-z]", event)} - {"b", "u"}) or ["X"]
        self.inside = {name for event in self.events if event[0] == "{" for name in re.findall(r"[a-z]", event)}
        self.layers = {name: torch.nn.Linear(3, 1, bias=name not in self.inside) for name in names}
        self.optimizers = {name: self._made(name) for name in names}
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if any("-" in event for event in self.events) else None
        self.passes, self.stepped = 0, set[str]()
        for name in self.inside:
            hook: Any = functools.partial(self._step_within, name)
            self.layers[name].weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _made(self, name: str) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.layers[name].parameters(), lr=0.01)

    def _step_within(self, name: str, _: torch.Tensor) -> None:
        self.optimizers[name].step()
        self.optimizers[name].zero_grad()

    def loss(self) -> torch.Tensor:
        """Of all layers together, another one each time."""
        self.passes += 1
        made = torch.stack([layer(torch.full((2, 3), 0.1 * self.passes)).square().mean() for layer in self.layers.values()])
        total = made.sum()
        return total if self.scaler is None else self.scaler.scale(total)

    def backward(self) -> torch.Tensor:
        """A backward pass; the gradients of optimizers that have stepped are dropped before it."""
        for name in self.stepped:
            self.optimizers[name].zero_grad()
        self.stepped.clear()
        loss = self.loss()
        torch.autograd.backward(loss)
        return loss

    def run(self) -> None:
        """All of it."""
        for event in self.events:
            if event == "b" or event[0] == "{":
                self.backward()
            elif event == "u":
                torchobs.step()
            elif event in "^=":
                self._update()
            else:
                self._step(event[0], event[1:])

    def _update(self) -> None:
        for parameter in itertools.chain.from_iterable(layer.parameters() for layer in self.layers.values()):
            with torch.no_grad():
                parameter.sub_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad, alpha=0.01)
            parameter.grad = None

    def _step(self, name: str, how: str) -> None:
        if how == "~":
            self.optimizers[name] = self._made(name)
        for parameter in self.layers[name].parameters():
            if how == "-":
                parameter.grad = torch.full_like(parameter, torch.inf)
            elif how == "+" or parameter.grad is None:
                parameter.grad = torch.ones_like(parameter)
        optimizer: Any = self.optimizers[name]
        if self.scaler is not None:
            self.scaler.step(optimizer)
            self.scaler.update(4.0)
        else:
            optimizer.step({"!": self.backward, "?": lambda: None}.get(how))
        self.stepped.add(name)


def columns(records: list[StepRecord]) -> dict[str, str]:
    """Return what is compared of the last records: exact columns run-length encoded, losses and norms with four digits."""
    steps = [record for record in records if record.kind == RecordKind.STEP]
    kept = steps[-KEPT:]
    return {
        "steps": f"{kept[0].step}-{kept[-1].step}" if kept else "",
        "passes": _runs(record.losses for record in kept),
        "flags": _runs("+".join(name for name, value in _FLAGS.items() if record.flags & value) for record in kept),
        "rate": _runs(f"{record.learning_rate:.4g}" for record in kept),
        "phases": _runs(
            "+".join(name for name, spent in zip(PHASE_NAMES, record.phase_s, strict=True) if spent) for record in kept
        ),
        "loss": " ".join(f"{record.loss:.4g}" for record in kept),
        "norm": " ".join(f"{record.grad_norm:.4g}" for record in kept),
    }


def _runs(values: Iterable[object]) -> str:
    return " ".join(f"{value or '-'}*{len(list(group))}" for value, group in itertools.groupby(values))


def assert_alike(found: dict[str, str], expected: dict[str, str]) -> None:
    """Compare; of losses and norms another machine or torch may have other last digits."""
    exact = found.keys() - set(_NUMBERS)
    assert {name: found[name] for name in sorted(exact)} == {name: expected[name] for name in sorted(exact)}
    for name in _NUMBERS:
        numbers = [[float(number) for number in each[name].split()] for each in (found, expected)]
        assert numbers[0] == pytest.approx(numbers[1], rel=0.02, abs=1e-4), name
