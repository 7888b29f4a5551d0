"""A ``PlainSteps``, in Python or compiled, whose surroundings note what is handed to them: both have to do the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.flights import header
from torchobs.flight.step_record import unpack
from torchobs.flight.storage import Storage
from torchobs.flight.writer import FlightWriter
from torchobs.probes.hot_path import PlainSteps, plain_steps
from torchobs.support.error_guard import CircuitBreaker

if TYPE_CHECKING:
    from collections.abc import Callable


class Loss:
    """What a backward pass begins from: a number, or an error that reading it raises."""

    def __init__(self, value: Any, *, is_cpu: Any = True) -> None:
        self.value, self.is_cpu = value, is_cpu

    def item(self) -> Any:
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value


OPTIMIZERS: list[Any] = [
    *(SimpleNamespace(param_groups=groups) for groups in ([{"lr": 0.1}], [{"lr": 3}], [], None, [{"lr": None}, {"lr": 0.5}])),
    *(SimpleNamespace(param_groups=[{}]), SimpleNamespace(param_groups=({"lr": 0.2},)), SimpleNamespace()),
]
PUBLIC = tuple(name for name in PlainSteps.__slots__ if not name.startswith("_"))
_TIMES = {"begun_ns", "called_ns", "trace"}
_GIVEN = {
    *("data_breaker", "end_pass", "grad_enabled", "listeners", "loss_breaker", "loss_failed", "modes", "notify", "read_rate"),
    *("slow_after", "slow_backward", "slow_before", "slow_end", "slow_fetch", "step_breaker", "take_loss", "tensor"),
}


class StepHooks:
    """The hooks of a training that has made a step with that optimizer, so that the next is a plain one."""

    def __init__(self, *, native: bool, optimizer: Any = OPTIMIZERS[0]) -> None:
        self.calls: list[Any] = []
        self.traced, self.gradients = 0, True
        new = header(64)
        self.writer = FlightWriter(new, Storage(memoryview(bytearray(new.file_size))), native=native)
        self.steps = plain = plain_steps(self.writer)
        self.breakers = {name: CircuitBreaker(name) for name in ("step_breaker", "data_breaker", "loss_breaker")}
        plain.step_breaker, plain.data_breaker, plain.loss_breaker = self.breakers.values()
        for name in ("slow_before", "slow_after", "slow_end", "end_pass", "notify", "read_rate", "take_loss", "loss_failed"):
            setattr(plain, name, self._note(name))
        plain.slow_fetch = self._note("slow_fetch", lambda original, iterator: original(iterator))
        plain.slow_backward = self._note("slow_backward", lambda original, args, kwargs: original(*args, **kwargs))
        plain.listeners, plain.tensor = [self._note("listener"), plain.take_loss], Loss
        plain.modes, plain.grad_enabled = (lambda: self.traced), (lambda: self.gradients)
        plain.clean, plain.timed, plain.expected = True, True, [id(optimizer)]
        plain.sole = plain.rated = id(optimizer)

    def _note(self, what: str, then: Callable[..., Any] = lambda *_: None) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            kinds = [type(arg).__name__ for arg in args]
            self.calls.append((what, *kinds))
            return then(*args)

        return called

    def fetch(self, sampler: Any, act: Callable[[], Any] = lambda: 1) -> Any:
        """Fetch a batch; ``sampler``: of its loader, ``None`` for one without."""
        iterator = SimpleNamespace(act=act) if sampler is None else SimpleNamespace(act=act, _index_sampler=sampler)
        return self.steps.fetch(lambda of: of.act(), iterator)

    def backward(self, *args: Any, act: Callable[[], Any] = lambda: None) -> Any:
        return self.steps.backward(lambda *_, **settings: settings["act"](), args, {"act": act})

    def plain(self, optimizer: Any, value: float = 0.5) -> None:
        self.fetch(optimizer)
        self.backward(Loss(value), None)
        self.steps.before_step(optimizer, (optimizer,), {})
        self.steps.after_step(optimizer, (optimizer,), {})

    def state(self) -> tuple[object, ...]:
        """Return all that hooks leave, but for times."""
        steps = self.steps
        shown = {name: repr(getattr(steps, name)) for name in PUBLIC if name not in _GIVEN | _TIMES}
        trace = [stamp & 15 for stamp in steps.trace]
        records = [unpack(raw, self.writer.header.seed) for raw in self.writer._recent]
        written = [
            None if step is None else (step.step, step.kind, step.flags, repr(step[7:10]), step.tokens) for step in records
        ]
        breakers = [(breaker.is_open, breaker.errors) for breaker in self.breakers.values()]
        return shown, trace, bool(steps.called_ns), written, breakers, list(self.calls)


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> object:
    """Return what it returns, or the class of its error."""
    try:
        return function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  # whichever: it has to be the same
        return type(error)


def ready(*, native: bool, optimizer: Any = OPTIMIZERS[0]) -> StepHooks:
    """Hooks of a training that has made two steps."""
    hooks = StepHooks(native=native, optimizer=optimizer)
    for _ in range(2):
        hooks.plain(optimizer)
    return hooks


def perform(hooks: StepHooks, optimizer: Any, what: str, *arguments: Any) -> object:
    """Do it; return what comes of it."""
    if what == "set":
        owner: Any = hooks if hasattr(hooks, arguments[0]) else hooks.breakers.get(arguments[0], hooks.steps)
        setattr(owner, "is_open" if arguments[0] in hooks.breakers else arguments[0], arguments[1])
        return None
    if what == "boundaries":
        return hooks.steps.trace.extend(arguments[0])  # type: ignore[func-returns-value]
    if what == "plain":
        return outcome(hooks.plain, optimizer, *arguments)
    if what in {"before_step", "after_step", "append"}:
        return outcome(getattr(hooks.steps, what), *arguments)

    def act() -> int:
        if isinstance(arguments[-1], Exception):
            raise arguments[-1]
        return 7

    if what == "fetch":
        return outcome(hooks.fetch, arguments[0], act=act)
    return outcome(hooks.backward, *arguments[0], act=act)
