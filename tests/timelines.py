"""Timelines of steps as tests write them: boundaries in, times out."""

from __future__ import annotations

import re

from torchobs.flight.layout import PHASE_NAMES
from torchobs.probes import timeline as codes
from torchobs.probes.timeline import Carry, walk

ORDER = PHASE_NAMES
_MARKS = (codes.BACKWARD_BEGINS, codes.BACKWARD_ENDS, codes.STEP_BEGINS, codes.PIN, codes.UNPIN, codes.EVAL, codes.TRAIN)
_CODES = dict(zip("BbOPUET", _MARKS, strict=True))


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
        self._trace.append(now_ns << 4 | code)
        if argument is not None:
            self._arguments.append(argument)
        if self.squeezes:
            self._carry = self.state()
            self._carry.merge()
            self._trace, self._arguments = [], []

    def fetch(self, loader: int, begun_ns: int, ended_ns: int, *, exhausted: bool = False, gradients: bool = True) -> None:
        self.mark(codes.FETCH, begun_ns, loader)
        self.mark((codes.EXHAUSTED if exhausted else codes.FETCHED) + (not gradients), ended_ns)

    def note(self, boundaries: str) -> None:
        """Note boundaries that are written as words, each with its time.

        `F1@0-10` a fetch from loader 1, `x` behind it: exhausted, `n`: without gradients; `B` and `b` begin and end of a
        backward pass; `O` an optimizer's begin; `Pdata` and `U` begin and end of a phase that the user names; `E7` and `T7`
        ``eval()`` and ``train()`` of module 7.
        """
        for kind, of, at, end, more in re.findall(r"([A-Zb])(\w*)@(\d+)-?(\d*)(\w*)", boundaries):
            if kind == "F":
                self.fetch(int(of), int(at), int(end), exhausted="x" in more, gradients="n" not in more)
            else:
                argument = ORDER.index(of) if kind == "P" else int(of) if of else None
                self.mark(_CODES[kind], int(at), argument)

    def state(self) -> Carry:
        """What is known so far."""
        return walk(self._trace, self._arguments, self._begun_ns, self._carry)

    def close(self, now_ns: int) -> list[int]:
        carry = self.state()
        self._trace, self._arguments, self._begun_ns, self._carry = [], [], now_ns, carry
        spent_ns = carry.close(now_ns)
        self.evaluations += carry.pop_finished()[0]
        return spent_ns


def spent(steps: Timeline, now: int) -> dict[str, int]:
    """Close the step; return what is not zero."""
    return {name: value for name, value in zip(ORDER, steps.close(now), strict=True) if value}


def times(words: str) -> dict[str, int]:
    """The same from words such as `data 10, forward 30`."""
    return {name: int(value) for name, value in (pair.split() for pair in words.split(", "))}


def one_step(steps: Timeline, start: int) -> int:
    """A step of 100 ns: data 10, forward 30, backward 40, other 5, optimizer 15."""
    steps.fetch(1, start, start + 10)
    steps.mark(codes.BACKWARD_BEGINS, start + 40)
    steps.mark(codes.BACKWARD_ENDS, start + 80)
    steps.mark(codes.STEP_BEGINS, start + 85)
    return start + 100


def evaluate(steps: Timeline, loader: int, at: int) -> int:
    """Three batches of 10 ns each, which are looked at for 30, and the loader's end."""
    for begun in range(at, at + 120, 40):
        steps.fetch(loader, begun, begun + 10)
    steps.fetch(loader, at + 120, at + 125, exhausted=True)
    return at + 125
