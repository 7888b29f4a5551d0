"""Findings on the training loop: its mistakes, parameters that it leaves out. Pure functions of a rank's report."""

from __future__ import annotations

from collections.abc import Iterator

from torchobs import catalog
from torchobs.diagnosis import text_format
from torchobs.diagnosis.health import WARNING, Finding
from torchobs.diagnosis.health_words import UNTIL_A_STEP
from torchobs.diagnosis.rank_report import Fact, RankReport
from torchobs.diagnosis.status import mistakes_of

_NAMED = 3
_HOW = {
    "gradients_kept": "Gradients were never set to zero (optimizer.zero_grad()): each step used the sum of all before it.",
    "evaluation_mode": "From step {step} or earlier on it trained in evaluation mode, without dropout, and batch normalisation "
    "as it was: model.train() was not called again.",
    "never_stepped": "There were {passes} backward passes or more, and no step of the optimizer ({optimizer}): "
    "optimizer.step() is missing.",
    "clipped_late": "Gradients were clipped after the optimizer's step, which had used them as they were, and were then set to "
    "zero: nothing was clipped. clip_grad_norm_ belongs between backward() and step().",
    "losses_kept": "Losses were kept with their graphs (losses.append(loss), total += loss), or outputs were: memory grows "
    "with each step. Keep loss.item() or loss.detach().",
    "same_order": "After step {step} an epoch had the samples in the order of those before it, and each rank the same part of "
    "them: the DistributedSampler is to shuffle, and its set_epoch(epoch) was not called before the epoch.",
}


def loop_mistakes(report: RankReport) -> Iterator[Finding]:
    """Yield what is wrong with the loop."""
    known = {*mistakes_of(report.events)} - (UNTIL_A_STEP if report.last_step else set())
    for fact in report.events_named(catalog.EVENT_LOOP_MISTAKE):
        text = _HOW.get(fact.text("kind"))
        if text is not None and fact.text("kind") in known:
            said = text.format(
                step=f"{fact.step or 0:,}",
                optimizer=fact.text("optimizer", 80),
                passes=f"{fact.count('backward_passes'):,}",
            )
            yield Finding(WARNING, fact.text("kind"), said)
    for fact in report.events_named(catalog.EVENT_LEFT_OUT_PARAMETERS)[-1:]:
        if not fact.count("parameters_affected"):
            break  # trained since then
        are = "is" if fact.count("parameters_affected") == 1 else "are"
        optimizer = fact.text("optimizer", 80)
        where = (
            f"of an optimizer ({optimizer}) that had not stepped by step {fact.step or 0:,}" if optimizer else "in no optimizer"
        )
        question = " Is its step() missing?" if optimizer else ""
        text = f"{_parameters(fact)} got gradients but {are} {where}: nothing was learned there.{question}"
        yield Finding(WARNING, "left_out", text)
    for fact in report.events_named(catalog.EVENT_OTHER_THREAD)[:1]:
        thread = fact.text("thread", 40)
        text = f"Two threads trained at the same time: steps of thread {thread} are not recorded, nor in any number here."
        yield Finding(WARNING, "other_thread", text)


def _parameters(fact: Fact) -> str:
    """Return the number of parameters that an event is about, and the names of the first."""
    count, names = fact.count("parameters_affected"), fact.texts("parameters", _NAMED, 80)
    more = f" and {count - len(names):,} more" if count > len(names) else ""
    return text_format.plural(count, "parameter") + (f" ({', '.join(names)}{more})" if names else "")
