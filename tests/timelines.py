"""Timelines of steps as tests write them: boundaries in, times out."""

from __future__ import annotations

from torchobs.flight.layout import PHASE_NAMES
from torchobs.probes import timeline
from torchobs.probes.timeline import OPTIMIZER, OTHER, PHASE_OF, Carry, divide, walk

ORDER = PHASE_NAMES


class Timeline:
    """Notes boundaries as the hooks do, and divides each step when it ends."""

    squeezes = False
    """Whether it goes through the trace at each boundary, as through one that has become long"""

    def __init__(self) -> None:
        self._trace: list[int] = []
        self._arguments: list[int] = []
        self._carry: Carry | None = None
        self._begun_ns = 0
        self.evaluations: list[tuple[int, int]] = []

    def mark(self, code: int, now_ns: int, argument: int | None = None) -> None:
        """Note a boundary."""
        self._trace.append(now_ns << 4 | code)
        if argument is not None:
            self._arguments.append(argument)
        if self.squeezes:
            self._carry = self.state()
            self._carry.merge()
            self._trace, self._arguments = [], []

    def fetch_begins(self, loader: int, now_ns: int) -> None:
        """Note the begin of a fetch from that loader."""
        self.mark(timeline.FETCH, now_ns, loader)

    def fetch_ends(self, now_ns: int, *, exhausted: bool, gradients: bool) -> None:
        """Note its end."""
        self.mark((timeline.EXHAUSTED if exhausted else timeline.FETCHED) + (not gradients), now_ns)

    def backward_begins(self, now_ns: int) -> None:
        """Note the begin of the outermost backward pass."""
        self.mark(timeline.BACKWARD_BEGINS, now_ns)

    def turn(self, phase: int, now_ns: int) -> None:
        """Note a boundary at which that phase begins."""
        code = timeline.STEP_BEGINS if phase == OPTIMIZER else timeline.BACKWARD_ENDS
        assert PHASE_OF[code] == phase
        self.mark(code, now_ns)

    def evaluation_begins(self, module: int, now_ns: int) -> None:
        """Note ``module.eval()``."""
        self.mark(timeline.EVAL, now_ns, module)

    def evaluation_ends(self, module: int, now_ns: int) -> None:
        """Note ``module.train()``."""
        self.mark(timeline.TRAIN, now_ns, module)

    def pin(self, phase: int, now_ns: int) -> None:
        """Note the begin of a phase by hand."""
        self.mark(timeline.PIN, now_ns, phase)

    def unpin(self, now_ns: int) -> None:
        """Note its end."""
        self.mark(timeline.UNPIN, now_ns)

    def state(self) -> Carry:
        """What is known so far."""
        return walk(self._trace, self._arguments, self._begun_ns, self._carry)

    def close(self, now_ns: int) -> list[int]:
        """End the step."""
        divided = divide(self._trace, self._arguments, self._begun_ns, now_ns, self._carry)
        self._trace, self._arguments, self._begun_ns, self._carry = [], [], now_ns, divided.carry
        self.evaluations += divided.evaluations
        return divided.spent_ns


def spent(steps: Timeline, now: int) -> dict[str, int]:
    """Close the step; return what is not zero."""
    return {name: value for name, value in zip(ORDER, steps.close(now), strict=True) if value}


def one_step(steps: Timeline, start: int) -> int:
    """A step of 100 ns: data 10, forward 30, backward 40, other 5, optimizer 15."""
    steps.fetch_begins(1, start)
    steps.fetch_ends(start + 10, exhausted=False, gradients=True)
    steps.backward_begins(start + 40)
    steps.turn(OTHER, start + 80)
    steps.turn(OPTIMIZER, start + 85)
    return start + 100


def evaluate(steps: Timeline, loader: int, at: int) -> int:
    """Three batches of 10 ns each, which are looked at for 30, and the loader's end."""
    for begun in range(at, at + 120, 40):
        steps.fetch_begins(loader, begun)
        steps.fetch_ends(begun + 10, exhausted=False, gradients=True)
    steps.fetch_begins(loader, at + 120)
    steps.fetch_ends(at + 125, exhausted=True, gradients=True)
    return at + 125
