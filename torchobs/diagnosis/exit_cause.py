"""Findings on how a rank ended. Pure functions of its report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.diagnosis import text_format
from torchobs.diagnosis.health import ERROR, INFO, WARNING, Finding
from torchobs.diagnosis.stall import stalled
from torchobs.ranks import state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchobs.diagnosis.rank_report import Fact, RankReport

_NO_FAILURE = frozenset({"finished", "interrupted", "terminated"})
_NO_STEPS = "its steps are not in this part of the file"
_SHORTLY_S = 60.0
"""Errors of machine, device or workers within this time before the end are reported with it."""


def ending(facts: RankReport) -> Iterator[Finding]:
    """Yield how it ended, or that it has not."""
    if facts.up:
        yield _living(facts)
        yield from stalled(facts)
        return
    if not facts.end_known:
        yield _unknown(facts)
        return
    tell = {
        "exception": _exception,
        "exit_code": _exit_code,
        "interrupted": _interrupted,
        "terminated": _terminated,
        "out_of_memory": _out_of_memory,
        "lost": _lost,
    }
    yield tell.get(facts.reason, _finished)(facts)
    yield from stalled(facts)
    yield from _threads(facts)
    yield from _complaints(facts)


def where(facts: RankReport) -> str:
    """Return the rank's progress at its end: ``after step 812``."""
    if facts.last_step:
        return f"after step {facts.last_step:,}"
    return f"({_NO_STEPS})" if facts.partial else "before its first step was complete"


def _living(facts: RankReport) -> Finding:
    since = facts.steps[-1].end_s if facts.steps else facts.start_s
    quiet = f"{text_format.duration(max(0.0, facts.last_s - since))} without a step{_phase(facts)}"
    if facts.state == "hung":
        return Finding(ERROR, "hung", f"Rank {facts.rank} hangs {where(facts)}: {quiet}.")
    if facts.state == "unresponsive":
        text = f"Rank {facts.rank} is there, but gave no sign of life since {text_format.moment(facts.last_s)}{_phase(facts)}"
        return Finding(ERROR, "unresponsive", f"{text}: stopped, or stuck with the interpreter's lock held.")
    return Finding(INFO, "alive", f"Rank {facts.rank} is running, {where(facts)}.")


def _finished(facts: RankReport) -> Finding:
    length = text_format.duration(facts.last_s - facts.start_s)
    if not facts.last_step and facts.partial:
        return Finding(INFO, "finished", f"Rank {facts.rank} finished in order after {length}; {_NO_STEPS}.")
    if not facts.last_step:
        hint = "no optimizer stepped, and no backward was followed by a change (torchobs.step() says where steps end)"
        if facts.events_named(catalog.EVENT_CHILDREN):
            hint = "the processes that it started are recorded if they join a process group, or call torchobs.init() themselves"
        return Finding(INFO, "finished", f"Rank {facts.rank} finished in order after {length}, without a step: {hint}.")
    return Finding(INFO, "finished", f"Rank {facts.rank} finished in order {where(facts)}; it ran for {length}.")


def _unknown(facts: RankReport) -> Finding:
    known = f"it had come to step {facts.last_step:,} at least" if facts.last_step else "nor are its steps"
    return Finding(WARNING, "end_unknown", f"How rank {facts.rank} ended is not in this part of the file; {known}.")


def _exception(facts: RankReport) -> Finding:
    raised = main_exceptions(facts)
    if not raised:
        text = f"Rank {facts.rank} ended by an exception {where(facts)}; which one is not in the file."
        return Finding(ERROR, "exception", text)
    last = raised[-1]
    text = f"Rank {facts.rank} ended by {_raised(last, '')}, {where(facts)}."
    if last.text("cause.type"):
        text += f" At its root was {_raised(last, 'cause.')}."
    return Finding(ERROR, "exception", text)


def main_exceptions(facts: RankReport) -> list[Fact]:
    """Return the exceptions that can have ended the rank: those of its main thread."""
    return [fact for fact in facts.events_named(catalog.EVENT_EXCEPTION) if not fact.text("thread")]


def _raised(fact: Fact, of: str) -> str:
    kind = fact.text("exception.type" if not of else f"{of}type").removeprefix("builtins.") or "an exception"
    where, caller, came = (text_format.place(fact.text(f"{of}{name}")) for name in ("location", "caller", "reraised"))
    origin = fact.text(f"{of}origin")
    called, elsewhere = f", called at {caller}" if caller else "", f", in {origin}" if origin else ""
    return f"{kind} at {where or 'an unknown place'}{called}{elsewhere}{f', awaited at {came}' if came else ''}"


def _interrupted(facts: RankReport) -> Finding:
    return Finding(WARNING, "interrupted", f"Rank {facts.rank} was interrupted (Ctrl-C, SIGINT) {where(facts)}.")


def _terminated(facts: RankReport) -> Finding:
    text = f"Rank {facts.rank} was told to end (SIGTERM: by the scheduler, the launcher or a person) {where(facts)}"
    return Finding(WARNING, "terminated", f"{text}{_phase(facts)}.")


def _exit_code(facts: RankReport) -> Finding:
    return Finding(ERROR, "exit_code", f"Rank {facts.rank} left with exit status {facts.exit_code}, {where(facts)}.")


def _lost(facts: RankReport) -> Finding:
    text = f"Rank {facts.rank} vanished without a word {where(facts)}{_phase(facts)}"
    if not facts.same_boot and not facts.copied:
        return Finding(ERROR, "lost", f"{text}: the machine has been started again since, or the file is another machine's.")
    return Finding(ERROR, "lost", f"{text}: killed (SIGKILL), os._exit or a crash.")


def _out_of_memory(facts: RankReport) -> Finding:
    memory, evidence = facts.memory, []
    if memory.kill_age_s is not None and memory.kill_age_s <= state.OOM_KILL_LATELY_S:
        evidence.append(f"the kernel killed a process of its cgroup {_before(memory.kill_age_s)} its last sign of life")
    for share, limit, name in (
        (memory.cgroup, state.FULL_CGROUP, "its cgroup's memory"),
        (memory.machine, state.FULL_MACHINE, "the machine's memory"),
    ):  # fmt: skip
        if share >= limit:
            evidence.append(
                f"{text_format.percent(share)} of {name} was taken{_of_limit(facts) if limit == state.FULL_CGROUP else ''}"
            )
    text = f"Rank {facts.rank} was likely killed for memory {where(facts)}{_phase(facts)}"
    return Finding(ERROR, "out_of_memory", f"{text}: {text_format.joined(evidence)}.")


def _phase(facts: RankReport) -> str:
    if facts.phase == "idle":
        return ", after it had left its training loop"
    return f", in the phase {facts.phase}" if facts.phase and facts.last_step else ""


def _of_limit(facts: RankReport) -> str:
    limit = facts.value(catalog.CGROUP_MEMORY_LIMIT)
    return f" (limit {text_format.size(limit)})" if limit else ""


def _before(seconds: float) -> str:
    return f"{text_format.duration(seconds)} before" if seconds >= 1 else "at"


def _complaints(facts: RankReport) -> Iterator[Finding]:
    """Yield errors reported shortly before an abnormal end."""
    if facts.reason in _NO_FAILURE:
        return
    for event, severity, tell in (
        (catalog.EVENT_OUT_OF_MEMORY, ERROR, _device_memory),
        (catalog.EVENT_GPU_LOST, ERROR, _gpu),
        (catalog.EVENT_GPU_XID, ERROR, _xid),
        (catalog.EVENT_WORKER_DIED, ERROR, _worker),
        (catalog.EVENT_SHARED_MEMORY_FULL, WARNING, _shared_memory),
        (catalog.EVENT_CHECKPOINT_FAILED, WARNING, _save),
    ):  # fmt: skip
        late = [fact for fact in facts.events_named(event) if facts.last_s - fact.time_s <= _SHORTLY_S]
        if late:
            age = max(0.0, facts.last_s - late[-1].time_s)
            yield Finding(severity, event.name.removeprefix("torchobs."), f"{tell(late[-1])}, {_before(age)} the end.")


def _threads(facts: RankReport) -> Iterator[Finding]:
    """Yield the last thread that ended by an exception: threads that wait for its results fail later, or hang.

    However long before the end it was: the main thread may have waited for hours.
    """
    ended = [fact for fact in facts.events_named(catalog.EVENT_EXCEPTION) if fact.text("thread")]
    if not ended or facts.reason in _NO_FAILURE:
        return
    last, others = ended[-1], {fact.text("thread") for fact in ended[:-1]} - {ended[-1].text("thread")}
    during = f", after step {last.step:,}" if last.step else ""
    also = f" So did {text_format.plural(len(others), 'other thread')} before." if others else ""
    text = (
        f"Thread '{last.text('thread')}' ended by {_raised(last, '')}{during}, {_before(max(0.0, facts.last_s - last.time_s))}"
    )
    yield Finding(WARNING, "thread_exception", f"{text} the end.{also}")


def _device_memory(fact: Fact) -> str:
    sizes = {name: text_format.size(fact.number(name)) for name in ("requested", "free", "limit", "allocated", "reserved")}
    text = (
        f"{fact.text('device') or 'A device'} had no memory left: {sizes['requested']} were asked for, {sizes['free']} of "
        f"{sizes['limit']} were free, tensors held {sizes['allocated']} and the allocator {sizes['reserved']}"
    )
    largest = fact.attributes.get("largest")
    return f"{text} (most of it: {text_format.clean(largest[0])})" if isinstance(largest, list) and largest else text


def _xid(fact: Fact) -> str:
    meaning = fact.text("meaning")
    return f"The driver reported XID {fact.text('xid')}{f' ({meaning})' if meaning else ''} of {fact.text('hw.id') or 'a GPU'}"


def _gpu(fact: Fact) -> str:
    return f"A GPU ({fact.text('hw.id') or 'unknown'}) did not answer any more: {fact.text('reason')}"


def _save(fact: Fact) -> str:
    return f"A save ({fact.text('format')}) raised {fact.text('exception.type').removeprefix('builtins.')}"


def _worker(fact: Fact) -> str:
    how = fact.text("signal") or f"exit code {fact.text('code')}"
    return f"A data loader's worker (pid {fact.text('pid')}) was ended by {how}"


def _shared_memory(fact: Fact) -> str:
    used, size = text_format.size(fact.number("used")), text_format.size(fact.number("size"))
    return f"Shared memory, /dev/shm, was nearly full ({used} of {size})"
