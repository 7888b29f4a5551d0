"""Findings on how a rank ended. Pure functions of its report."""

from __future__ import annotations

import signal
from collections.abc import Iterator

from torchobs import catalog
from torchobs.diagnosis import collective_timeout, stack_text, text_format
from torchobs.diagnosis.health import ERROR, INFO, WARNING, Finding
from torchobs.diagnosis.rank_report import Fact, RankReport
from torchobs.diagnosis.stall import stalled
from torchobs.ranks import state

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
_SHORTLY_S = 60.0
"""Errors of machine, device or workers within this time before the end are reported with it."""


def ending(report: RankReport) -> Iterator[Finding]:
    """Yield how it ended, or that it has not."""
    if report.up:
        yield _living(report)
        yield from stalled(report)
        return
    if not report.end_known:
        yield _unknown(report)
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
        text = found.text.removeprefix(f"Rank {report.rank} ").replace(f", {_where(report)}", "")
        yield found._replace(kind="launcher", text=f"The process that started the ranks {text}")


def _where(report: RankReport) -> str:
    """Return the rank's progress at its end: ``after step 812``."""
    if report.last_step:
        return f"after step {report.last_step:,}{' at least' if report.unwritten else ''}"
    if report.unwritten:
        return "before one of its steps was written"
    return f"({_NO_STEPS})" if report.partial else "before its first step was complete"


def _living(report: RankReport) -> Finding:
    since = report.steps[-1].end_s if report.steps else report.start_s
    quiet = f"{text_format.duration(max(0.0, report.last_s - since))} without a step{_phase(report)}"
    if report.state == "hung":
        return Finding(ERROR, "hung", f"Rank {report.rank} hangs {_where(report)}: {quiet}.")
    if report.state == "unresponsive":
        last = text_format.moment(report.last_s)
        text = f"Rank {report.rank} is there, but gave no sign of life since {last}{_phase(report)}"
        return Finding(ERROR, "unresponsive", f"{text}: stopped, or stuck with the interpreter's lock held.")
    return Finding(INFO, "alive", f"Rank {report.rank} is running, {_where(report)}.")


def _finished(report: RankReport) -> Finding:
    length = report.lifetime
    told = _signal(report)
    told = f"; {told} had told it to end" if told else ""
    if not report.last_step and report.partial:
        return Finding(INFO, "finished", f"Rank {report.rank} finished in order after {length}; {_NO_STEPS}.")
    if not report.last_step:
        hint = (
            "no optimizer of torch's stepped, and no gradient was cleared after a change of the parameters by hand "
            "(torchobs.step() says where steps end)"
        )
        if report.events_named(catalog.EVENT_CHILDREN):
            hint = "the processes that it started are recorded if they join a process group, or call torchobs.init() themselves"
        return Finding(INFO, "finished", f"Rank {report.rank} finished in order after {length}, without a step: {hint}.")
    return Finding(INFO, "finished", f"Rank {report.rank} finished in order {_where(report)}; it ran for {length}{told}.")


def _unknown(report: RankReport) -> Finding:
    known = f"it had come to step {report.last_step:,} at least" if report.last_step else "nor are its steps"
    return Finding(WARNING, "end_unknown", f"How rank {report.rank} ended is not in this part of the file; {known}.")


def _exception(report: RankReport) -> Finding:
    raised = report.main_exceptions
    if not raised:
        text = f"Rank {report.rank} ended by an exception {_where(report)}; which one is not in the file."
        return Finding(ERROR, "exception", text)
    last = raised[-1]
    handler = f", raised by the handler of {last.text('signal')}" if last.text("signal") else ""
    text = f"Rank {report.rank} ended by {_raised(last, '')}{handler}, {_where(report)}{collective_timeout.waited(last)}."
    if last.text("cause.type") and _raised(last, "cause.") != _raised(last, ""):
        text += f" At its root was {_raised(last, 'cause.')}."
    return Finding(ERROR, "exception", f"{text}{_unused(last)}")


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
    return Finding(INFO, "interrupted", f"{text}{_left_by(report)}.")


def _terminated(report: RankReport) -> Finding:
    number = report.exit_code - 128
    if number in _BY_DEFAULT:
        text = f"Rank {report.rank} was terminated by {signal.Signals(number).name} {_where(report)}"
    else:
        text = f"Rank {report.rank} was told to end (SIGTERM: by the scheduler, the launcher or a person) {_where(report)}"
    return Finding(WARNING, "terminated", f"{text}{_phase(report)}{_left_by(report)}.")


def _exit_code(report: RankReport) -> Finding:
    handler = f" on {_signal(report)}, which it handled" if _signal(report) else ""
    text = f"Rank {report.rank} left with exit status {report.exit_code}{handler}, {_where(report)}."
    return Finding(ERROR, "exit_code", text)


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
    own = stack_text.without_launcher(report.crash)
    at = f"at {stack_text.place(own)}" if own else "in a thread that ran no Python code"
    text = f"Rank {report.rank} crashed {at} ({name}, {meaning}), {_where(report)}{_phase(report)}."
    return Finding(ERROR, "crashed", text)


def _lost(report: RankReport) -> Finding:
    text = f"Rank {report.rank} vanished without a word {_where(report)}{_phase(report)}"
    if not report.same_boot and not report.copied:
        return Finding(ERROR, "lost", f"{text}: the machine has been started again since, or the file is another machine's.")
    more = ", or it went on after this copy was made" if report.copied else ""
    return Finding(ERROR, "lost", f"{text}: killed (SIGKILL), os._exit or a crash{more}.")


def _out_of_memory(report: RankReport) -> Finding:
    memory, evidence = report.memory, []
    if memory.kill_age_s is not None and memory.kill_age_s <= state.OOM_KILL_LATELY_S:
        evidence.append(f"the kernel killed a process of its cgroup {_before(memory.kill_age_s)} its last sign of life")
    for share, limit, name in (
        (memory.cgroup, state.FULL_CGROUP, "its cgroup's memory"),
        (memory.machine, state.FULL_MACHINE, "the machine's memory"),
    ):  # fmt: skip
        if share >= limit:
            evidence.append(
                f"{text_format.percent(share)} of {name} was taken{_of_limit(report) if limit == state.FULL_CGROUP else ''}"
            )
    text = f"Rank {report.rank} was likely killed for memory {_where(report)}{_phase(report)}"
    return Finding(ERROR, "out_of_memory", f"{text}: {text_format.joined(evidence)}.")


def _phase(report: RankReport) -> str:
    if report.phase == "idle":
        return ", after it had left its training loop"
    return f", in the phase {report.phase}" if report.phase and report.last_step else ""


def _of_limit(report: RankReport) -> str:
    limit = report.value(catalog.CGROUP_MEMORY_LIMIT)
    return f" (limit {text_format.size(limit)})" if limit else ""


def _before(seconds: float) -> str:
    return f"{text_format.duration(seconds)} before" if seconds >= 1 else "at"


def _complaints(report: RankReport) -> Iterator[Finding]:
    """Yield errors reported shortly before an abnormal end."""
    if report.reason in _NO_FAILURE:
        return
    for event, severity, tell in (
        (catalog.EVENT_OUT_OF_MEMORY, ERROR, _device_memory),
        (catalog.EVENT_GPU_LOST, ERROR, _gpu),
        (catalog.EVENT_GPU_XID, ERROR, _xid),
        (catalog.EVENT_WORKER_DIED, ERROR, _worker),
        (catalog.EVENT_SHARED_MEMORY_FULL, WARNING, _shared_memory),
        (catalog.EVENT_CHECKPOINT_FAILED, WARNING, _save),
    ):  # fmt: skip
        late = [fact for fact in report.events_named(event) if report.last_s - fact.time_s <= _SHORTLY_S]
        if late:
            age = max(0.0, report.last_s - late[-1].time_s)
            yield Finding(severity, event.name.removeprefix("torchobs."), f"{tell(late[-1])}, {_before(age)} the end.")


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
    yield Finding(WARNING, "thread_exception", f"{text} the end.{also}")


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
