"""What the training thread is doing, for probes whose part in it depends on that."""

from __future__ import annotations

import sys
import time
from collections import deque
from threading import get_ident
from typing import TYPE_CHECKING, NamedTuple

from torchobs.detect.hangs import loop_lines
from torchobs.taps.taps import ThreadFrames

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType, FrameType

LONGEST_S = 60.0
"""A capture without an end for so long has failed: the sampler goes on"""
_PATIENCE_S, _REST_S = 0.2, 0.0005
"""Age of a round, of usually some ms, from which on no capture waits for it: the driver may not answer for long"""
_HOOKS_FILE = "torch/optim/optimizer.py"
"""Calls the hooks in a loop, which is not the training's"""

_COLLECTIVES_FILE = "torch/distributed/distributed_c10d.py"

_DEEPEST = 128
"""Frames of a stack that are examined: a trainer's loops are about fifty from the optimizer's step; recursion is unbounded."""

Places = tuple[tuple["CodeType", int], ...]
"""Code and current instruction offset of each frame of a stack, innermost first"""


class Captures:
    """Captures of CUDA graphs in progress in any thread, while which threads of ours rest.

    A garbage collection runs in whichever thread makes the object that is one too many. In the sampler thread it could destroy
    a graph or an event of the user's that was part of a cycle, and in a capture's default mode an unsafe CUDA call of any
    thread (the ``cudaFree`` of a graph's private pool) ends the capture with an error. The statistics of ``cudaMallocAsync``'s
    allocator are CUDA calls, too (``cudaMemPoolGetAttribute``). So the threads that do rounds (the sampler's, the GPU probe's)
    do none while a capture is in progress, and a capture waits for the rounds in progress.
    """

    __slots__ = ("_begun_s", "_rounds")

    def __init__(self) -> None:
        self._begun_s: dict[int, float] = {}
        self._rounds: dict[str, float] = {}
        """Threads of ours whose round is in progress, and since when"""

    def begin(self, graph: int) -> None:
        """Note that this graph, by id, is about to be captured, and wait for rounds in progress, but not for long."""
        now = self._begun_s[graph] = time.monotonic()
        while time.monotonic() - now < _PATIENCE_S and self._has_young_round():
            time.sleep(_REST_S)

    def end(self, graph: int) -> None:
        """Note that the capture has ended or did not begin."""
        self._begun_s.pop(graph, None)

    def begin_round(self, thread: str) -> bool:
        """Note that a thread of ours begins a round; return False if it has to rest. :meth:`end_round` follows either way.

        It is noted first and asked then: a capture that begins in between waits.
        """
        self._rounds[thread] = time.monotonic()
        return not self.in_progress()

    def end_round(self, thread: str) -> None:
        """Note that the thread's round has ended."""
        self._rounds.pop(thread, None)

    def in_progress(self) -> bool:
        """Return True if a graph is being captured."""
        begun_s = tuple(self._begun_s.values())  # another thread's capture may end meanwhile
        return bool(begun_s) and max(begun_s) > time.monotonic() - LONGEST_S

    def _has_young_round(self) -> bool:
        return any(time.monotonic() - begun_s < _PATIENCE_S for begun_s in tuple(self._rounds.values()))


class TrainingLoop:
    """Loops of the training: a thread that has left them is idle, and not hung, if no step comes.

    Examples are a notebook between two cells, a server that trained first, a sleep, an upload. When the optimizer steps, the
    loops of the training are on the stack; loops that already ran around ``init()`` (an event loop, a sweep) do not count. Once
    none of them is on the stack any more, the training is over, or between two stages. But a thread that waits for other ranks,
    in a final barrier or the last collective of a checkpoint, is still part of the training, and may hang there.
    ``note`` is for the training thread, ``left`` for the sampler thread.
    """

    __slots__ = ("_before", "_known", "_loops", "_places")

    def __init__(self) -> None:
        self._before = _places(sys._getframe())
        self._places: Places = ()
        self._known: Places = ()
        self._loops: list[tuple[CodeType, tuple[int, int]]] = []

    def note(self) -> None:
        """Record the stack of an optimizer step: 7 µs for twenty frames, so not for every step."""
        self._places = _places(sys._getframe())

    @property
    def is_known(self) -> bool:
        """Whether the last call of :meth:`left` has found a loop of the training."""
        return bool(self._loops)

    def left(self, thread: int) -> bool:
        """Return True if that thread runs no loop of the training and no collective; False if no loop is known."""
        places = self._places
        if places != self._known:
            before = set(_loops(self._before))
            self._known, self._loops = places, [loop for loop in _loops(places) if loop not in before]
        if not self._loops:
            return False
        with ThreadFrames() as frames:
            return not self._is_running(frames.get(thread))

    def _is_running(self, frame: FrameType | None) -> bool:
        while frame is not None:
            at, line = frame.f_code, frame.f_lineno or 0
            if any(code is at and first <= line <= last for code, (first, last) in self._loops):
                return True
            if at.co_filename.endswith(_COLLECTIVES_FILE):
                return True
            frame = frame.f_back
        return False


class EpochStart(NamedTuple):
    """Begin of an epoch, on CLOCK_MONOTONIC, and the last step that had ended by then."""

    number: int
    begun_ns: int
    step: int


class TrainingState:
    """State of the training thread. The step probe owns it: others read, but for what is named here.

    ``thread`` is first set by the session, ``loop`` noted by ``torchobs.step`` as well, and ``idle`` and
    ``evaluating_since_ns`` belong to the phase probe, which finds them in the sampler thread. The epoch probe sets ``epoch``
    and adds to ``epochs``, from which the run's spans take. The AMP probe sets ``autocast``.
    """

    __slots__ = (
        "autocast", "backwards", "captures", "epoch", "epochs", "evaluating_since_ns", "idle", "in_closure", "loop", "thread",
    )  # fmt: skip

    def __init__(self) -> None:
        self.thread = get_ident()
        """The training thread: the one that steps optimizers"""
        self.autocast: dict[str, str] = {}
        """The data type of autocast in training, by type of device, as last seen"""
        self.backwards = 0
        """1 while a backward pass runs in it"""
        self.in_closure = False
        """Whether an optimizer is evaluating its closure"""
        self.captures = Captures()
        """Captures of CUDA graphs, in whatever thread"""
        self.loop = TrainingLoop()
        """The loops of the training on that thread's stack"""
        self.idle = False
        """Whether the thread has left those loops"""
        self.evaluating_since_ns = 0
        """When a long evaluation in progress began; 0 if none is in progress"""
        self.epoch = 0
        """Number of the last epoch that has begun, from 1; 0 before the first"""
        self.epochs: deque[EpochStart] = deque(maxlen=1024)
        """Epochs whose begin the run's spans have not been told yet"""


def _places(frame: FrameType | None) -> Places:
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < _DEEPEST:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def _loops(places: Places) -> Iterator[tuple[CodeType, tuple[int, int]]]:
    for code, offset in places:
        lines = None if code.co_filename.endswith(_HOOKS_FILE) else loop_lines(code, offset)
        if lines is not None:
            yield code, lines
