"""From step records to metrics: progress, loss, gradient norms, goodput.

:func:`fold` is one pure function, used by the sampler thread and by every reader for the records after ``FOLDED_UPTO``, so
that the view is exact after any crash. Its state is the first ``WORDS`` words of value block 0.

**Goodput of the unfinished step.** An evaluation of an hour is visible while it lasts, and so is one after the last step. The
sampler adds the time to the goodput in advance and records it as credit; when the step ends, the fold adds its times minus the
credit. So no state's total ever decreases, whatever the step turns out to be, and all states together equal the elapsed time.
"""

from __future__ import annotations

from itertools import pairwise
from math import exp, inf, isfinite, log
from typing import TYPE_CHECKING, NamedTuple

from torchobs import catalog
from torchobs.detect.spikes import (
    AT_START,
    BACK,
    LEAST_FIRST,
    LEAST_RATES,
    RATE_MEMORY,
    RATE_ROSE,
    WARM_UP,
    Bursts,
    Candidate,
    UsualValues,
    are_long,
    follow,
    judge_low,
    stays_away,
)
from torchobs.flight.forward import ForwardShare
from torchobs.flight.step_record import RecordKind, StepFlag, StepRecord
from torchobs.flight.totals import (
    BURST_WORDS,
    DIVERGED,
    DURATION_SUM,
    GRADIENT_EXPLOSION,
    GRADIENT_VANISHING,
    LOSS_SPIKE,
    NONFINITE_GRADIENT,
    NONFINITE_LOSS,
    NORM_SUM,
    SIZE,
    STATES,
    Anomaly,
    Totals,
    Word,
    add,
    add_anomaly,
    begin_model,
    count,
    is_active,
    observe,
    signed,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torchobs.flight.step_record import StepRecord


class _Words(NamedTuple):
    """Where it is stored, and the kind of its spikes. ``logs``: the baseline is one of logarithms."""

    baseline: int
    usual: int
    start: int
    bursts: int
    excursion: int
    kind: int
    logs: bool


_LOSS = _Words(
    Word.LOSS_BASELINE, Word.LOSS_USUAL, Word.LOSS_START, Word.LOSS_BURSTS, Word.LOSS_EXCURSION, LOSS_SPIKE, logs=False
)  # fmt: skip
_NORM = _Words(
    Word.NORM_BASELINE, Word.NORM_USUAL, Word.NORM_START, Word.NORM_BURSTS, Word.NORM_EXCURSION, GRADIENT_EXPLOSION, logs=True
)  # fmt: skip


class Rise(NamedTuple):
    """The newest steps in which the loss was above its baseline, for norms that come in records of their own."""

    first: int
    last: int
    """0: there were none"""
    lasts: int
    """the loss stayed: a new baseline"""
    newest: int
    """step of the newest loss"""

    def add(self, step: int, past: UsualValues, *, waited: bool) -> Rise:
        """Return it with the loss that was added to ``past``. ``waited``: candidates waited before it."""
        if not past.is_high:
            return self._replace(newest=step)
        goes_on = waited or (self.last == self.newest and not self.lasts)
        return Rise(self.first if goes_on and self.last else step, step, int(past.settled), step)

    def explains(self, step: int, before: int, past: UsualValues) -> bool:
        """Return whether a norm may be high because the loss is. ``before``: step of the norm before it; ``past``: of norms.

        If the loss of its step has not come yet, the newest one counts. A loss that stayed explains the norms that are high
        since then, also where not each step's is measured.
        """
        if not self.last or step < self.first:
            return False
        if step <= self.last or self.last == self.newest < step:
            return True
        begun = bool(past.waiting) and past.explained > 0.0
        return self.lasts > 0 and (before <= self.last or begun)


def _load(totals: Totals, words: _Words) -> UsualValues:
    """Return the usual values of a series by the fold's state."""
    floats, ints, at = totals.floats, totals.ints, words.excursion
    past = UsualValues(logs=words.logs)
    past.mean, past.variance, past.count = floats[words.baseline], floats[words.baseline + 1], ints[words.baseline + 2]
    past.usual, past.start = floats[words.usual], floats[words.start]
    past.bursts = Bursts(*floats[words.bursts : words.bursts + BURST_WORDS])
    past.calm, past.explained, past.first = floats[at : at + 3]
    places = range(at + 4, at + 4 + 3 * ints[at + 3], 3)
    past.waiting = [Candidate(floats[place], ints[place + 1], ints[place + 2]) for place in places]
    return past


def _store(totals: Totals, words: _Words, past: UsualValues) -> None:
    """Write it into the fold's state."""
    floats, ints, bursts, at = totals.floats, totals.ints, past.bursts, words.excursion
    floats[words.baseline], floats[words.baseline + 1], ints[words.baseline + 2] = past.mean, past.variance, past.count
    floats[words.usual], floats[words.start] = past.usual, past.start
    for index, value in enumerate((bursts.recent, bursts.peak, bursts.length, bursts.top, bursts.calm)):
        floats[words.bursts + index] = value
    floats[at], floats[at + 1], floats[at + 2], ints[at + 3] = past.calm, past.explained, past.first, len(past.waiting)
    for index, candidate in enumerate(past.waiting):
        place = at + 4 + 3 * index
        floats[place], ints[place + 1], ints[place + 2] = candidate


def _report(past: UsualValues, words: _Words, spikes: list[Candidate], anomalies: list[Anomaly]) -> int:
    """Append these spikes to ``anomalies``; return their number."""
    unit = exp if words.logs else float
    for candidate in spikes:
        add_anomaly(anomalies, words.kind, candidate, unit(candidate.value), unit(past.usual))
    return len(spikes)


def begin_values(totals: Totals, anomalies: list[Anomaly]) -> None:
    """Forget all: another model is trained. What its last values were is decided before."""
    for words in (_LOSS, _NORM):
        past = _load(totals, words)
        totals.ints[Word.ANOMALIES + words.kind] += _report(past, words, past.give_up(ended=True), anomalies)
        _store(totals, words, UsualValues(logs=words.logs))
    totals.ints[Word.LOSS_RISE + 1], totals.floats[Word.NORM_BEFORE] = 0, 0.0


_NEAR_FIRST = 10
"""Steps after a model's first one in which its first loss is that of an untrained model"""
_LATE_SHARE = 0.25
"""The mean of the last squared norms has a memory of this share of all"""


_FITTED = 1e-3
"""Of the first loss: with so little left to learn a gradient is small because the training has succeeded"""


def fold_course(totals: Totals, records: Sequence[StepRecord], anomalies: list[Anomaly]) -> tuple[set[int], set[int]]:
    """Follow loss, learning rate and norm; before the newest step's number is moved by the losses themselves.

    Return the numbers of the records with a norm while the newest loss was next to nothing of the first, or exactly 0:
    a margin loss (hinge, triplet) that every example of a batch satisfies; and those soon after a jump of the learning rate.
    """
    fitted, faster, jump = set[int](), set[int](), totals.ints[Word.RATE_JUMP]
    floats, ints, losses = totals.floats, totals.ints, _Losses(totals)
    rate_sum, rates, top = floats[Word.RATE_SUM], ints[Word.RATES], floats[Word.TOP_RATE]
    number, late_square = ints[Word.NORMS], floats[Word.LATE_SQUARE]
    for record in records:
        flags, rate, norm = record.flags, record.learning_rate, record.grad_norm
        if flags & StepFlag.LEARNING_RATE and record.kind == RecordKind.STEP and isfinite(rate_sum + rate):
            if rates >= LEAST_RATES and 0.0 < RATE_ROSE * top <= rate:
                jump = record.step
            rate_sum += rate
            rates += 1
            top = max(top, rate)
        if jump and record.step - jump <= RATE_MEMORY:
            faster.add(record.seq)
        if flags & StepFlag.GRAD_NORM and isfinite(norm * norm):
            number += 1
            late_square += (norm * norm - late_square) / max(1.0, _LATE_SHARE * number)
        if flags & StepFlag.LOSS and record.step >= losses.newest and losses.stays_away_with(record):
            losses.judge(record, rate_sum / rates if rates else None, late_square if number else None, anomalies)
        if losses.is_fitted and record.step >= losses.newest and flags & StepFlag.GRAD_NORM:
            fitted.add(record.seq)
    floats[Word.RATE_SUM], ints[Word.RATES], floats[Word.TOP_RATE] = rate_sum, rates, top
    ints[Word.NORMS], floats[Word.LATE_SQUARE], ints[Word.RATE_JUMP] = number, late_square, jump
    losses.store(totals)
    return fitted, faster


def begin_course(totals: Totals) -> None:
    """Reset: another model is trained."""
    for word in (Word.LOSSES, Word.LOSS_LEFT, Word.RATES, Word.NORMS):
        totals.ints[word] = 0
    for word in (Word.FIRST_LOSS, Word.RATE_SUM, Word.TOP_RATE, Word.LATE_SQUARE):
        totals.floats[word] = 0.0


class _Losses:
    """A model's losses while records are added: whether they have left their start."""

    __slots__ = ("diverged", "first", "is_fitted", "least_known", "left", "newest", "number", "times")

    def __init__(self, totals: Totals) -> None:
        ints = totals.ints
        self.newest, self.number, self.left = ints[Word.LOSS_STEP], ints[Word.LOSSES], ints[Word.LOSS_LEFT]
        self.first, self.diverged = totals.floats[Word.FIRST_LOSS], is_active(totals, DIVERGED)
        self.least_known = max(ints[Word.MODEL_STEP], 1) + _NEAR_FIRST
        self.times = 0
        is_known = self.newest > 0 and not is_active(totals, NONFINITE_LOSS)
        self.is_fitted = is_known and self._is_fitted(totals.floats[Word.LOSS])
        """Whether the newest loss is next to nothing of the first"""

    def _is_fitted(self, loss: float) -> bool:
        return abs(loss) <= _FITTED * abs(self.first)

    def stays_away_with(self, record: StepRecord) -> bool:
        """Add the loss of a record that is none of an earlier step's; return whether it stays away and was not reported yet."""
        loss, left = record.loss, self.left
        self.newest = record.step  # a device may deliver an earlier one later
        self.is_fitted = False
        if not isfinite(loss):
            self.left, self.diverged = BACK if left != AT_START else left, False  # another anomaly
            return False
        self.number = number = self.number + 1
        if number == 1:
            self.first = loss
            self.left = left if record.step <= self.least_known else BACK
        elif abs(self.first) < LEAST_FIRST and number <= WARM_UP:
            self.first = loss
        elif left != BACK and (left != AT_START or number <= WARM_UP):
            self.left = follow(loss, self.first, number, left)
        self.is_fitted = self._is_fitted(loss)
        stays = stays_away(number, self.left)
        self.diverged = self.diverged and stays
        return stays and not self.diverged

    def judge(self, record: StepRecord, rate: float | None, square: float | None, anomalies: list[Anomaly]) -> None:
        """Add the anomaly if the steps were long enough for it, by the mean learning rate and that of late squared norms."""
        if are_long(record.loss, rate, square):
            self.diverged, self.times = True, self.times + 1
            add_anomaly(anomalies, DIVERGED, record, record.loss, self.first)

    def store(self, totals: Totals) -> None:
        """Write all into the fold's state."""
        totals.ints[Word.LOSSES], totals.ints[Word.LOSS_LEFT] = self.number, self.left
        totals.floats[Word.FIRST_LOSS] = self.first
        count(totals, DIVERGED, self.times, active=self.diverged)


_PHASE_WORDS = slice(Word.PHASE_TIME, Word.PHASE_TIME + len(catalog.PHASES))
_STATE_WORDS = tuple(Word.GOODPUT + catalog.GOODPUT_STATES.index(state) for state in STATES)
_STATE_COUNT = len(STATES)
_NO_KIND = -1
_NORM_KINDS = (NONFINITE_GRADIENT, GRADIENT_EXPLOSION, GRADIENT_VANISHING)


def fold(totals: Totals, records: Sequence[StepRecord], anomalies: list[Anomaly] | None = None) -> None:
    """Add ``records``, in ring order, to ``totals``; anomalies are appended to the list. Pure: no clock, no I/O.

    Each subject is one pass over the batch with its state in local variables: item access through a memoryview costs as
    much as the arithmetic, and at a thousand steps a second the sampler's use of the GIL slows training. The result is
    the same to the last bit however the records were cut into batches: sums run in ring order from the stored value,
    else a reader's total could decrease by a rounding error, which Prometheus takes for a reset.

    Records already in ``totals`` are skipped, and an exception changes nothing: a batch that was interrupted (by a
    signal handler that raises) can be folded again.
    """
    upto = totals.ints[Word.FOLDED_UPTO]
    fresh = records if records and records[0].seq > upto else [record for record in records if record.seq > upto]
    if not fresh:
        return
    changed, noted, newest = Totals(bytearray(totals.buffer[:SIZE])), list[Anomaly](), fresh[-1].seq
    for part in _by_model(fresh):
        if part[0].flags & StepFlag.NEW_MODEL:
            begin_model(changed, part[0].step)
            begin_course(changed)
            begin_values(changed, noted)
        fold_late(changed, part, noted)
    add(changed, Word.RECORDS_LOST, newest - upto - len(fresh))
    changed.ints[Word.FOLDED_UPTO] = newest
    totals.buffer[:SIZE] = changed.buffer
    if anomalies is not None:
        anomalies += noted


def _by_model(records: Sequence[StepRecord]) -> list[Sequence[StepRecord]]:
    """Split the records where a new model begins."""
    cuts = [index for index, record in enumerate(records) if index and record.flags & StepFlag.NEW_MODEL]
    return [records[begin:end] for begin, end in pairwise([0, *cuts, len(records)])] if cuts else [records]


def fold_late(totals: Totals, records: Sequence[StepRecord], anomalies: list[Anomaly]) -> None:
    """Add records that arrived after their numbers had been skipped and counted as lost."""
    add(totals, Word.TOKENS, sum(record.tokens for record in records))
    add(totals, Word.SAMPLES, sum(record.samples for record in records))
    rates = (record.learning_rate for record in reversed(records) if record.flags & StepFlag.LEARNING_RATE)
    totals.floats[Word.LEARNING_RATE] = next(filter(isfinite, rates), totals.floats[Word.LEARNING_RATE])
    steps = [record for record in records if record.kind == RecordKind.STEP]
    if steps:
        _fold_progress(totals, steps)
        _fold_times(totals, steps)
    fitted, faster = fold_course(totals, records, anomalies)
    rises = _fold_losses(totals, records, anomalies, faster)
    fold_norms(totals, records, anomalies, fitted, rises)
    totals.ints[Word.STEPS_SKIPPED] += sum(1 for record in records if record.flags & StepFlag.SKIPPED)
    _fold_clipped(totals, [record.step for record in records if record.flags & StepFlag.CLIPPED])


def _fold_clipped(totals: Totals, steps: list[int]) -> None:
    """Count each step once: several parts of its gradient may have been clipped, each with its own record."""
    ints = totals.ints
    for step in steps:
        if step > ints[Word.LAST_CLIPPED]:
            ints[Word.LAST_CLIPPED] = step
            ints[Word.CLIPPED_STEPS] += 1


def _fold_progress(totals: Totals, steps: list[StepRecord]) -> None:
    ints, floats, last = totals.ints, totals.floats, steps[-1]
    ints[Word.STEPS] += len(steps)
    ints[Word.LAST_STEP] = last.step
    floats[Word.LAST_STEP_TIMESTAMP] = (last.end_ns + signed(ints[Word.CLOCK_OFFSET])) / 1e9
    durations = [record.duration_s for record in steps if not record.flags & StepFlag.UNTIMED]
    observe(totals, Word.STEP_DURATION, catalog.SECONDS_BOUNDS, DURATION_SUM, durations)


def _fold_times(totals: Totals, steps: list[StepRecord]) -> None:
    floats = totals.floats
    data, forward, backward, optimizer, other, between = floats[_PHASE_WORDS]
    productive, starved, skipped, evaluation, checkpoint, compiling = floats[Word.GOODPUT : Word.GOODPUT + 6]
    has_credit, share = any(credited(totals)), ForwardShare(floats[Word.FORWARD_SHARE : Word.FORWARD_SHARE + 5])
    for record in steps:
        share.learn(record)
        data_s, _, backward_s, optimizer_s, _, evaluation_s, checkpoint_s, compile_s, _ = record.phase_s
        forward_s, other_s, between_s = share.divide(record.phase_s, record.gap_s)
        data += data_s
        forward += forward_s
        backward += backward_s
        optimizer += optimizer_s
        other += other_s
        between += between_s
        trained_s = forward_s + backward_s + optimizer_s + other_s + between_s
        if has_credit:
            spent_s = (data_s, evaluation_s, checkpoint_s, compile_s, trained_s)
            data_s, evaluation_s, checkpoint_s, compile_s, trained_s = deduct_credit(totals, spent_s)
            has_credit = any(credited(totals))
        starved += data_s
        evaluation += evaluation_s
        checkpoint += checkpoint_s
        compiling += compile_s
        if record.flags & StepFlag.SKIPPED:
            skipped += trained_s
        else:
            productive += trained_s
    for index, value in enumerate(share.words()):
        floats[Word.FORWARD_SHARE + index] = value
    for index, value in enumerate((data, forward, backward, optimizer, other, between)):
        floats[Word.PHASE_TIME + index] = value
    for index, value in enumerate((productive, starved, skipped, evaluation, checkpoint, compiling)):
        floats[Word.GOODPUT + index] = value


def _fold_losses(
    totals: Totals, records: Sequence[StepRecord], anomalies: list[Anomaly], faster: Collection[int]
) -> dict[int, Rise]:
    """Add losses; return the rise of the loss as of each record with a norm.

    ``faster``: numbers of the records soon after a jump of the learning rate.
    """
    ints, floats, rises = totals.ints, totals.floats, dict[int, Rise]()
    newest, last, finite = ints[Word.LOSS_STEP], floats[Word.LOSS], not is_active(totals, NONFINITE_LOSS)
    rise = Rise(ints[Word.LOSS_RISE], ints[Word.LOSS_RISE + 1], ints[Word.LOSS_RISE + 2], newest)
    past = _load(totals, _LOSS)
    number = nonfinite = 0
    spike = is_active(totals, LOSS_SPIKE)
    for record in records:
        loss, late = record.loss, record.step < newest
        if not record.flags & StepFlag.LOSS:
            pass
        elif not isfinite(loss):
            nonfinite += 1
            number += _report(past, _LOSS, past.give_up(), anomalies)
            add_anomaly(anomalies, NONFINITE_LOSS, record, loss, past.usual if past.count else last)
            if not late:
                newest, finite, spike, rise = record.step, False, False, rise._replace(newest=record.step)
        elif not late:  # else delivered by a device after a newer step's value
            newest, finite, last, waited = record.step, True, loss, bool(past.waiting)
            spikes, spike = past.add(loss, record.step, record.end_ns, explained=record.seq not in faster)
            number += _report(past, _LOSS, spikes, anomalies)
            rise = rise.add(record.step, past, waited=waited)
        if record.flags & StepFlag.GRAD_NORM:
            rises[record.seq] = rise
    if any(record.flags & StepFlag.LOSS for record in records):
        ints[Word.LOSS_RISE], ints[Word.LOSS_RISE + 1], ints[Word.LOSS_RISE + 2] = rise[:3]
        ints[Word.LOSS_STEP], floats[Word.LOSS] = newest, last
        _store(totals, _LOSS, past)
        count(totals, NONFINITE_LOSS, nonfinite, active=not finite)
        count(totals, LOSS_SPIKE, number, active=spike)
    return rises


def fold_norms(
    totals: Totals, records: Sequence[StepRecord], anomalies: list[Anomaly], fitted: Collection[int], rises: Mapping[int, Rise]
) -> None:
    """Add the norms of ``records``, in ring order (see :func:`fold`).

    ``fitted``: numbers of records that may have a small norm since nothing is left to learn. ``rises``: by number of a record,
    what its norm may be high by.
    """
    ints, floats = totals.ints, totals.floats
    newest, last, low = ints[Word.GRAD_NORM_STEP], floats[Word.GRAD_NORM], ints[Word.LOW_NORMS]
    since = ints[Word.MODEL_STEP]
    active = {kind: is_active(totals, kind) for kind in _NORM_KINDS}
    counts = dict.fromkeys(_NORM_KINDS, 0)
    past, skipped = _load(totals, _NORM), ints[Word.STEPS_SKIPPED] > 0
    for record in records:
        skipped = skipped or bool(record.flags & StepFlag.SKIPPED)
        if not record.flags & StepFlag.GRAD_NORM:
            continue
        norm, kind = record.grad_norm, _NO_KIND
        if not isfinite(norm):
            kind = NONFINITE_GRADIENT
            if record.step >= since and not skipped and record.norm_scale == 1.0:  # under a loss scaler it is ordinary
                counts[GRADIENT_EXPLOSION] += _report(past, _NORM, past.give_up(), anomalies)
            add_anomaly(anomalies, kind, record, norm, exp(past.usual) if past.count else last)
        elif record.step >= since:
            mean = min(past.mean, log(floats[Word.NORM_BEFORE] or inf))  # back where it was before it rose, it has not vanished
            vanished, low = (False, 0) if record.seq in fitted else judge_low(norm, mean, past.variance, past.count, low)
            usual, explained = past.usual, rises[record.seq].explains(record.step, newest, past)
            spikes, exploded = past.add(norm, record.step, record.end_ns, explained=explained) if norm > 0.0 else ([], False)
            floats[Word.NORM_BEFORE] = exp(mean) if past.settled and norm > 0.0 else floats[Word.NORM_BEFORE]
            counts[GRADIENT_EXPLOSION] += _report(past, _NORM, spikes[: len(spikes) - exploded], anomalies)
            past.usual = usual if vanished else past.usual
            if exploded or vanished:
                kind = GRADIENT_EXPLOSION if exploded else GRADIENT_VANISHING
                add_anomaly(anomalies, kind, record, norm, exp(past.usual) if past.count else 0.0)
        if kind != _NO_KIND:
            counts[kind] += 1
        if record.step >= newest:  # else delivered by a device after a newer step's value
            newest, active = record.step, {other: other == kind for other in _NORM_KINDS}
            last = norm if isfinite(norm) else last
    ints[Word.GRAD_NORM_STEP], floats[Word.GRAD_NORM], ints[Word.LOW_NORMS] = newest, last, low
    ints[Word.NONFINITE_STEPS] += counts[NONFINITE_GRADIENT]
    _store(totals, _NORM, past)
    for kind in _NORM_KINDS:
        count(totals, kind, counts[kind], active=active[kind])
    norms = [record.grad_norm for record in records if record.flags & StepFlag.GRAD_NORM and isfinite(record.grad_norm)]
    observe(totals, Word.NORM_DISTRIBUTION, catalog.NORM_BOUNDS, NORM_SUM, norms)


def credited(totals: Totals) -> list[float]:
    """Return the credit of each of ``STATES``: seconds not covered by a record yet."""
    return list(totals.floats[Word.CREDITED : Word.CREDITED + _STATE_COUNT])


def credit(totals: Totals, after_step: int, seconds: Sequence[float], whole_s: float) -> None:
    """Raise the credit to ``seconds`` in each of ``STATES``, in all at most ``whole_s``, the time since ``after_step``.

    Does nothing unless ``after_step`` is the last step folded: its own record is still due, or a later one was folded.
    """
    if totals.ints[Word.LAST_STEP] != after_step:
        return
    earned = credited(totals)
    fresh = [max(now - before, 0.0) for now, before in zip(seconds, earned, strict=True)]
    wanted, room = sum(fresh), max(whole_s - sum(earned), 0.0)
    share = min(1.0, room / wanted) if wanted else 0.0
    floats = totals.floats
    for index, amount in enumerate(fresh):
        floats[_STATE_WORDS[index]] += amount * share
        floats[Word.CREDITED + index] += amount * share


def clear_credit(totals: Totals) -> None:
    """Reset the credit and keep the goodput: the credited step will have no record."""
    for index in range(_STATE_COUNT):
        totals.floats[Word.CREDITED + index] = 0.0


def deduct_credit(totals: Totals, spent_s: Sequence[float]) -> list[float]:
    """Return a step's times minus the credit. ``spent_s``: seconds in each of ``STATES``, with training instead of ``idle``.

    Excess credit of a state is deducted from the others, in proportion to their remaining times.
    """
    earned = credited(totals)
    *others, idle = earned
    more = [spent - before for spent, before in zip(spent_s, [*others, 0.0], strict=True)]
    lacking = sum(max(-amount, 0.0) for amount in more) + idle
    gained = [max(amount, 0.0) for amount in more]
    total = sum(gained)
    owed = max(lacking - total, 0.0)  # exceeds the whole step: the rest is deducted from the next
    for index, amount in enumerate([*(max(-amount, 0.0) for amount in more[:-1]), idle]):
        totals.floats[Word.CREDITED + index] = amount * (owed / lacking) if owed else 0.0
    share = max(total - lacking, 0.0) / total if total else 0.0
    return [amount * share for amount in gained]
