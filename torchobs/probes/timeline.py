"""Divide a step's time into phases, from the boundaries that the hooks record. Pure: every time is an argument, in ns.

``data`` is a fetch, ``forward`` the time from a fetch to the outermost backward, ``backward`` the outermost backward,
``optimizer`` from the optimizer's pre to its post hook (inside a closure: forward up to its first backward), ``other`` the time
between those. Each is measured as an interval of its own. In a step without a fetch nothing shows where the forward pass
begins: what lies before its backward passes is ``between``. The script can mark what is ``data`` or ``rollout``; from there to
a backward of the step it is ``forward``. Stamps of some steps divide both (``flight.forward``).

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
appends one integer. The boundaries of a plain step (``hot_path.PlainSteps``) go into the record as they are; any others
go through :func:`walk` as the step ends, which sees all of it: what a fetch was for, and whether an ``eval()`` was an
evaluation, shows behind it.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

PHASES = 9
DATA, FORWARD, BACKWARD, OPTIMIZER, OTHER, EVALUATION, CHECKPOINT, COMPILE, BETWEEN = range(PHASES)
"""Phases, in the order of the step record."""
WITHIN_STEP = (DATA, FORWARD, BACKWARD, OPTIMIZER, OTHER, BETWEEN)
"""Phases that are a step's own time"""

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
"""Most boundaries kept until the step ends; a longer step (an evaluation, serving) is walked early"""

_CODE = 15

NOTHING = -1


class Piece(NamedTuple):
    """A part of the step in one phase."""

    phase: int
    length_ns: int
    loader: int = 0
    """Not 0: a fetch from that loader (data), or the time from one to the next (forward). The phase is still open"""
    fetches: int = 0


class Window(NamedTuple):
    """An evaluation that begins with ``module.eval()``."""

    owner: int
    """The module"""
    at_ns: int
    """When it began, and ``piece``: the first of it"""
    piece: int


def walk(trace: Iterable[int], arguments: Sequence[int], begun_ns: int, carry: Carry | None) -> Carry:
    """Return the state behind these boundaries; ``carry``: left by the last step, ``None`` if unknown."""
    state = Carry() if carry is None else carry.copy()
    if state.is_clean:
        state.since_ns, state.segment, state.has_trained = begun_ns, OTHER, True  # plain steps may have passed since
    following = iter(arguments)
    for stamp in trace:
        state.pass_(stamp & _CODE, stamp >> 4, following)
    return state


class Carry:
    """The part that a step leaves to the next, and the state within one: ``walk`` changes a copy."""

    __slots__ = (
        "batches", "compiling_ns", "ended", "evaluating_ns", "evaluations", "fetch_ns", "fetched", "fetching", "has_batch",
        "has_trained", "is_evaluated", "loader", "pieces", "pinned", "possible_end", "segment", "since_ns", "spent_ns",
        "teacher", "trained", "window", "window_loader",
    )  # fmt: skip

    def __init__(self) -> None:
        self.segment, self.since_ns = NOTHING, 0
        """The current phase, and since when"""
        self.spent_ns = [0] * PHASES
        """The certain part of the step"""
        self.pieces: list[Piece] = []
        """Pieces since the last backward pass: they may turn out to be an evaluation"""
        self.pinned: list[int] = []
        """Phases by hand and compilations that are open, the outermost first"""
        self.compiling_ns = 0
        self.window: Window | None = None
        self.window_loader = 0
        """The last loader that was fetched from in it"""
        self.possible_end: tuple[int, int] | None = None
        """Where it may have ended: the time, and the first piece after it"""
        self.teacher = NOTHING
        """A module that was in eval() in a backward pass: its next eval() is probably no evaluation"""
        self.loader = self.fetch_ns = 0
        """The loader of the last batch, and the time of that fetch until its purpose is known"""
        self.fetching = 0
        """The loader of a fetch within a phase by hand"""
        self.is_evaluated, self.evaluating_ns = False, 0
        """Whether that fetch was without gradients, and since when all fetches were"""
        self.ended: set[int] = set()
        """Loaders that came to their end since the last backward pass"""
        self.fetched: dict[int, int] = {}
        """Fetches from other loaders before the last backward pass that had any"""
        self.trained = 0
        """The last loader with a backward pass on its batch"""
        self.has_batch = self.has_trained = False
        """Whether a batch was fetched in this step, or marked by the script; whether anything was trained"""
        self.evaluations: list[tuple[int, int]] = []
        """Begin and end of each evaluation that has ended, in ns, until they are taken"""
        self.batches: dict[int, int] = {}
        """Number of batches by loader that were trained on in this step"""

    def copy(self) -> Carry:
        """Return a copy that changes independently."""
        other = copy(self)
        for name in ("spent_ns", "pieces", "pinned", "ended", "fetched", "evaluations", "batches"):
            setattr(other, name, getattr(self, name).copy())
        return other

    @property
    def is_clean(self) -> bool:
        """Whether nothing is open, so that the next step begins where this one ended."""
        is_open = self.pieces or self.loader or self.pinned or self.window or self.evaluating_ns or any(self.spent_ns)
        return self.segment == OTHER and not is_open

    def add(self, spent_ns: Sequence[int]) -> None:
        """Add the times of a part that continues."""
        self.spent_ns = [spent + more for spent, more in zip(self.spent_ns, spent_ns, strict=True)]

    # -- boundaries ---------------------------------------------------------------------------------------------------------

    def pass_(self, code: int, now_ns: int, arguments: Iterator[int]) -> None:
        """Advance the state past a boundary."""
        if code == FETCH:
            self._fetch_begins(next(arguments), now_ns)
        elif FETCHED <= code <= EXHAUSTED_NO_GRAD:
            self._fetch_ends(now_ns, exhausted=code >= EXHAUSTED, gradients=code in (FETCHED, EXHAUSTED))
        elif code == BACKWARD_BEGINS:
            self._backward_begins(now_ns)
        elif code == EVAL:
            self._evaluation_begins(next(arguments), now_ns)
        elif code == TRAIN:
            self.evaluation_ends(next(arguments), now_ns)
        elif code == PIN:
            self._pin(next(arguments), now_ns)
        elif code == UNPIN:
            self.unpin(now_ns)
        elif not self.pinned:
            self._cut(now_ns, PHASE_OF[code])

    def _cut(self, now_ns: int, following: int, phase: int | None = None) -> None:
        """End the current phase, under its name or as ``phase``; begin the next."""
        if self.segment != NOTHING:
            self.pieces.append(Piece(self.segment if phase is None else phase, now_ns - self.since_ns))
        self.since_ns, self.segment = now_ns, following

    def _leave(self, now_ns: int, following: int) -> None:
        """End the current phase at a fetch or the like: the work on a batch may be no training's."""
        if self.segment != FORWARD or not self.loader:
            self._cut(now_ns, following)
            return
        phases, loader = (
            (EVALUATION, EVALUATION) if self.is_evaluated else (DATA, FORWARD),
            self.loader * (not self.is_evaluated),
        )
        self.pieces.append(Piece(phases[0], self.fetch_ns, loader, 1))
        self.pieces.append(Piece(phases[1], now_ns - self.since_ns, loader))
        self.since_ns, self.segment, self.fetch_ns = now_ns, following, 0

    def _fetch_begins(self, loader: int, now_ns: int) -> None:
        if self.pinned:
            self.fetching = loader
            return
        self._leave(now_ns, DATA)
        if self.window is not None:
            if not self.has_trained and not self.window_loader:
                self.window = Window(self.window.owner, now_ns, len(self.pieces))
            if self.window_loader not in {0, loader}:
                self.possible_end = now_ns, len(self.pieces)
            self.window_loader = loader
        self.loader = loader

    def _fetch_ends(self, now_ns: int, *, exhausted: bool, gradients: bool) -> None:
        if self.pinned == [DATA] and gradients and not exhausted:  # a fetch that the script marks as one
            self.batches[self.fetching] = self.batches.get(self.fetching, 0) + 1
        if self.pinned or self.segment != DATA:
            return
        is_open = any(piece.loader == self.loader for piece in self.pieces)
        ahead = gradients and is_open and (self.window is None or self.loader == self.trained)
        begun_ns, self.since_ns, self.segment = self.since_ns, now_ns, FORWARD if ahead or not exhausted else OTHER
        self.is_evaluated = not gradients
        if self.evaluating_ns and (exhausted or gradients):
            self.evaluations.append((self.evaluating_ns, begun_ns if gradients else now_ns))
            self.evaluating_ns = 0
        elif not (gradients or exhausted or self.evaluating_ns or self.window):
            self.evaluating_ns = begun_ns
        if not exhausted:
            self.fetch_ns = now_ns - begun_ns
            return
        if is_open and gradients:
            self.ended.add(self.loader)
        loader = self.loader if is_open and gradients else 0
        self.pieces.append(Piece(DATA if gradients else EVALUATION, now_ns - begun_ns, loader))
        if not ahead:  # else its last batches are trained on next, or the next fetch is from another loader
            self.loader, self.possible_end = 0, None

    def _backward_begins(self, now_ns: int) -> None:
        """Count the fetch before as data, and the time from there as forward."""
        if self.possible_end is not None:
            self._conclude(*self.possible_end)
        elif self.window is not None:
            self.teacher = self.window.owner
        self._leave_window()
        self.has_trained = True
        if self.pinned:
            return
        if self.segment == FORWARD:
            self.trained, self.has_batch = self.loader or self.trained, True
        phase = (FORWARD if self.has_batch else BETWEEN) if self.segment == OTHER else self.segment
        self._cut(now_ns, BACKWARD, phase)
        self._decide()

    def _decide(self) -> None:
        """Decide whether the fetches since the last backward pass were for training or evaluation."""
        if self.fetch_ns:
            self.pieces.append(Piece(DATA, self.fetch_ns, self.loader, 1))
        fetches: dict[int, int] = {}
        for piece in self.pieces:
            if piece.loader:
                fetches[piece.loader] = fetches.get(piece.loader, 0) + piece.fetches
        trained = fetches.get(self.loader, 0)
        others = {loader: number for loader, number in fetches.items() if loader != self.loader}
        # a loader with several batches (unlabelled ones) in each step is trained on as well
        evaluated = {
            loader
            for loader, number in others.items()
            if loader in self.ended or (number > trained and self.fetched.get(loader) != number)
        }
        self.fetched = others or self.fetched
        for loader in fetches.keys() - evaluated:
            self.batches[loader] = self.batches.get(loader, 0) + fetches[loader]
        for phase, length_ns, loader, _ in self.pieces:
            ahead = phase == FORWARD and loader == self.loader != 0
            self.spent_ns[EVALUATION if loader in evaluated else OTHER if ahead else phase] += length_ns
        self.pieces.clear()
        self.ended.clear()
        self.loader, self.fetch_ns, self.is_evaluated, self.evaluating_ns = 0, 0, False, 0

    # -- evaluations --------------------------------------------------------------------------------------------------------

    def _leave_window(self) -> None:
        self.window, self.possible_end, self.window_loader = None, None, 0

    def _evaluation_begins(self, owner: int, now_ns: int) -> None:
        if not self.pinned and self.window is None:
            self._leave(now_ns, self.segment)  # it continues: whether this is an evaluation is known later
            self.window = Window(owner, now_ns, len(self.pieces))

    def evaluation_ends(self, owner: int, now_ns: int) -> None:
        """End the evaluation of the module that was in ``eval()``."""
        if self.window is None or self.window.owner != owner or self.pinned:
            return
        if self.has_trained or self.window_loader:
            self.teacher = NOTHING if self.teacher == owner else self.teacher
            if self.possible_end is not None:
                self._conclude(*self.possible_end)  # the phase since then continues
            else:
                self.pieces.append(Piece(DATA, self.fetch_ns))
                self._cut(now_ns, OTHER)
                self._conclude(now_ns, len(self.pieces))
                self.loader, self.fetch_ns = 0, 0
        self._leave_window()

    def _conclude(self, end_ns: int, end: int) -> None:
        """Count the time from ``eval()`` to there as evaluation; checkpoints and compilations in it are counted as such."""
        if self.window is None:
            return
        self.evaluations.append((self.window.at_ns, end_ns))
        for index in range(self.window.piece, end):
            piece = self.pieces[index]
            phase = piece.phase if piece.phase in {CHECKPOINT, COMPILE} else EVALUATION
            self.pieces[index] = Piece(phase, piece.length_ns)

    def merge(self) -> None:
        """Merge pieces that nothing to come can distinguish."""
        begins = sorted({0, *(self.window or ())[2:], *(self.possible_end or ())[1:]})
        places, merged = {}, list[Piece]()
        for begin, end in zip(begins, [*begins[1:], len(self.pieces)], strict=True):
            places[begin] = len(merged)
            sums: dict[tuple[int, int], tuple[int, int]] = {}
            for phase, length_ns, loader, fetches in self.pieces[begin:end]:
                length_before, before = sums.get((phase, loader), (0, 0))
                sums[phase, loader] = length_before + length_ns, before + fetches
            merged += [Piece(phase, length, loader, number) for (phase, loader), (length, number) in sums.items()]
        self.pieces = merged
        if self.window is not None:
            self.window = self.window._replace(piece=places[self.window.piece])
        if self.possible_end is not None:
            self.possible_end = self.possible_end[0], places[self.possible_end[1]]

    # -- phases by hand -----------------------------------------------------------------------------------------------------

    def _pin(self, phase: int, now_ns: int) -> None:
        """Begin a phase by hand (``torchobs.phase``), in which no hook changes anything.

        A compilation interrupts the current phase, which continues after it as if no time had passed.
        """
        if phase == OTHER:
            self._leave_window()  # a rollout
        if phase == COMPILE:
            self.compiling_ns = self.compiling_ns or now_ns
        elif self.compiling_ns:
            pass  # a phase within a compilation counts as compilation
        elif self.pinned:
            self._cut(now_ns, phase, self.pinned[-1])
        else:
            self._leave(now_ns, phase)
        self.pinned.append(phase)

    def unpin(self, now_ns: int) -> None:
        """End the innermost phase by hand."""
        if not self.pinned:
            return
        ended = self.pinned.pop()
        if not self.compiling_ns:
            after = self.pinned[-1] if self.pinned else FORWARD if ended in {DATA, OTHER} else OTHER
            self._cut(now_ns, after, ended)
        elif COMPILE not in self.pinned:
            self._take_out(now_ns)
            self.compiling_ns = 0

    def _take_out(self, now_ns: int) -> None:
        """Count the time of a compilation, and let the phase around it begin that much later."""
        length_ns, self.compiling_ns = now_ns - self.compiling_ns, now_ns
        self.since_ns += length_ns
        self.pieces.append(Piece(COMPILE, length_ns))

    # -- the end ------------------------------------------------------------------------------------------------------------

    def close(self, now_ns: int) -> list[int]:
        """End the step: return the ns spent in each phase, and begin the next."""
        around = self.pinned
        if self.compiling_ns:
            self._take_out(now_ns)
            around = around[: around.index(COMPILE)]
        if self.possible_end is not None:
            self._conclude(*self.possible_end)
        self._leave_window()
        self._cut(now_ns, around[-1] if around else OTHER)
        self._decide()
        self.has_trained = True
        spent_ns, self.spent_ns = self.spent_ns, [0] * PHASES
        return spent_ns

    def pop_finished(self) -> tuple[list[tuple[int, int]], dict[int, int]]:
        """Return the evaluations that have ended and the batches that were trained on, and begin with none."""
        evaluations, batches, self.evaluations, self.batches = self.evaluations, self.batches, [], {}
        return evaluations, batches

    def close_early(self, now_ns: int, patience_ns: float) -> tuple[list[int], int]:
        """Return the ns spent in each phase if the step ended now, and how many of them were idle; no step may follow.

        An evaluation in progress counts. The time since the last boundary is idle if it exceeds ``patience_ns`` and no fetch,
        compilation, checkpoint or evaluation is in progress.
        """
        if not self._is_likely_window():
            self._leave_window()
        quiet_ns = now_ns - self.since_ns if self._is_quiet() else 0
        idle_ns = quiet_ns if quiet_ns > patience_ns else 0
        while self.pinned:
            self.unpin(now_ns)
        if self.window is not None:
            self.evaluation_ends(self.window.owner, now_ns - idle_ns)
        elif self.segment == FORWARD and self.loader and self.is_evaluated:
            self._leave(now_ns, OTHER)
            self.evaluations.append((self.evaluating_ns or now_ns, now_ns))
        return self.close(now_ns), idle_ns

    def evaluating_since(self) -> int:
        """Return when the evaluation in progress began, in ns, as far as known before its end; 0 if there is none."""
        if self.pinned or self.segment == NOTHING:
            return 0
        if self.window is not None:
            return 0 if self._is_quiet() or not self._is_likely_window() else self.window.at_ns
        return self.evaluating_ns

    def _is_likely_window(self) -> bool:
        """Return whether the module in ``eval()`` is probably being evaluated."""
        is_teacher = self.window is None or self.window.owner == self.teacher
        return not is_teacher and (self.has_trained or bool(self.window_loader))

    def _is_quiet(self) -> bool:
        if self.pinned or self.segment in {NOTHING, DATA}:
            return False
        if self.window is not None:  # until its loader has come to its end, or for good if it has none
            return bool(self.window_loader) and not self.loader
        return not (self.segment == FORWARD and self.loader and self.is_evaluated)


def exhausted(trace: Iterable[int], arguments: Sequence[int], since_ns: int) -> set[int]:
    """Return the arguments of the fetches since ``since_ns`` that found their loader exhausted."""
    following, fetching, loaders = iter(arguments), 0, set[int]()
    for stamp in trace:
        code = stamp & _CODE
        if code in ARGUED:
            fetching = next(following)
        elif code in (EXHAUSTED, EXHAUSTED_NO_GRAD) and stamp >> 4 >= since_ns:
            loaders.add(fetching)
    return loaders
