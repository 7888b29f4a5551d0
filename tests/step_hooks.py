"""The hooks of a step, in Python or compiled, around real state and without torch: both ways have to leave the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.flights import header
from torchobs.flight.step_record import unpack
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
    from collections.abc import Callable


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
