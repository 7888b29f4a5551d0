"""Goodput of a step that has not ended: an evaluation of an hour is seen while it lasts, and one after the last step at all.

The sampler adds it to the goodput, and remembers as credit what it has added; the fold adds of the step's own record what is
left of it. So a state never steps back, whatever a step turns out to have been, and what all states have together is the time
that has passed. Pure, as the fold is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.flight.metrics.totals import Totals, Word

if TYPE_CHECKING:
    from collections.abc import Sequence

STATES = ("data", "evaluation", "checkpoint", "compile", "idle")
"""What can be told before a step's end. Whether its training was productive shows when it ends."""
_WORDS = tuple(Word.GOODPUT + catalog.GOODPUT_STATES.index(state) for state in STATES)
_COUNT = len(STATES)


def credited(totals: Totals) -> list[float]:
    """Return the seconds of each of ``STATES`` that no record has covered yet."""
    return list(totals.floats[Word.CREDITED : Word.CREDITED + _COUNT])


def credit(totals: Totals, after_step: int, seconds: Sequence[float], whole_s: float) -> None:
    """Bring the credit up to ``seconds`` in each of ``STATES``, of the ``whole_s`` that have passed since that step's end.

    Nothing where that step is not the last one folded: its own record comes first, or the next one's has come.
    """
    if totals.ints[Word.LAST_STEP] != after_step:
        return
    given = credited(totals)
    fresh = [max(now - before, 0.0) for now, before in zip(seconds, given, strict=True)]
    wanted, room = sum(fresh), max(whole_s - sum(given), 0.0)
    share = min(1.0, room / wanted) if wanted else 0.0
    floats = totals.floats
    for index, amount in enumerate(fresh):
        floats[_WORDS[index]] += amount * share
        floats[Word.CREDITED + index] += amount * share


def forgive(totals: Totals) -> None:
    """What was credited stays: the step it was given for has no record."""
    for index in range(_COUNT):
        totals.floats[Word.CREDITED + index] = 0.0


def repay(totals: Totals, spent_s: Sequence[float]) -> list[float]:
    """Return what a step adds that spent so much in each of ``STATES``, and training where ``idle`` stands.

    A state that was given more than it turns out to have takes that from the others, in proportion to what they have.
    """
    given = credited(totals)
    *others, idle = given
    more = [spent - before for spent, before in zip(spent_s, [*others, 0.0], strict=True)]
    lacking = sum(max(-amount, 0.0) for amount in more) + idle
    gained = [max(amount, 0.0) for amount in more]
    total = sum(gained)
    owed = max(lacking - total, 0.0)  # more than the whole step: the rest is the next one's
    for index, amount in enumerate([*(max(-amount, 0.0) for amount in more[:-1]), idle]):
        totals.floats[Word.CREDITED + index] = amount * (owed / lacking) if owed else 0.0
    share = max(total - lacking, 0.0) / total if total else 0.0
    return [amount * share for amount in gained]
