"""The run's health in a sentence or two: a pure function of what the page shows."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from torchobs import catalog
from torchobs.catalog import PHASES, Severity
from torchobs.detect.spikes import LEAST_EXPLOSIONS, LEAST_LOSS_SPIKES
from torchobs.exporter.ui import formatting

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torchobs.exporter.ui.view_model import Row, Run

SLOW = 1.2
"""A rank that takes a fifth longer than its peers is worth a word: it costs the run a sixth of its speed."""

_MOST_NAMED = 4
_AT_WORK = {"evaluation": "Evaluating", "checkpoint": "Saving a checkpoint", "compile": "Compiling", "idle": "Idle"}
_ENDINGS = {
    "exception": "failed {ago} ago with an exception",
    "exit_code": "failed {ago} ago with an exit status",
    "out_of_memory": "was lost {ago} ago, likely out of memory",
}
_ANOMALIES = {
    "nonfinite_loss": "The loss is not finite",
    "nonfinite_gradient": "Gradients are not finite",
    "gradient_explosion": "Gradients explode",
    "loss_spike": "The loss has jumped",
    "gradient_vanishing": "Gradients vanish",
}
_PAST = {
    "nonfinite_loss": ("loss that was not finite", "losses that were not finite"),
    "nonfinite_gradient": ("gradient that was not finite", "gradients that were not finite"),
    "gradient_explosion": ("gradient explosion", "gradient explosions"),
    "loss_spike": ("loss spike", "loss spikes"),
    "gradient_vanishing": ("vanishing gradient", "vanishing gradients"),
}
_LEAST = {"gradient_explosion": LEAST_EXPLOSIONS, "loss_spike": LEAST_LOSS_SPIKES}
"""From how many on what is over is worth a look, as for the alert; of the other kinds it is one"""


class Health(NamedTuple):
    """What to say, and how loudly."""

    level: Severity
    text: str
    gist: str
    """the same without figures that change all the time: what a screen reader is to say when it changes"""


class _Note(NamedTuple):
    level: Severity
    text: str
    gist: str


NOTHING = Health(
    Severity.INFO,
    "No rank has been seen yet. One appears as soon as a training calls torchobs.init().",
    "No rank has been seen yet.",
)


MISSING = Health(
    Severity.INFO,
    "No such run (any more). Once it is there it is shown here.",
    "No such run (any more).",
)
"""Of a run that somebody has chosen and that is not there"""


def health(run: Run | None) -> Health:
    """Return the sentence on a run."""
    if run is None:
        return NOTHING
    head = _head(run)
    notes = [head, *sorted(_notes(run), key=lambda note: -note.level.value)]
    level = max((note.level for note in notes), key=lambda level: level.value)
    return Health(level, " ".join(note.text for note in notes), " ".join(note.gist for note in notes))


def _head(run: Run) -> _Note:
    up = [row for row in run.rows if row.up]
    if not up:
        done = all(row.state == "finished" for row in run.rows)
        word, ranks = ("Finished" if done else "Ended"), _many(len(run.rows), "rank")
        return _Note(
            Severity.INFO, f"{word}: {_listed([ranks, _many(run.steps, 'step'), _loss(run, 'last loss')])}.", f"{word}."
        )
    alive = [row for row in up if row.state != "unresponsive"]
    word = _activity(run, alive) if any(row.recorded for row in alive) else "Not recorded" if alive else "Not responding"
    here = "" if run.world_size <= run.expected else f" on this node, {run.world_size:,} in all"
    ranks = f"{len(alive):,} of {_many(run.expected, 'rank')} alive{here}"
    paces = [row.speed.per_s for row in alive if row.speed and row.speed.per_s]
    speed = f"{formatting.rate(min(paces)).removesuffix('/s')} steps/s" if paces and run.steps else ""
    step = f"step {run.steps:,}" if run.steps else "no step yet"
    return _Note(Severity.INFO, f"{word}: {_listed([ranks, step, _loss(run, 'loss'), speed])}.", f"{word}, {ranks}.")


def _activity(run: Run, alive: Sequence[Row]) -> str:
    phase, _ = Counter(row.phase for row in alive).most_common(1)[0]
    return _AT_WORK.get(phase or "", "Training" if run.steps else "Starting")


def _loss(run: Run, word: str) -> str:
    told = next((row for row in run.rows if row.readings.get(catalog.LOSS) is not None), None)
    if told is None:
        return ""
    word = "last finite loss" if "nonfinite_loss" in told.anomalies else word
    return f"{word} {formatting.number(told.readings.get(catalog.LOSS))}"


def _notes(run: Run) -> Iterator[_Note]:
    yield from _deaths(run.rows)
    yield from _silences(run.rows)
    yield from _unrecorded(run.rows)
    missing = run.expected - len(run.rows)
    if missing > 0:
        text = f"{_many(missing, 'rank')} {'has' if missing == 1 else 'have'} not appeared."
        yield _Note(Severity.WARNING, text, text)
    yield from _anomalies(run.rows)
    yield from _past(run.rows)
    yield from _unmoved(run.rows)
    yield from _given_up(run.rows)
    yield from _starved(run.rows)
    yield from _slowest(run.rows)


def _deaths(rows: Iterable[Row]) -> Iterator[_Note]:
    by_reason: dict[str, list[Row]] = {}
    for row in rows:
        if row.state in {"lost", "failed"}:
            by_reason.setdefault(row.reason, []).append(row)
    for reason, dead in by_reason.items():
        who, ago = _ranks(dead), formatting.span(min(row.beat_age_s for row in dead))
        how = _ENDINGS.get(reason, "was lost {ago} ago")
        how = how if len(dead) == 1 else how.replace("was lost", "were lost")
        yield _Note(Severity.ERROR, f"{who} {how.format(ago=ago)}.", f"{who} {how.replace(' {ago} ago', '')}.")


def _silences(rows: Sequence[Row]) -> Iterator[_Note]:
    hung = [row for row in rows if row.state == "hung"]
    if hung:
        who, since = _ranks(hung), formatting.span(max(row.progress_age_s or 0.0 for row in hung))
        verb = "hangs" if len(hung) == 1 else "hang"
        yield _Note(Severity.ERROR, f"{who} {verb}: no step for {since}.", f"{who} {verb}.")
    mute = [row for row in rows if row.state == "unresponsive"]
    if mute:
        who, since = _ranks(mute), formatting.span(max(row.beat_age_s for row in mute))
        verb = "does not respond" if len(mute) == 1 else "do not respond"
        yield _Note(Severity.ERROR, f"{who} {verb}: silent for {since}.", f"{who} {verb}.")


def _unrecorded(rows: Sequence[Row]) -> Iterator[_Note]:
    off = [row for row in rows if row.up and not row.recorded]
    if off:
        text = f"{_ranks(off)} {'does' if len(off) == 1 else 'do'} not record steps: switched off."
        yield _Note(Severity.INFO, text, text)


def _anomalies(rows: Sequence[Row]) -> Iterator[_Note]:
    for kind in catalog.ANOMALY_KINDS:
        affected = [row for row in rows if row.up and kind in row.anomalies]
        if affected:
            where = "" if len(affected) == sum(row.up for row in rows) else f" on {_ranks(affected).lower()}"
            text = f"{_ANOMALIES[kind]}{where}."
            yield _Note(catalog.ANOMALY_SEVERITY[kind], text, text)


def _past(rows: Sequence[Row]) -> Iterator[_Note]:
    """What there was, for who comes when it is over; a run that goes on may have recovered from it, after a while."""
    ended = not any(row.up for row in rows)
    active = {kind for row in rows if row.up for kind in row.anomalies}
    seen = {kind: max((int(row.readings.get(catalog.ANOMALIES, kind) or 0) for row in rows), default=0) for kind in _PAST}
    if any(row.readings.get(catalog.AMP_STEPS_SKIPPED) for row in rows):
        del seen["nonfinite_gradient"]  # the loss scaler at work
    seen = {kind: number for kind, number in seen.items() if number and kind not in active}
    if not seen:
        return
    what = [f"{number:,} {_PAST[kind][number > 1]}" for kind, number in seen.items()]
    lately = {kind: max((row.lately.get(kind, 0) for row in rows), default=0) for kind in seen}
    notable = any(number >= _LEAST.get(kind, 1) for kind, number in (seen if ended else lately).items())
    word = "There have been" if ended else "Lately:" if notable else "Earlier:"
    listed = f"{', '.join(what[:-1])} and {what[-1]}" if len(what) > 1 else what[0]
    yield _Note(Severity.WARNING if notable else Severity.INFO, f"{word} {listed}.", f"{word} anomalies.")


def _unmoved(rows: Sequence[Row]) -> Iterator[_Note]:
    """Whether or not the run has ended: what it has learned is the less for it."""
    layers = max((int(row.readings.get(catalog.GRAD_UNMOVED_LAYERS) or 0) for row in rows), default=0)
    if layers:
        text = f"{_many(layers, 'layer')} {'learns' if layers == 1 else 'learn'} nothing: hardly any gradient reaches them."
        text = text.replace("reaches them", "reaches it") if layers == 1 else text
        yield _Note(Severity.WARNING, text, text)


def _given_up(rows: Sequence[Row]) -> Iterator[_Note]:
    """A function that was recompiled up to torch's limit; its events say where, and which guard failed."""
    functions = max((int(row.readings.get(catalog.COMPILE_FAILURES, "recompile_limit") or 0) for row in rows), default=0)
    if functions:
        text = f"torch.compile has given {_many(functions, 'function')} up, recompiled again and again."
        yield _Note(Severity.WARNING, text, text)


def _starved(rows: Sequence[Row]) -> Iterator[_Note]:
    starved = [row for row in rows if row.up and row.readings.get(catalog.DATA_STARVED)]
    if starved:
        where = "" if len(starved) == sum(row.up for row in rows) else f" on {_ranks(starved).lower()}"
        text = f"Training waits for its data{where}."
        yield _Note(Severity.WARNING, text, text)


def _slowest(rows: Sequence[Row]) -> Iterator[_Note]:
    slow = [row for row in rows if row.up and row.slowness and row.slowness.factor >= SLOW]
    worst = max(slow, key=lambda row: row.slowness.factor if row.slowness else 0.0, default=None)
    if worst is not None and worst.slowness is not None:
        factor, phase = worst.slowness.factor, PHASES[worst.slowness.phase]
        text = f"Rank {worst.rank} is {factor:.1f} times slower than the others in {phase}."
        yield _Note(Severity.WARNING, text, f"Rank {worst.rank} is slower than the others in {phase}.")


def _ranks(rows: Sequence[Row]) -> str:
    names = [row.rank for row in rows[:_MOST_NAMED]]
    more = len(rows) - len(names)
    if len(rows) == 1:
        return f"Rank {names[0]}"
    return f"Ranks {', '.join(names)} and {more} more" if more else f"Ranks {', '.join(names[:-1])} and {names[-1]}"


def _listed(parts: Iterable[str]) -> str:
    return ", ".join(part for part in parts if part)


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
