"""How ranks ended, which failed first, and whom a run waited for that a collective's timeout ended. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import median

from torchobs import catalog
from torchobs.catalog.findings import Finding
from torchobs.detect import hangs as detect_hang
from torchobs.detect.disagreement import drifted
from torchobs.detect.hangs import PATIENT_PHASES, Blamed
from torchobs.diagnosis import hangs, health, text_format
from torchobs.diagnosis.health import ERROR, INFO, WARNING, stated
from torchobs.diagnosis.rank_report import Fact, RankReport, Step
from torchobs.diagnosis.stall import Stall, place, stall, stalled, without_launcher
from torchobs.diagnosis.status import RankStatus, compared, started_here
from torchobs.ranks import labels, state

_MOST_NAMED = 8
_IN_BACKWARD = "_engine_run_backward"
"""Where what a collective raises in backward comes out, after which the phase is another"""
_WHAT = {"collective": "A collective", "monitored_barrier": "A monitored barrier", "rendezvous": "The ranks' rendezvous"}
_NO_FAILURE = frozenset({"finished", "interrupted", "terminated"})
_NO_STEPS = "its steps are not in this part of the file"
_FATAL: dict[int, tuple[str, str]] = {
    signal.SIGSEGV: ("SIGSEGV", "a segmentation fault"),
    signal.SIGBUS: ("SIGBUS", "memory that could not be had, as in a full /dev/shm"),
    signal.SIGFPE: ("SIGFPE", "an arithmetic error of a processor's instruction"),
    signal.SIGILL: ("SIGILL", "an instruction that this processor lacks"),
    signal.SIGABRT: ("SIGABRT", "abort() or an error of C++ that nobody caught; the standard error has its message"),
}
_BY_DEFAULT = {signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGXCPU}
"""Signals without a handler, of which the compiled part stores the number (``flight.writer.exit_signals``)"""
_COMPLAINTS = (
    catalog.EVENT_OUT_OF_MEMORY,
    catalog.EVENT_GPU_LOST,
    catalog.EVENT_GPU_XID,
    catalog.EVENT_WORKER_DIED,
    catalog.EVENT_SHARED_MEMORY_FULL,
    catalog.EVENT_CHECKPOINT_FAILED,
)
"""Errors of machine, device or workers"""
_SHORTLY_S = 60.0
"""Errors of machine, device or workers within this time before the end are reported with it."""
RECENT = 200
_KILLED_WITHIN_S = 40.0
"""torchrun sends SIGKILL 30 s after SIGTERM."""
_JITTER_S = 0.1
"""What the order of two ends within it says nothing about: a process waits that long for its turn on a busy machine"""
_ABORTED = 128 + signal.SIGABRT
_AFTER_ANOTHER = {"exception": "raised in collective operations", "terminated": "were told to end"}
"""What the end of one rank does to the others, by their own reasons"""
_COLLECTIVE = (
    "torch/distributed/", "torch/nn/parallel/distributed.py", "DistBackendError", "DistNetworkError", "DistStoreError",
    "DistError",
)  # fmt: skip


def _waited(fact: Fact) -> str:
    """Return the same in words, for the sentence on the exception; empty for other exceptions."""
    if not fact.text("timeout"):
        return ""
    named = _absent(fact)
    whom = f"{text_format.ranks(named, _MOST_NAMED)}, which did not come" if named else "a rank that did not come"
    return f": a timeout{_after(fact)}, it waited for {whom}"


def awaited_at_timeout(ranks: Sequence[RankReport]) -> dict[str, Blamed]:
    """Return the ranks that the others of their replica group waited for, by name, where a timeout ended it.

    Empty if none did, if a rank had failed before otherwise, and if nothing distinguishes the ranks.
    """
    return {name: one for team in labels.teams(ranks) for name, one in _blamed(team, _statuses(team)).items()}


def timeouts(ranks: Sequence[RankReport]) -> Iterator[Finding]:
    """Yield for whom each replica group waited that a timeout ended: instead of which rank failed first."""
    for team in labels.teams(ranks):
        yield from _timed_out(team)


def _timed_out(ranks: Sequence[RankReport]) -> Iterator[Finding]:
    gave_up = _gave_up(ranks)
    if not gave_up:
        return
    whole = _statuses(ranks)
    found, facts = _blamed(ranks, whole), list(gave_up.values())
    what = _WHAT.get(facts[0].text("timeout"), "A collective")
    text = f"{what} timed out{_after(facts[0])} on {text_format.ranks(list(gave_up), _MOST_NAMED)}."
    absent = [rank for rank in _absentees(facts) if rank not in {report.rank for report in ranks}]
    counted = [] if absent else list(hangs.surplus(whole, ranks))
    if counted and not _absentees(facts) and _are_alike(whole, found):
        text = " ".join([text, *counted])
    elif found:
        uncounted = [replace(status, called={}) for status in whole]
        text = " ".join([text, hangs.sentences(uncounted, found), *counted])
    elif len(gave_up) == len(ranks) and not absent:
        text = f"{text} {_places(whole)}"
    elif not absent:
        text = f"{text} Which rank did not come cannot be told."
    if absent:
        verb = "is" if len(absent) == 1 else "are"
        who = text_format.capital(text_format.ranks(absent, _MOST_NAMED))
        text = f"{text} {who} did not come, and {verb} not among the files here."
    yield stated(ERROR, "collective_timeout", text)


def _statuses(ranks: Sequence[RankReport]) -> list[RankStatus]:
    """Return where the ranks were when the timeout came: those that had not ended by then hung, and were ended by it."""
    gave_up = _gave_up(ranks)
    begun_s = min((fact.time_s for fact in gave_up.values()), default=0.0)
    found = []
    for status, report in zip(compared(ranks), ranks, strict=True):
        before = report.rank not in gave_up and not report.up and report.last_s < begun_s - state.BEAT_S
        here = before or (report.state == "finished" and report.rank not in gave_up)
        raised = gave_up.get(report.rank)
        phase = "backward" if raised is not None and _IN_BACKWARD in raised.text("location") else report.phase
        found.append(status if here else replace(status, state="hung", phase=phase))
    return found


def _gave_up(ranks: Sequence[RankReport]) -> dict[str, Fact]:
    """Return the exceptions of the ranks that a timeout ended; none if another one had failed before for reasons of its own."""
    ended = {report.rank: report.main_exceptions[-1:] for report in ranks if report.reason == "exception"}
    found = {rank: fact for rank, raised in ended.items() for fact in raised if fact.text("timeout")}
    begun_s = min((fact.time_s for fact in found.values()), default=0.0)
    others = (report for report in ranks if report.rank not in found and report.state in {"failed", "lost"})
    return {} if any(report.last_s < begun_s - state.BEAT_S for report in others) else found


def _blamed(ranks: Sequence[RankReport], whole: Sequence[RankStatus]) -> dict[str, Blamed]:
    gave_up = _gave_up(ranks)
    if not gave_up:
        return {}
    at = {status.rank: hangs.position(status) for status in whole}
    named = _absentees(list(gave_up.values()))
    if named:
        return {rank: detect_hang.alone(at[rank]) for rank in named if rank in at}
    found = {rank: one for rank, one in hangs.blamed(whole).items() if rank not in gave_up}
    if found:
        return found
    others = [rank for rank in at if rank not in gave_up]
    if len(others) != 1:
        return {}
    alone = {others[0]: detect_hang.alone(at[others[0]])}
    called_least = {rank for group in hangs.surpluses(whole) for rank in group.ranks[min(group.ranks)]}
    return alone if others[0] in called_least or not _are_alike(whole, alone) else {}


def _are_alike(whole: Sequence[RankStatus], found: Mapping[str, Blamed]) -> bool:
    """Return whether nothing but that they did not give up distinguishes those ``found`` from a rank that waits."""
    waiting = {hangs.where(hangs.position(status)) for status in whole if status.rank not in found}
    return all(one.why == detect_hang.ELSEWHERE and hangs.where(one.position) in waiting for one in found.values())


def _places(whole: Sequence[RankStatus]) -> str:
    """Return where the ranks waited, all of which gave up."""
    places: dict[str, list[str]] = {}
    for status in whole:
        places.setdefault(hangs.where(hangs.position(status)), []).append(status.rank)
    if len(places) == 1:
        return f"All of them waited {next(iter(places))}: which rank did not come cannot be told."
    told = [f"{text_format.ranks(names, _MOST_NAMED)} {place}" for place, names in places.items()]
    return f"They waited for each other: {text_format.joined(told, _MOST_NAMED)}."


def _absentees(facts: Sequence[Fact]) -> list[str]:
    return sorted({rank for fact in facts for rank in _absent(fact)}, key=int)


def _absent(fact: Fact) -> list[str]:
    found = fact.attributes.get("absent_ranks")
    return [str(one) for one in found if type(one) is int] if isinstance(found, list) else []


def _after(fact: Fact) -> str:
    seconds = fact.number("timeout_s")
    return f" after {text_format.duration(seconds)}" if seconds else ""


def ending(report: RankReport) -> Iterator[Finding]:
    """Yield how it ended, or that it has not."""
    if report.up:
        yield _living(report)
        yield from stalled(report)
        return
    if not report.end_known:
        known = f"it had come to step {report.last_step:,} at least" if report.last_step else "nor are its steps"
        yield stated(WARNING, "end_unknown", f"How rank {report.rank} ended is not in this part of the file; {known}.")
        return
    tell = {
        "exception": _exception,
        "exit_code": _exit_code,
        "interrupted": _interrupted,
        "terminated": _terminated,
        "crashed": _crashed,
        "out_of_memory": _out_of_memory,
        "lost": _lost,
    }
    yield tell.get(report.reason, _finished)(report)
    yield from stalled(report)
    yield from _threads(report)
    yield from _complaints(report)


def launcher_ending(report: RankReport) -> Iterator[Finding]:
    """Yield how a process that only started the ranks ended, if that was a failure."""
    if report.state not in {"alive", "finished"}:
        found = next(ending(report))
        text = found.long.removeprefix(f"Rank {report.rank} ").replace(f", {_where(report)}", "")
        yield stated(found.severity, "launcher", f"The process that started the ranks {text}")


def _where(report: RankReport) -> str:
    """Return the rank's progress at its end: ``after step 812``."""
    if report.last_step:
        return f"after step {report.last_step:,}{' at least' if report.unwritten else ''}"
    if report.unwritten:
        return "before one of its steps was written"
    return f"({_NO_STEPS})" if report.partial else "before its first step was complete"


def _living(report: RankReport) -> Finding:
    quiet = f"{text_format.duration(max(0.0, report.last_s - report.progress_s))} without a step{_phase(report)}"
    if report.state == "hung":
        return stated(ERROR, "hung", f"Rank {report.rank} hangs {_where(report)}: {quiet}.")
    if report.state == "unresponsive":
        last = text_format.moment(report.last_s)
        text = f"Rank {report.rank} is there, but gave no sign of life since {last}{_phase(report)}"
        return stated(ERROR, "unresponsive", f"{text}: stopped, or stuck with the interpreter's lock held.")
    return stated(INFO, "alive", f"Rank {report.rank} is running, {_where(report)}.")


def _finished(report: RankReport) -> Finding:
    length = report.lifetime
    told = _signal(report)
    told = f"; {told} had told it to end" if told else ""
    if not report.last_step and report.partial:
        return stated(INFO, "finished", f"Rank {report.rank} finished in order after {length}; {_NO_STEPS}.")
    if not report.last_step:
        hint = (
            "no optimizer of torch's stepped; where steps are made otherwise, torchobs.step() after each records them, and "
            "processes that it started are recorded if they join a process group, or call torchobs.init() themselves"
        )
        return stated(INFO, "finished", f"Rank {report.rank} finished in order after {length}, without a step: {hint}.")
    return stated(INFO, "finished", f"Rank {report.rank} finished in order {_where(report)}; it ran for {length}{told}.")


def _exception(report: RankReport) -> Finding:
    raised = report.main_exceptions
    if not raised:
        text = f"Rank {report.rank} ended by an exception {_where(report)}; which one is not in the file."
        return stated(ERROR, "exception", text)
    last = raised[-1]
    handler = f", raised by the handler of {last.text('signal')}" if last.text("signal") else ""
    text = f"Rank {report.rank} ended by {_raised(last, '')}{handler}, {_where(report)}{_waited(last)}."
    if last.text("cause.type") and _raised(last, "cause.") != _raised(last, ""):
        text += f" At its root was {_raised(last, 'cause.')}."
    return stated(ERROR, "exception", f"{text}{_unused(last)}")


def _unused(fact: Fact) -> str:
    """Return the sentence on parameters without a gradient, which DistributedDataParallel's error gives by index."""
    names, count = fact.texts("unused"), fact.number("unused_count")
    more = ["more"] if count is None else [f"{count - len(names):,.0f} more"] if count > len(names) else []
    model = f" of {fact.text('unused_of')}" if fact.text("unused_of") else ""
    return f" Parameters{model} without a gradient: {text_format.joined([*names, *more])}." if names else ""


def _raised(fact: Fact, of: str) -> str:
    kind = fact.text(f"{of or 'exception.'}type").removeprefix("builtins.") or "an exception"
    message = fact.text(f"{of or 'exception.'}message")
    where, caller, came = (text_format.source_location(fact.text(f"{of}{name}")) for name in ("location", "caller", "reraised"))
    origin = fact.text(f"{of}origin")
    called, elsewhere = f", called at {caller}" if caller else "", f", in {origin}" if origin else ""
    quoted = f' "{message}"' if message else ""
    return f"{kind}{quoted} at {where or 'an unknown place'}{called}{elsewhere}{f', awaited at {came}' if came else ''}"


def _interrupted(report: RankReport) -> Finding:
    text = f"Rank {report.rank} was interrupted (Ctrl-C, SIGINT) {_where(report)}"
    return stated(INFO, "interrupted", f"{text}{_left_by(report)}.")


def _terminated(report: RankReport) -> Finding:
    number = report.exit_code - 128
    if number in _BY_DEFAULT:
        text = f"Rank {report.rank} was terminated by {signal.Signals(number).name} {_where(report)}"
    else:
        text = f"Rank {report.rank} was told to end (SIGTERM: by the scheduler, the launcher or a person) {_where(report)}"
    return stated(WARNING, "terminated", f"{text}{_phase(report)}{_left_by(report)}.")


def _exit_code(report: RankReport) -> Finding:
    handler = f" on {_signal(report)}, which it handled" if _signal(report) else ""
    text = f"Rank {report.rank} left with exit status {report.exit_code}{handler}, {_where(report)}."
    return stated(ERROR, "exit_code", text)


def _signal(report: RankReport) -> str:
    """Return the signal that its own handler ended the rank on; empty if none did."""
    ended = report.events_named(catalog.EVENT_RUN_END)
    return ended[-1].text("signal") if ended else ""


def _left_by(report: RankReport) -> str:
    """Return what the signal's handler made of it, if that is more than to end."""
    raised = [fact for fact in report.main_exceptions if fact.text("signal")]
    if raised and raised[-1].text("exception.type") != "builtins.KeyboardInterrupt":
        return f"; on that it raised {_raised(raised[-1], '')}"
    status = report.exit_code if _signal(report) else 0
    return f"; it left with exit status {status}" if status not in {0, 130, 143} else ""


def _crashed(report: RankReport) -> Finding:
    name, meaning = _FATAL.get(report.exit_code - 128, (f"signal {report.exit_code - 128}", "a fatal one"))
    own = without_launcher(report.crash)
    at = f"at {place(own)}" if own else "in a thread that ran no Python code"
    text = f"Rank {report.rank} crashed {at} ({name}, {meaning}), {_where(report)}{_phase(report)}."
    return stated(ERROR, "crashed", text)


def _lost(report: RankReport) -> Finding:
    text = f"Rank {report.rank} vanished without a word {_where(report)}{_phase(report)}"
    if not report.same_boot and not report.copied:
        return stated(ERROR, "lost", f"{text}: the machine has been started again since, or the file is another machine's.")
    more = ", or it went on after this copy was made" if report.copied else ""
    return stated(ERROR, "lost", f"{text}: killed (SIGKILL), os._exit or a crash{more}.")


def _out_of_memory(report: RankReport) -> Finding:
    memory, evidence = report.memory, []
    if memory.kill_age_s is not None and memory.kill_age_s <= state.OOM_KILL_LATELY_S:
        evidence.append(f"the kernel killed a process of its cgroup {_before(memory.kill_age_s)} its last sign of life")
    limit = report.value(catalog.CGROUP_MEMORY_LIMIT)
    if memory.cgroup >= state.FULL_CGROUP:
        of = f" (limit {text_format.size(limit)})" if limit else ""
        evidence.append(f"{text_format.percent(memory.cgroup)} of its cgroup's memory was taken{of}")
    if memory.machine >= state.FULL_MACHINE:
        evidence.append(f"{text_format.percent(memory.machine)} of the machine's memory was taken")
    text = f"Rank {report.rank} was likely killed for memory {_where(report)}{_phase(report)}"
    return stated(ERROR, "out_of_memory", f"{text}: {text_format.joined(evidence)}.")


def _phase(report: RankReport) -> str:
    if report.phase == "idle":
        return ", after it had left its training loop"
    return f", in the phase {report.phase}" if report.phase and report.last_step else ""


def _before(seconds: float) -> str:
    return f"{text_format.duration(seconds)} before" if seconds >= 1 else "at"


def _complaints(report: RankReport) -> Iterator[Finding]:
    """Yield errors reported shortly before an abnormal end."""
    if report.reason in _NO_FAILURE:
        return
    for event in _COMPLAINTS:
        late = [fact for fact in report.events_named(event) if report.last_s - fact.time_s <= _SHORTLY_S]
        if late:
            age = max(0.0, report.last_s - late[-1].time_s)
            severity = WARNING if event in {catalog.EVENT_SHARED_MEMORY_FULL, catalog.EVENT_CHECKPOINT_FAILED} else ERROR
            yield stated(severity, event.name.removeprefix("torchobs."), f"{_complaint(late[-1])}, {_before(age)} the end.")


def _complaint(fact: Fact) -> str:
    """Return what such an error was, as the beginning of a sentence."""
    if fact.name == catalog.EVENT_OUT_OF_MEMORY.name:
        return _device_memory(fact)
    if fact.name == catalog.EVENT_GPU_LOST.name:
        return f"A GPU ({fact.text('hw.id') or 'unknown'}) did not answer any more: {fact.text('reason')}"
    if fact.name == catalog.EVENT_GPU_XID.name:
        meaning = f" ({fact.text('meaning')})" if fact.text("meaning") else ""
        return f"The driver reported XID {fact.text('xid')}{meaning} of {fact.text('hw.id') or 'a GPU'}"
    if fact.name == catalog.EVENT_WORKER_DIED.name:
        how = fact.text("signal") or f"exit code {fact.text('code')}"
        return f"A data loader's worker (pid {fact.text('pid')}) was ended by {how}"
    if fact.name == catalog.EVENT_SHARED_MEMORY_FULL.name:
        used, size = text_format.size(fact.number("used")), text_format.size(fact.number("size"))
        return f"Shared memory, /dev/shm, was nearly full ({used} of {size})"
    return f"A save ({fact.text('format')}) raised {fact.text('exception.type').removeprefix('builtins.')}"


def _threads(report: RankReport) -> Iterator[Finding]:
    """Yield the last thread that ended by an exception: threads that wait for its results fail later, or hang.

    However long before the end it was: the main thread may have waited for hours.
    """
    ended = [fact for fact in report.events_named(catalog.EVENT_EXCEPTION) if fact.text("thread")]
    if not ended or report.reason in _NO_FAILURE:
        return
    last, others = ended[-1], {fact.text("thread") for fact in ended[:-1]} - {ended[-1].text("thread")}
    during = f", after step {last.step:,}" if last.step else ""
    also = f" So did {text_format.plural(len(others), 'other thread')} before." if others else ""
    text = (
        f"Thread '{last.text('thread')}' ended by {_raised(last, '')}{during}, {_before(max(0.0, report.last_s - last.time_s))}"
    )
    yield stated(WARNING, "thread_exception", f"{text} the end.{also}")


def _device_memory(fact: Fact) -> str:
    sizes = {name: text_format.size(fact.number(name)) for name in ("requested", "free", "limit", "allocated", "reserved")}
    if fact.text("device") == "cpu":
        asked = f": {sizes['requested']} were asked for" if fact.number("requested") is not None else ""
        limit = f"The process was at the limit of its address space ({sizes['limit']}, ulimit)"
        return f"{limit if fact.number('limit') is not None else 'The host had no memory left'}{asked}{_held(fact)}"
    text = (
        f"{fact.text('device') or 'A device'} had no memory left: {sizes['requested']} were asked for, {sizes['free']} of "
        f"{sizes['limit']} were free, tensors held {sizes['allocated']} and the allocator {sizes['reserved']}"
    )
    text += _held(fact)
    largest = fact.attributes.get("largest")
    return f"{text} (most of it: {text_format.clean(largest[0])})" if isinstance(largest, list) and largest else text


def _held(fact: Fact) -> str:
    """Return what took the memory by component, and the largest module."""
    names = {"parameters": "parameters", "gradients": "gradients", "optimizer_state": "optimizer state", "buffers": "buffers"}
    sizes = [f"{word} {text_format.size(size)}" for name, word in names.items() if (size := fact.number(name))]
    modules = fact.texts("modules", 1, 120)
    largest = f", most of it in {modules[0]}" if modules else ""
    return f"; of the model, {text_format.joined(sizes)}{largest}" if sizes else ""


def compare(ranks: Sequence[RankReport]) -> list[Finding]:
    """Return the findings on ranks together."""
    if len(ranks) < 2:  # noqa: PLR2004  # a single rank has no peers
        return []
    together, timed_out = stalled_together(ranks), list(timeouts(ranks))
    teams = labels.teams(together)
    waited_for = [one for one in health.waited_for(together) if not timed_out or one.kind != "waited_for"]
    return [
        *(timed_out or _first_to_fail(ranks)),
        *waited_for,
        *chain.from_iterable(map(health.disagreeing, teams)),
        *chain.from_iterable(map(_drifted, labels.teams(ranks), teams)),
        *chain.from_iterable(map(health.batches_alike, teams)),
        *_missing(ranks),
        *chain.from_iterable(map(_out_of_step, labels.teams(ranks))),
        *health.slowest(compared(ranks), detailed=True),
    ]


def _drifted(ranks: Sequence[RankReport], together: Sequence[RankStatus]) -> Iterator[Finding]:
    """Yield the ranks whose weights differ, with their learning rates."""
    found = drifted({rank.rank: rank.replicas.weights for rank in together})
    for finding in health.weights_apart(together) if found else ():
        yield stated(finding.severity, finding.kind, f"{finding.long}{_rates(ranks, found[0] if found else 0)}")


def _rates(ranks: Sequence[RankReport], since: int) -> str:
    """Return the learning rates, if they differ between ranks from some step before."""
    rates = {report.rank: {step.step: step.learning_rate for step in report.steps if step.step <= since} for report in ranks}
    common = set.intersection(*(set(own) for own in rates.values()))
    differ = sorted(step for step in common if len({own[step] for own in rates.values()}) > 1)
    if not differ:
        return ""
    told = text_format.joined(
        [f"{text_format.number(own[differ[0]])} on rank {rank}" for rank, own in rates.items()], _MOST_NAMED
    )
    return f" Their learning rates differed in step {differ[0]:,}: {told}."


def stalled_together(ranks: Sequence[RankReport]) -> list[RankStatus]:
    """Return the status of the ranks at the end; ranks of a replica group that hung and were killed together are hung still.

    A launcher kills the ranks of a hung run, or a collective's timeout raises in them, so that at the end none lives. Their
    last phases tell where they were. It need not have been so long that the exporter would call them hung.
    """
    return list(chain.from_iterable(map(_stalled_together, labels.teams(ranks))))


def _stalled_together(ranks: Sequence[RankReport]) -> list[RankStatus]:
    statuses = compared(ranks)
    found = [stall(report) for report in ranks]
    if any(report.up or report.state == "finished" for report in ranks) or not any(map(_stood_still, found)):
        return statuses
    if max(report.last_s for report in ranks) - min(report.last_s for report in ranks) > _KILLED_WITHIN_S:
        return statuses
    return [
        replace(status, state="hung" if _stood_still(one) else "alive", phase=report.phase)
        for status, one, report in zip(statuses, found, ranks, strict=True)
    ]


def _stood_still(found: Stall | None) -> bool:
    return found is not None and (found.hung or (found.long and found.phase not in PATIENT_PHASES))


def typical_phases(steps: Sequence[Step]) -> dict[str, float]:
    """Return the median seconds of the last steps in each phase."""
    recent = steps[-RECENT:]
    return {phase: median([step.phase_s.get(phase, 0.0) for step in recent]) for phase in catalog.PHASES} if recent else {}


def first_failed(ranks: Sequence[RankReport]) -> tuple[RankReport | None, str]:
    """Return the rank that likely failed first, ``None`` if none failed, and a sentence, empty if none did so by itself.

    ``ranks``: of one replica group.

    If ends are too close for the clocks to order, a rank that vanished while the others raised in a collective operation was
    likely first, for that is how they see a peer's end; one that raised in other code was likely first when the others
    vanished, for the launcher then kills them. Of ranks that raised the same at one line, a step apart or less, none was first.
    """
    failed = _failed(ranks)
    ended = sorted(((_end_s(report), report) for report in failed), key=lambda pair: pair[0])
    if not ended:
        return None, ""
    (first_s, first), *others = ended
    if all(report.reason in {"terminated", "interrupted"} for report in failed) and (others or len(ranks) == 1):
        return first, ""  # somebody ended them, and not one among others that go on
    if not others:
        return first, f"Only rank {first.rank} failed, at {text_format.moment(first_s, '%H:%M:%S')}."
    alike = _raised_alike(ended)
    if len(alike) > 1:
        soon = [report for end_s, report in ended if end_s - first_s <= state.BEAT_S]
        causes = _possible_causes(alike, soon)
        return _likely_first([*alike, *causes], state.BEAT_S) if causes else (first, _alike(alike, ranks))
    dated = all(report.reason == "exception" and report.main_exceptions for _, report in ended[:2])
    doubt_s = 0.0 if dated else state.BEAT_S
    if others[0][0] - first_s > doubt_s:
        later = text_format.duration(others[0][0] - first_s)
        return first, f"Rank {first.rank} failed first, {later} before rank {others[0][1].rank}: look there for the cause."
    return _likely_first([report for end_s, report in ended if end_s - first_s <= doubt_s], doubt_s)


def _raised_alike(ended: Sequence[tuple[float, RankReport]]) -> list[RankReport]:
    """Return the ranks that raised what the first did, at the same line, by no more later than steps of the ranks vary."""
    first_s, first = ended[0]
    raised = _raised_as(first)
    timed = ([step.duration_s for step in report.steps[-RECENT:] if step.duration_s is not None] for _, report in ended)
    margin_s = max(_JITTER_S, *(median(durations) if durations else 0.0 for durations in timed))
    return [report for end_s, report in ended if raised and _raised_as(report) == raised and end_s - first_s <= margin_s]


def _possible_causes(alike: Sequence[RankReport], soon: Sequence[RankReport]) -> list[RankReport]:
    """Return the ranks among ``soon`` that ended otherwise than those that raised ``alike``, and not as a consequence of it."""
    known = {id(report) for report in alike}
    own = not _in_collective(alike[0])
    return [
        report for report in soon
        if id(report) not in known and report.reason not in {"terminated", "interrupted"}
        and not (own and report.reason == "exception" and _in_collective(report))
    ]  # fmt: skip


def _raised_as(report: RankReport) -> tuple[str, ...]:
    """Return class and place of the exception that ended the rank; empty if none did."""
    fact = report.main_exceptions[-1] if report.reason == "exception" and report.main_exceptions else None
    return tuple(fact.text(name) for name in ("exception.type", "location", "caller")) if fact is not None else ()


def _alike(alike: Sequence[RankReport], ranks: Sequence[RankReport]) -> str:
    """Return the sentence on ranks that raised the same, the first of them first; ``ranks``: all that are here."""
    count = len(ranks)
    who = f"{len(alike):,} of the {count:,} ranks" if len(alike) < count else f"All {count:,} ranks"
    if len(alike) == count == 2:  # noqa: PLR2004  # a pair
        who = "Both ranks"
    here = " here" if max(labels.number(report.header.resource, "world_size") or 0 for report in ranks) > count else ""
    ahead = text_format.duration(_end_s(alike[1]) - _end_s(alike[0]))
    return f"{who}{here} raised {alike[0].exception}, the first by {ahead}, which says nothing."


def _likely_first(together: Sequence[RankReport], doubt_s: float) -> tuple[RankReport, str]:
    within = f"within {text_format.duration(doubt_s)}"
    # an abort may be a collective's own, which a peer's end has caused
    silent = [
        report for report in together
        if report.state == "lost" or (report.reason == "crashed" and report.exit_code != _ABORTED)
    ]  # fmt: skip
    own = [report for report in together if report.reason == "exception" and not _in_collective(report)]
    if len(own) == 1:
        text = f"Rank {own[0].rank} raised in code of its own and the others ended {within} of it: it was likely first."
        return own[0], text
    if len(silent) == 1 and not own:
        ended = "crashed" if silent[0].reason == "crashed" else "vanished"
        reasons = dict.fromkeys(_AFTER_ANOTHER.get(one.reason, "ended") for one in together if one is not silent[0])
        text = f"Rank {silent[0].rank} {ended}, and {within} the others {' or '.join(reasons)}: it was likely first."
        return silent[0], text
    names = text_format.joined([report.rank for report in together], _MOST_NAMED)
    return together[0], f"Ranks {names} failed {within}: which was first cannot be told."


def _in_collective(report: RankReport) -> bool:
    """Return True if a peer's end may have caused the exception: raised by torch.distributed, or by DDP."""
    for fact in report.main_exceptions[-1:]:
        place = fact.text("location")
        if any(sign in f"{place} {fact.text('exception.type')}" for sign in _COLLECTIVE):
            return True
        return "_engine_run_backward" in place and len(report.events_named(catalog.EVENT_DISTRIBUTED)) > 0
    return False


def _first_to_fail(ranks: Sequence[RankReport]) -> Iterator[Finding]:
    """Yield which rank of each replica group failed first; of one whose only rank failed nothing, if others failed as well."""
    for team in labels.teams(ranks):
        _, text = first_failed(team)
        if text and (len(_failed(team)) > 1 or len(_failed(ranks)) == 1):
            yield stated(ERROR, "first_failed", text)


def _failed(ranks: Sequence[RankReport]) -> list[RankReport]:
    return [report for report in ranks if report.state in {"failed", "lost"} and report.end_known]


def _end_s(report: RankReport) -> float:
    raised = report.main_exceptions
    return raised[-1].time_s if raised and report.reason == "exception" else report.last_s


def _missing(ranks: Sequence[RankReport]) -> Iterator[Finding]:
    expected = started_here(ranks)
    if len(ranks) < expected:
        text = f"{len(ranks):,} of the {expected:,} ranks of this machine are here: the others never started to record."
        yield stated(WARNING, "ranks_missing", text)


def _out_of_step(ranks: Sequence[RankReport]) -> Iterator[Finding]:
    known = [report for report in ranks if not report.partial or report.last_step]
    furthest = max((report.last_step for report in known), default=0)
    behind = [report for report in known if report.last_step < furthest and not _may_lack_steps(report, known)]
    if behind and any(not report.up for report in ranks):
        least = min(behind, key=lambda report: report.last_step)
        text = f"Rank {least.rank} ended after step {least.last_step:,}, the furthest after step {furthest:,}."
        if furthest - least.last_step > 1:
            text += f" {text_format.plural(len(behind), 'rank')} behind."
        yield stated(INFO, "out_of_step", text)


def _may_lack_steps(report: RankReport, ranks: Sequence[RankReport]) -> bool:
    """Return True if the rank may have done, without a trace, what the others did after its last step."""
    next_s = [step.end_s for other in ranks for step in other.steps if step.step == report.last_step + 1]
    return report.unwritten and all(end_s > report.last_s for end_s in next_s)
