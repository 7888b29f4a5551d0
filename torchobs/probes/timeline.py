"""Divide a step's time into phases, from the boundaries that the hooks record. Pure: every time is an argument, in ns.

``data`` is a fetch, ``forward`` the time from a fetch to the outermost backward, ``backward`` the outermost backward,
``optimizer`` from the optimizer's pre to its post hook (inside a closure: forward up to its first backward), ``other`` the time
between those. Each is measured as an interval of its own. In a step without a fetch nothing shows where the forward pass
begins: what lies before its backward passes is ``between``. The script can mark what is ``data`` or ``rollout``; from there to
a backward of the step it is ``forward``. Stamps of some steps divide both (``flight.metrics.forward``).

Evaluation is neither a step nor part of one. It is

* the time between ``module.eval()`` and ``module.train()`` of the same module without a backward in between. It ends earlier,
  at the fetch from another loader, if that batch is still in use at ``train()`` or a backward follows: many trainers call
  ``train()`` in their step after the fetch. Before the first backward it begins with its first fetch: ``from_pretrained()``
  and frozen teachers call ``eval()`` long before any training.
* a fetch with gradients disabled, and the time after it,
* fetches from one loader without a backward before the next fetch from another one. (Several fetches from ONE loader before a
  backward, to its end or not, are trained on: Hugging Face's Trainer fetches all batches of an accumulation first.) Loaders
  that are fetched together (``zip``), each as often as the last one and not to its end, are one step's data.

Rollouts of a reinforcement learner in ``eval()`` mode look like an evaluation, unless they are marked as ``rollout``.

Boundaries are integers, ``ns << 4 | code``, which are interpreted when the step ends. Between real steps caches are cold, and a
hook costs what it touches: the same arithmetic took ten times longer spread over five hooks than in one place. So a hook
appends one integer. The boundaries of a plain step (``StepRecorder.end_plainly``) go into the record as they are; any others
are replayed through :class:`PhaseTimeline`.
"""

from __future__ import annotations

from collections import deque
from copy import copy
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PHASES = 9
DATA, FORWARD, BACKWARD, OPTIMIZER, OTHER, EVALUATION, CHECKPOINT, COMPILE, BETWEEN = range(PHASES)
"""In the order of the step record's phases."""
WITHIN_STEP = (DATA, FORWARD, BACKWARD, OPTIMIZER, OTHER, BETWEEN)
"""Those that are a step's own time"""

(
    FETCH, FETCHED, FETCHED_NO_GRAD, EXHAUSTED, EXHAUSTED_NO_GRAD, BACKWARD_BEGINS, BACKWARD_ENDS, STEP_BEGINS,
    CLOSURE_BEGINS, CLOSURE_GOES_ON, STEP_ENDS, EVAL, TRAIN, PIN, UNPIN, LOADER_STARTS,
) = range(16)  # fmt: skip
"""Those of a plain step are a part of the flight file's format (``step_record.PLAIN_CODES``). Each NO_GRAD code is its plain
code + 1. FETCH, EVAL, TRAIN and PIN have an argument, in a separate list, in order."""
ARGUED = frozenset({FETCH, EVAL, TRAIN, PIN})

PHASE_OF = (
    DATA, FORWARD, FORWARD, OTHER, OTHER, BACKWARD, OTHER, OPTIMIZER, FORWARD, OPTIMIZER, OTHER, OTHER, OTHER, OTHER,
    OTHER, DATA,
)  # fmt: skip
"""The phase that begins at each code."""

LONG_TRACE = 4096
"""Boundaries kept until the step ends. A longer trace (an evaluation, serving) is replayed early."""

_CODE = 15

NOTHING = -1
_MAX_EVALUATIONS = 64

Undecided = dict[int, tuple[int, int, int]]
"""Fetches that may be training's or evaluation's. By loader: ns in them, ns after each until the next boundary, their number"""


class Moment(NamedTuple):
    """The state when an evaluation may have begun, restored if one did, or when it may have ended."""

    at_ns: int
    spent_ns: list[int]
    undecided: Undecided
    owner: int = NOTHING
    """The module whose ``eval()`` was called"""


class PhaseTimeline:
    """The timeline of the step in progress."""

    __slots__ = (
        "_compiling_ns", "_ended", "_evaluating", "_evaluating_ns", "_fetch_ns", "_fetched", "_fetching", "_has_trained",
        "_loader", "_mark_ns", "_pinned", "_possible_end", "_teacher", "_trained", "_undecided", "_window", "_window_loader",
        "batches", "evaluations", "has_batch", "segment", "spent_ns",
    )  # fmt: skip

    def __init__(self) -> None:
        self.segment = NOTHING
        self.spent_ns = [0] * PHASES
        self._mark_ns = self._compiling_ns = 0
        self._pinned: list[int] = []
        self._teacher = NOTHING  # module in eval() during a backward: its next eval() is probably no evaluation
        self._has_trained = False
        self._leave_window()
        self.has_batch = False
        """Whether a batch was fetched for a backward pass of this step, or the script has marked where it is there"""
        self._trained = 0  # the last loader with a backward on its batch
        self.evaluations: deque[tuple[int, int]] = deque(maxlen=_MAX_EVALUATIONS)
        """Begin and end of each evaluation, in ns, consumed by the sampler thread"""
        self.batches: dict[int, int] = {}
        """By loader, how many of its batches were trained on; consumed at the step's end"""
        self._fetched: dict[int, int] = {}
        """fetches from each loader before the last backward pass that had several"""
        self._reset_fetch()

    def _reset_fetch(self) -> None:
        self._loader, self._fetch_ns, self._evaluating, self._evaluating_ns, self._fetching = 0, 0, False, 0, 0
        self._undecided: Undecided = {}
        self._ended: set[int] = set()

    def _leave_window(self) -> None:
        self._window: Moment | None = None
        self._possible_end: Moment | None = None
        self._window_loader = 0

    @property
    def clean(self) -> bool:
        """Whether the next step begins without state: no undecided fetch, no evaluation, no open phase."""
        return not (self._undecided or self._fetch_ns or self._loader or self._pinned or self._window or self._evaluating_ns)

    def restart(self, now_ns: int) -> None:
        """Continue from the end of a step, after plain steps that bypassed the timeline."""
        self._mark_ns, self.segment, self._has_trained, self.has_batch = now_ns, OTHER, True, False

    def add(self, spent_ns: Sequence[int]) -> None:
        """Add the times of a provisional end that was undone."""
        for index, length in enumerate(spent_ns):
            self.spent_ns[index] += length

    @property
    def started(self) -> bool:
        """Whether any boundary or step was recorded."""
        return self.segment != NOTHING

    def _cut(self, now_ns: int, following: int) -> int:
        """End the current segment, begin the next, return the length of the former."""
        length = now_ns - self._mark_ns if self.segment != NOTHING else 0
        self._mark_ns, self.segment = now_ns, following
        return length

    def fetch_begins(self, loader: int, now_ns: int) -> None:
        """Begin a fetch from a DataLoader. ``loader`` identifies it across epochs."""
        if self._pinned:
            self._fetching = loader
            return
        self._leave_segment(now_ns, DATA)
        if self._window is not None:
            if not self._has_trained and not self._window_loader:
                self._window = Moment(now_ns, self.spent_ns.copy(), self._undecided.copy(), self._window.owner)
            if self._window_loader not in {0, loader}:
                self._possible_end = Moment(now_ns, self.spent_ns.copy(), self._undecided.copy())
            self._window_loader = loader
        self._loader = loader

    def _leave_segment(self, now_ns: int, following: int) -> None:
        """End the current segment as what it was; what was done with a batch that may be no training's is set aside."""
        before = self.segment
        length = self._cut(now_ns, following)
        if before == FORWARD and self._loader:
            self._set_aside(length)
        elif before != NOTHING:
            self.spent_ns[before] += length

    def _set_aside(self, length: int) -> None:
        """Keep the times of a fetch without a backward so far, until it is known what they were."""
        if self._evaluating:
            self.spent_ns[EVALUATION] += self._fetch_ns + length
        else:
            data, rest, fetches = self._undecided.get(self._loader, (0, 0, 0))
            self._undecided[self._loader] = (data + self._fetch_ns, rest + length, fetches + 1)
        self._fetch_ns = 0

    def fetch_ends(self, now_ns: int, *, exhausted: bool, gradients: bool) -> None:
        """End a fetch. ``exhausted``: there was no batch left. ``gradients``: whether they are enabled."""
        if self._pinned == [DATA] and gradients and not exhausted:
            self._count_batches(self._fetching, 1)  # a fetch that the script marks as one
        if self._pinned or self.segment != DATA:
            return
        ahead = gradients and self._loader in self._undecided and (self._window is None or self._loader == self._trained)
        length = self._cut(now_ns, FORWARD if ahead or not exhausted else OTHER)
        self._evaluating = not gradients
        self._mark_evaluation(now_ns, length, over=exhausted or gradients)
        if not exhausted:
            self._fetch_ns = length
            return
        if self._evaluating:
            self.spent_ns[EVALUATION] += length
        elif self._loader in self._undecided:
            data, rest, fetches = self._undecided[self._loader]
            self._undecided[self._loader] = (data + length, rest, fetches)
            self._ended.add(self._loader)
        else:
            self.spent_ns[DATA] += length
        self._fetch_ns = 0
        if not ahead:  # else its last batches are trained on next, or the next fetch is from another loader
            self._loader, self._possible_end = 0, None

    def _mark_evaluation(self, now_ns: int, length: int, *, over: bool) -> None:
        """Record evaluations without ``eval()``: from a fetch without gradients to the loader's end or a fetch with gradients.

        ``length`` is the fetch's own.
        """
        if self._evaluating_ns and over:
            self.evaluations.append((self._evaluating_ns, now_ns if self._evaluating else now_ns - length))
            self._evaluating_ns = 0
        elif self._evaluating and not over and not self._evaluating_ns and self._window is None:
            self._evaluating_ns = now_ns - length

    def backward_begins(self, now_ns: int) -> None:
        """Begin the outermost backward: a fetch before it was data, and the time from there forward."""
        if self._possible_end is not None:
            self._conclude(self._possible_end)
        elif self._window is not None:
            self._teacher = self._window.owner
        self._leave_window()
        self._has_trained = True
        if self._pinned:
            return
        before = self.segment
        length = self._cut(now_ns, BACKWARD)
        if before == FORWARD and self._loader:
            self._trained = self._loader
        self.has_batch = self.has_batch or before == FORWARD
        if before == OTHER:
            before = FORWARD if self.has_batch else BETWEEN
        if before != NOTHING:
            self.spent_ns[before] += length
        self._decide()

    def _decide(self) -> None:
        self.spent_ns[DATA] += self._fetch_ns
        if self._fetch_ns:
            self._count_batches(self._loader, 1)
        own, before = bool(self._fetch_ns) + self._undecided.get(self._loader, (0, 0, 0))[2], self._fetched
        if self._undecided:
            self._fetched = {loader: fetches for loader, (_, _, fetches) in self._undecided.items()}
        for loader, (data, rest, fetches) in self._undecided.items():
            # a loader of which each step has several batches (unlabelled ones) is trained on as well
            is_usual = before.get(loader) == fetches
            if loader != self._loader and (loader in self._ended or (fetches > own and not is_usual)):
                self.spent_ns[EVALUATION] += data + rest
                continue
            self.spent_ns[DATA] += data
            self.spent_ns[OTHER if loader == self._loader else FORWARD] += rest
            self._count_batches(loader, fetches)
        self._reset_fetch()

    def _count_batches(self, loader: int, number: int) -> None:
        self.batches[loader] = self.batches.get(loader, 0) + number

    def turn(self, segment: int, now_ns: int) -> None:
        """End the current segment as what it was; ``segment`` begins."""
        if self._pinned:
            return
        before = self.segment
        length = self._cut(now_ns, segment)
        if before != NOTHING:
            self.spent_ns[before] += length

    def evaluation_begins(self, owner: int, now_ns: int) -> None:
        """``module.eval()`` was called; ``owner`` identifies the module."""
        if self._pinned or self._window is not None:
            return
        self._leave_segment(now_ns, self.segment)  # it continues: whether this is an evaluation is known later
        self._window = Moment(now_ns, self.spent_ns.copy(), self._undecided.copy(), owner)

    def evaluation_ends(self, owner: int, now_ns: int) -> None:
        """``module.train()`` was called; for the module that was in ``eval()``, the time between was an evaluation."""
        window = self._window
        if window is None or window.owner != owner or self._pinned:
            return
        if not self._has_trained and not self._window_loader:
            self._leave_window()
            return
        self._teacher = NOTHING if self._teacher == owner else self._teacher
        if self._possible_end is not None:
            self._conclude(self._possible_end)  # the segment since then continues
        else:
            self._cut(now_ns, OTHER)
            self._conclude(Moment(now_ns, self.spent_ns, self._undecided))
            self._loader, self._fetch_ns = 0, 0
        self._leave_window()

    def _conclude(self, end: Moment) -> None:
        """Count the time between ``eval()`` and that end as evaluation."""
        window = self._window
        if window is None:
            return
        self.evaluations.append((window.at_ns, end.at_ns))
        # checkpoints and compilations within it are counted as such
        within_ns = {segment: end.spent_ns[segment] - window.spent_ns[segment] for segment in (CHECKPOINT, COMPILE)}
        since_ns = [now - then for now, then in zip(self.spent_ns, end.spent_ns, strict=True)]
        self._undecided = fetched_since(self._undecided, end.undecided, window.undecided)
        self.spent_ns = [before + since for before, since in zip(window.spent_ns, since_ns, strict=True)]
        for segment, length in within_ns.items():
            self.spent_ns[segment] += length
        self.spent_ns[EVALUATION] += end.at_ns - window.at_ns - sum(within_ns.values())

    def pin(self, segment: int, now_ns: int) -> None:
        """Begin a phase set by the user (``torchobs.phase``); no hook changes it until :meth:`unpin`.

        A compilation interrupts the current segment, which continues after it as if no time had passed.
        """
        if segment == OTHER:
            self._leave_window()  # a rollout
        if segment == COMPILE:
            self._compiling_ns = self._compiling_ns or now_ns
        elif self._compiling_ns:
            pass  # a phase within a compilation counts as compilation
        elif not self._pinned:
            self._leave_segment(now_ns, segment)
        else:
            self.spent_ns[self._pinned[-1]] += self._cut(now_ns, segment)
        self._pinned.append(segment)

    def unpin(self, now_ns: int) -> None:
        """End the innermost pinned phase."""
        if not self._pinned:
            return
        ended = self._pinned.pop()
        if self._compiling_ns:
            if COMPILE not in self._pinned:
                self._take_out(now_ns)
                self._compiling_ns = 0
            return
        after = self._pinned[-1] if self._pinned else FORWARD if ended in {DATA, OTHER} else OTHER
        self.spent_ns[ended] += self._cut(now_ns, after)

    def _take_out(self, now_ns: int) -> None:
        """Count the time of a compilation, and move the start of the enclosing segment forward by it."""
        length = now_ns - self._compiling_ns
        self._compiling_ns = now_ns
        self._mark_ns += length
        self.spent_ns[COMPILE] += length

    def close(self, now_ns: int) -> list[int]:
        """End the step: return the ns spent in each segment, and begin the next step."""
        around = self._pinned
        if self._compiling_ns:
            self._take_out(now_ns)
            around = around[: around.index(COMPILE)]
        if self._possible_end is not None:
            self._conclude(self._possible_end)
        self._leave_window()
        pinned = around[-1] if around else None
        before = self.segment
        length = self._cut(now_ns, OTHER if pinned is None else pinned)
        if before != NOTHING:
            self.spent_ns[before] += length
        self._decide()
        self._has_trained = True
        spent, self.spent_ns = self.spent_ns, [0] * PHASES
        return spent

    def snapshot(self) -> PhaseTimeline:
        """Return a copy of the timeline. From any thread; the original may change meanwhile."""
        other = copy(self)
        other.spent_ns, other._pinned = other.spent_ns.copy(), other._pinned.copy()
        other._undecided, other._ended = other._undecided.copy(), other._ended.copy()
        other.evaluations, other.batches = deque(), {}
        return other

    def so_far(self, now_ns: int, patience_ns: float) -> tuple[list[int], int]:
        """Return the ns spent in each segment if the step ended now, and how many of them were idle.

        Call it on a snapshot only, which it consumes. An evaluation in progress counts. The time since the last boundary is
        idle if it exceeds ``patience_ns`` and no fetch, compilation, checkpoint or evaluation is in progress.
        """
        if not self._is_likely_window():
            self._leave_window()
        quiet_ns = now_ns - self._mark_ns if self._is_quiet() else 0
        idle_ns = quiet_ns if quiet_ns > patience_ns else 0
        while self._pinned:
            self.unpin(now_ns)
        if self._window is not None:
            self.evaluation_ends(self._window.owner, now_ns - idle_ns)
        elif self.segment == FORWARD and self._loader and self._evaluating:
            self._set_aside(self._cut(now_ns, OTHER))
            self.evaluations.append((self._evaluating_ns or now_ns, now_ns))
        return self.close(now_ns), idle_ns

    def evaluating_since(self) -> int:
        """Return when the evaluation in progress began, in ns, as far as known before its end; 0 if there is none."""
        if self._pinned or self.segment == NOTHING:
            return 0
        if self._window is not None:
            return 0 if self._is_quiet() or not self._is_likely_window() else self._window.at_ns
        return self._evaluating_ns

    def _is_likely_window(self) -> bool:
        """Return True if the module in ``eval()`` is probably being evaluated."""
        if self._window is None or self._window.owner == self._teacher:
            return False
        return self._has_trained or bool(self._window_loader)

    def _is_quiet(self) -> bool:
        if self._pinned or self.segment in {NOTHING, DATA}:
            return False
        if self._window is not None:  # until its loader has come to its end, or for good if it has none
            return bool(self._window_loader) and not self._loader
        return not (self.segment == FORWARD and self._loader and self._evaluating)


def fetched_since(now: Undecided, then: Undecided, before: Undecided) -> Undecided:
    """Return the fetches undecided ``before``, and those that were added to ``now`` since ``then``."""
    found = before.copy()
    for loader, (data, rest, fetches) in now.items():
        data_then, rest_then, fetches_then = then.get(loader, (0, 0, 0))
        if fetches > fetches_then:
            data_before, rest_before, fetches_before = found.get(loader, (0, 0, 0))
            found[loader] = (
                data_before + data - data_then, rest_before + rest - rest_then, fetches_before + fetches - fetches_then,
            )  # fmt: skip
    return found


def replay(timeline: PhaseTimeline, trace: Iterable[int], arguments: Sequence[int]) -> None:
    """Apply a trace to the timeline."""
    following = iter(arguments)
    for stamp in trace:
        code, now_ns = stamp & _CODE, stamp >> 4
        if code == FETCH:
            timeline.fetch_begins(next(following), now_ns)
        elif FETCHED <= code <= EXHAUSTED_NO_GRAD:
            exhausted, gradients = code >= EXHAUSTED, code in (FETCHED, EXHAUSTED)
            timeline.fetch_ends(now_ns, exhausted=exhausted, gradients=gradients)
        elif code == BACKWARD_BEGINS:
            timeline.backward_begins(now_ns)
        elif code == EVAL:
            timeline.evaluation_begins(next(following), now_ns)
        elif code == TRAIN:
            timeline.evaluation_ends(next(following), now_ns)
        elif code == PIN:
            timeline.pin(next(following), now_ns)
        elif code == UNPIN:
            timeline.unpin(now_ns)
        else:
            timeline.turn(PHASE_OF[code], now_ns)


def exhausted(trace: Iterable[int], arguments: Sequence[int], since_ns: int) -> set[int]:
    """Return the arguments of the fetches since ``since_ns`` that found their loader exhausted."""
    following, fetching, found = iter(arguments), 0, set[int]()
    for stamp in trace:
        code = stamp & _CODE
        if code in ARGUED:
            fetching = next(following)
        elif code in (EXHAUSTED, EXHAUSTED_NO_GRAD) and stamp >> 4 >= since_ns:
            found.add(fetching)
    return found
