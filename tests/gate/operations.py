"""What torchobs executes in a training step, counted: the same on every machine, and however busy it is.

Counted are the calls of our functions, in Python and compiled, those that Python's make of C's, and the bytecode instructions
of our code, in the training thread alone. That steps leave no memory behind is tests/faults/test_training.py's.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torchobs
from torchobs.probes import forward_stamps
from torchobs.probes.gradients import GradientProbe

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType, FrameType

    from typing_extensions import Self

OURS = str(Path(torchobs.__file__).parent)
NATIVE = "torchobs._native"
INTERVAL = 2
"""Norms are measured in every second step, so that steps of both kinds are there, as many as wished for."""
WARM_UP = 16
"""Steps until the training's cycle is known, and a step is recorded in the short way."""


class Operations(NamedTuple):
    """What one step executes."""

    calls: int
    instructions: int


class Counts(NamedTuple):
    """The median of each kind of steps: nearly all steps of a kind are alike to the instruction."""

    plain: Operations
    measuring: Operations
    """norms are measured as well"""


CEILINGS = {
    "mlp": Counts(Operations(38, 649), Operations(210, 2900)),
    "gpt": Counts(Operations(72, 1115), Operations(654, 6820)),
}
"""Most that steps may execute at level basic: what plain ones do with Python 3.11 and torch 2.13, and a little more than
measuring ones do, which is not the same to the instruction in each run. Whoever makes a step do more raises them, and says
why."""
NATIVE_CEILINGS = {
    "mlp": Counts(Operations(9, 44), Operations(177, 2250)),
    "gpt": Counts(Operations(40, 520), Operations(623, 6200)),
}
"""The same with the compiled part; its calls of other functions in C are not seen."""
ROOM = 1.0 if sys.version_info[:2] == (3, 11) else 1.1
"""Other versions of Python have other instructions"""


class OperationCounter:
    """Counts what this thread executes within a ``with`` block; ``step`` is to be called after each step."""

    def __init__(self, ours: str = OURS) -> None:
        self.plain: list[Operations] = []
        self.measuring: list[Operations] = []
        self._folder = ours
        self._is_ours: dict[CodeType, bool] = {}
        self._measurements = {GradientProbe._measure.__code__, GradientProbe._use_clipping_norm.__code__}
        self._calls = self._instructions = 0
        self._measured = False

    def __enter__(self) -> Self:
        sys.settrace(self._enter_frame)
        sys.setprofile(self._count_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        sys.settrace(None)

    def step(self) -> None:
        (self.measuring if self._measured else self.plain).append(Operations(self._calls, self._instructions))
        self._calls = self._instructions = 0
        self._measured = False

    def _covers(self, code: CodeType) -> bool:
        if code not in self._is_ours:
            self._is_ours[code] = code.co_filename.startswith(self._folder)
        return self._is_ours[code]

    def _enter_frame(self, frame: FrameType, event: str, argument: Any) -> Any:
        del event, argument
        if not self._covers(frame.f_code):
            return None
        self._measured |= frame.f_code in self._measurements
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._count_instruction

    def _count_instruction(self, frame: FrameType, event: str, argument: Any) -> Any:
        del frame, argument
        self._instructions += event == "opcode"
        return self._count_instruction

    def _count_call(self, frame: FrameType, event: str, argument: Any) -> None:
        ours = event in {"call", "c_call"} and self._covers(frame.f_code)
        self._calls += ours or (event == "c_call" and type(getattr(argument, "__self__", None)).__module__ == NATIVE)


def count(training: Iterator[None], steps: int, directory: Path, level: str = "basic", *, native: bool = True) -> Counts:
    """Count over so many steps of each kind. ``native``: with the compiled part, where it was built."""
    forward_stamps.LEAST_NS = forward_stamps.MOST_NS = sys.maxsize  # ten a second: in every step, where a machine is slow
    torchobs.init(flight_dir=directory, level=level, grad_interval=INTERVAL, native=native)
    for _ in range(WARM_UP):
        next(training)
    counter = OperationCounter()
    with counter:
        for _ in range(INTERVAL * steps):
            next(training)
            counter.step()
    torchobs.shutdown()
    return Counts(_median(counter.plain), _median(counter.measuring))


def _median(steps: list[Operations]) -> Operations:
    return Operations(*(statistics.median_high(figures) for figures in zip(*steps, strict=True)))


def over_ceiling(name: str, counts: Counts, *, native: bool = False, room: float = 1.0) -> list[str]:
    """Say what is more than a training's ceilings allow, ``room`` times over."""
    allowed = (NATIVE_CEILINGS if native else CEILINGS)[name]
    kinds = (("plain", counts.plain, allowed.plain), ("measuring", counts.measuring, allowed.measuring))
    return [
        f"{name}: a {kind} step has {is_of} {what}, {most} are allowed"
        for kind, ours, theirs in kinds
        for what, is_of, most in zip(Operations._fields, ours, theirs, strict=True)
        if is_of > most * room
    ]
