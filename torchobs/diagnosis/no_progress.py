"""Finding on a loss that does not fall, where hyperparameters explain it (``detect.no_progress``). Pure."""

from __future__ import annotations

from collections.abc import Iterator

from torchobs import catalog
from torchobs.detect.no_progress import CLIPPED, SMALL_RATE, WEIGHT_DECAY
from torchobs.diagnosis import text_format
from torchobs.diagnosis.health import WARNING, Finding
from torchobs.diagnosis.rank_report import Fact, RankReport


def no_progress(report: RankReport) -> Iterator[Finding]:
    """Yield that the loss has not fallen, and what of the hyperparameters explains it, by the last event."""
    told = report.events_named(catalog.EVENT_NO_PROGRESS)
    if not told or not any(report.by_attribute(catalog.PROGRESS_BLOCKED).values()):
        return
    fact = told[-1]
    from_to = f"from {_number(fact, 'first')} to {_number(fact, 'last')} in {text_format.plural(fact.count('steps'), 'step')}"
    yield Finding(WARNING, "no_progress", f"The loss did not fall ({from_to}): {_why(fact)}")


def _why(fact: Fact) -> str:
    cause, amount = fact.text("cause"), fact.number("amount") or 0.0
    rate, limit = (f"{fact.number(name) or 0.0:.3g}" for name in ("learning_rate", "max_norm"))
    if cause == WEIGHT_DECAY:
        each = f"{amount:.0%}" if amount < 1.0 else "all"
        of = f"weight_decay {_number(fact, 'weight_decay')} at a learning rate of {_number(fact, 'learning_rate')}"
        return f"weight decay takes {each} of the weights in each step ({of})."
    if cause == SMALL_RATE:
        return f"no weight has moved by more than about {_number(fact, 'amount')} in all, by a learning rate of {rate}."
    norms = f"gradients of a norm of {_number(fact, 'grad_norm')} are clipped to {limit}"
    clipped = f", and {norms}" if cause == CLIPPED else ""
    return f"steps are too short for more than {_number(fact, 'amount')} of it in all. The learning rate is {rate}{clipped}."


def _number(fact: Fact, name: str) -> str:
    return text_format.number(fact.number(name))
