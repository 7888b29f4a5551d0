"""Goodput of the unfinished step: an evaluation of an hour is visible while it lasts, and so is one after the last step.

The sampler adds the time to the goodput in advance and records it as credit; when the step ends, the fold adds its times minus
the credit. So no state's total ever decreases, whatever the step turns out to be, and all states together equal the elapsed
time. Pure, like the fold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.flight.metrics.totals import Totals, Word

if TYPE_CHECKING:
    from collections.abc import Sequence

STATES = ("data", "evaluation", "checkpoint", "compile", "idle")
"""States known before a step's end; whether training was productive is known only then."""
_WORDS = tuple(Word.GOODPUT + catalog.GOODPUT_STATES.index(state) for state in STATES)
_COUNT = len(STATES)


def credited(totals: Totals) -> list[float]:
    """Return the credit of each of ``STATES``: seconds not covered by a record yet."""
    return list(totals.floats[Word.CREDITED : Word.CREDITED + _COUNT])


def credit(totals: Totals, after_step: int, seconds: Sequence[float], whole_s: float) -> None:
    """Raise the credit to ``seconds`` in each of ``STATES``, in all at most ``whole_s``, the time since ``after_step``.

    Does nothing unless ``after_step`` is the last step folded: its own record is still due, or a later one was folded.
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


def clear_credit(totals: Totals) -> None:
    """Reset the credit and keep the goodput: the step it was given for will have no record."""
    for index in range(_COUNT):
        totals.floats[Word.CREDITED + index] = 0.0


def deduct_credit(totals: Totals, spent_s: Sequence[float]) -> list[float]:
    """Return a step's times minus the credit. ``spent_s``: seconds in each of ``STATES``, with training instead of ``idle``.

    Excess credit of a state is deducted from the others, in proportion to their remaining times.
    """
    given = credited(totals)
    *others, idle = given
    more = [spent - before for spent, before in zip(spent_s, [*others, 0.0], strict=True)]
    lacking = sum(max(-amount, 0.0) for amount in more) + idle
    gained = [max(amount, 0.0) for amount in more]
    total = sum(gained)
    owed = max(lacking - total, 0.0)  # exceeds the whole step: the rest is deducted from the next
    for index, amount in enumerate([*(max(-amount, 0.0) for amount in more[:-1]), idle]):
        totals.floats[Word.CREDITED + index] = amount * (owed / lacking) if owed else 0.0
    share = max(total - lacking, 0.0) / total if total else 0.0
    return [amount * share for amount in gained]
