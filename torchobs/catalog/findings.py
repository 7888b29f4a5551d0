"""The table of kinds of findings, with all their words: of the training's log, page, ``top``, ``inspect`` and report.

A sentence is a template: ``{step:,}`` is a value. A part in brackets is left out where one of its values is absent; one that
begins with ``name?`` is shown if that value is, with ``name!`` if it is not. ``{who}`` is the rank, or the ranks, it is about.

Formats are ``,`` (a whole number), ``n`` (a measured number), ``size``, ``s`` (a duration), ``span``, ``about`` (rough ones),
``%``, ``fold``, ``named`` (a list; ``…_affected`` has its full length), one of two words by the number
(``{count:is|are}``), or a noun (``{count:step}`` is *1 step* or *3 steps*). Without a format a value is clean text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from string import Formatter
from types import MappingProxyType
from typing import NamedTuple

from torchobs.catalog import BY_NAME, EVENT_BY_NAME
from torchobs.catalog.model import Event, Metric, Severity
from torchobs.support import text

_MOST_NAMED = 3
_LONGEST = 400
_MOST = 1e18
_FORMATS: Mapping[str, Callable[[float], str]] = {
    ",": text.count, "n": text.number, "size": text.size, "s": text.duration, "about": text.about, "span": text.span,
    "%": text.percent, "fold": text.fold,
}  # fmt: skip
ORIGIN = "nonfinite_origin"
"""Prefix of the kinds about the origin of a NaN or an infinity"""
_UNNAMED, _NAMELESS = "unnamed", "a parameter of no module"
"""A parameter that neither a module nor a variable holds (``probes.nonfinite.origin.UNNAMED``), and the words for it"""
OTHER_RANKS = "gradients are averaged, and another rank may have had it first"
"""Note of an origin among ranks that average their gradients"""
_MORE = "[ It is past: the last {healthy:,} steps were healthy.][ Much the same goes for {more_ranks:more rank}.]"
"""Follows a finding from which the training has recovered, and one that stands for equal ones of other ranks"""
_CONDITION = re.compile(r"(\w+)([?!])")


class Kind(NamedTuple):
    """A kind of finding."""

    name: str
    """stable, for programs"""
    severity: Severity
    short: str
    """for page, ``top`` and the training's log: present tense, no figure that changes each second"""
    long: str
    """for ``inspect`` and report; empty if it is the short one"""
    section: str
    """id of the section of a report with the data behind it"""
    alert: str
    """its alert in Prometheus, or empty"""
    source: Event | Metric | None
    """the event or metric that it comes from; none: a function of ``diagnosis``"""
    key: str
    """value of the event's attribute that selects this one of several kinds"""


class Finding(NamedTuple):
    """A statement about a run or one of its ranks; see :func:`finding`."""

    kind: str
    rank: str = ""
    step: int | None = None
    values: Mapping[str, object] = MappingProxyType({})

    @property
    def severity(self) -> str:
        """``info``, ``warning`` or ``error``: of the kind, unless the values have another, or the training has recovered."""
        usual = Severity.INFO if self.values.get("healthy") else KINDS[self.kind].severity
        severity = self.values.get("severity")
        return (severity if isinstance(severity, Severity) else usual).name.lower()

    @property
    def section(self) -> str:
        """Id of the section with the data behind it."""
        return KINDS[self.kind].section

    @property
    def short(self) -> str:
        """The finding in a few words."""
        return sentence(KINDS[self.kind].short, self._values())

    @property
    def long(self) -> str:
        """The finding with its figures, and what to do."""
        return sentence((KINDS[self.kind].long or KINDS[self.kind].short) + _MORE, self._values())

    def _values(self) -> dict[str, object]:
        who = {"who": f"Rank {self.rank}", "count": 1} if self.rank else {}
        return {**who, "rank": self.rank, "step": self.step, **self.values}


def finding(kind: str, *, rank: str = "", step: int | None = None, **values: object) -> Finding:
    """Return a finding; a ``severity`` among the values replaces that of the kind."""
    return Finding(kind, rank, step, values)


def sentence(template: str, values: Mapping[str, object]) -> str:
    """Fill a template in; a value that is ``None`` or empty is absent."""
    parts = re.split(r"[\[\]]", template)
    return "".join(_filled(part, values, optional=index % 2 == 1) for index, part in enumerate(parts))


def fields(template: str) -> set[str]:
    """Return the names of the values that a template requires."""
    needed = "".join(re.split(r"\[[^\]]*\]", template))
    return {name for _, name, _, _ in Formatter().parse(needed) if name}


def _filled(part: str, values: Mapping[str, object], *, optional: bool) -> str:
    if optional and (condition := _CONDITION.match(part)) is not None:
        if bool(values.get(condition[1])) != (condition[2] == "?"):
            return ""
        part = part[condition.end() :]
    words = []
    for literal, name, spec, _ in Formatter().parse(part):
        words.append(literal)
        if name is None:
            continue
        value = values.get(name)
        if optional and value in (None, "", [], ()):
            return ""
        words.append(_named(value, values.get(f"{name}_affected")) if spec == "named" else _formatted(value, spec or ""))
    return "".join(words)


def _named(value: object, count: object) -> str:
    """Return the first names of a list, and the number of the others; ``count``: of all, if more than the list has."""
    names = [text.clean(name, 80) for name in value] if isinstance(value, (list, tuple)) else []
    shown = names[:_MOST_NAMED]
    more = (count if isinstance(count, int) else len(names)) - len(shown)
    return f"{', '.join(shown)} and {more:,} more" if more > 0 else text.joined(shown)


def _formatted(value: object, spec: str) -> str:
    if isinstance(value, (list, tuple)):
        return text.clean(text.joined(value, _MOST_NAMED), _LONGEST)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return text.NONE if value is None else text.clean(text.source_location(str(value)), _LONGEST)
    if not abs(value) < _MOST or spec == "n":
        return text.number(float(value)) if not isinstance(value, int) or abs(value) < _MOST else text.NONE
    if spec in _FORMATS:
        return _FORMATS[spec](value)
    singular, is_choice, plural = spec.partition("|")
    if is_choice:
        return singular if value == 1 else plural
    return text.plural(int(value), spec) if spec else text.clean(value)


# --- parts of sentences -------------------------------------------------------------------------------------------------------
RAISED = (
    '{type}[ "{message}"] at[ {location}][location! an unknown place][, called at {caller}][, in {origin}]'
    "[, awaited at {reraised}]"
)
"""An exception"""
WHERE = "[steps?after step {steps:,}][unwritten? at least][steps!before its first step was complete]"
"""How far a rank had come"""
WAITED_FOR_PEER = "it timed out[ after {timeout:s}] waiting for {peers}"
MODEL_MEMORY = (
    "[parameters {parameters:size}][, gradients {gradients:size}][, optimizer state {optimizer_state:size}]"
    "[, buffers {buffers:size}]"
)
"""The uses of a device's memory"""
TIMED_OUT = {"collective": "A collective", "monitored_barrier": "A monitored barrier", "rendezvous": "The ranks' rendezvous"}
ROOM = (
    "[saved_step? {free:size} were left on the file system, and a checkpoint takes {needed:size}.]"
    "[saved_step! {free:size} were left on the file system, and the parameters alone take {needed:size}.]"
)
"""Why a checkpoint could not be saved, if the file system was full"""
FATAL_SIGNALS = {
    "SIGSEGV": "a segmentation fault",
    "SIGBUS": "memory that could not be had, as in a full /dev/shm",
    "SIGFPE": "an arithmetic error of a processor's instruction",
    "SIGILL": "an instruction that this processor lacks",
    "SIGABRT": "abort() or an error of C++ that nobody caught; the standard error has its message",
}
ASIDE = {
    "evaluation": "evaluates",
    "checkpoint": "saves a checkpoint",
    "compile": "compiles",
    "idle": "has left its training loop",
}
"""Activities of a rank outside of the training"""
INSTEAD = {
    "ended": "ended[in_order? in order]",
    "silent": "gave no sign of life since it was {place}",
    "aside": "{aside}",
    "not_in_collective": "runs {frame} {place}",
    "fetching": "fetches data[ of step {step:,}]",
    "elsewhere": "stays {place}",
}
"""Activities of a rank that the others wait for, by the reasons of ``detect.hangs``"""
PLACE = "[idle?after its training loop][between?between two phases][in {phase}][ of step {step:,}]"
"""Where in the training a rank is"""
WAITING = "{culprits}, and the other[ {others:rank}][others! rank][most? (most of them)] {waiting:waits|wait} {place}."
ABSENT = (
    "{who} {count:has|have} not come to {operation} number {number:,} of group {group}, in which {waiting:rank} "
    "{waiting:waits|wait} ([the last called there is number {enqueued:,}][enqueued!none was called there])."
)
SURPLUS = "{who} called {more:collective} more than {others} ({most:,} and {least:,} of group {group})[: {calls}]."
CALLED_DIFFERENTLY = "Of group {group} ranks called different numbers of collectives: {numbers}."
WAITED_TOGETHER = "All of them waited {place}: which rank did not come is not known."
WAITED_APART = "They waited for each other: {places}."
NOT_HERE = "{who} did not come, and {count:is|are} not among the files here."
BADGES = {Severity.INFO: "All well", Severity.WARNING: "Worth a look", Severity.ERROR: "Trouble"}
NO_STEPS, ENDED = "No steps now", "Ended"
"""Badges of a run without findings that does not train, and of one that has not finished in order"""
GOODPUT_WORDS = {"idle": "outside of steps", "startup": "before the first step"}
"""Uses of time, where their names say more than is certain: a rank may work without an optimizer that steps"""
AT_WORK = {
    "evaluation": "Evaluating",
    "checkpoint": "Saving a checkpoint",
    "compile": "Compiling",
    "idle": "After its training loop",
    "training": "Training",
    "starting": "Running",
    "hanging": "Hanging",
    "unrecorded": "Not recorded",
    "unresponsive": "Not responding",
    "finished": "Finished",
    "ended": "Ended",
}
INTERRUPTED, NO_STEP = "Interrupted by Ctrl-C", "No step[ on {who}]"
"""Begins of a run's headline"""
PAST = {
    "nonfinite_loss": ("loss that was not finite", "losses that were not finite"),
    "nonfinite_gradient": ("gradient found not finite", "gradients found not finite"),
    "gradient_explosion": ("gradient explosion", "gradient explosions"),
    "loss_spike": ("loss spike", "loss spikes"),
    "gradient_vanishing": ("vanishing gradient", "vanishing gradients"),
    "diverged": ("loss that diverged", "losses that diverged"),
}
RECOMPILE_REMEDIES = {
    "shape": "mark the dimension with torch._dynamo.mark_dynamic(), compile with dynamic=True, or pad to a few sizes",
    "tensor": "give it tensors of one dtype, device, layout and requires_grad",
    "global_state": "call it under one grad mode, autocast and default dtype, or compile one function for each",
    "type": "give it arguments of one type: None in place of a tensor, or another class, is a new graph",
    "value": "pass a tensor, or keep what changes out of the function: what it reads is compiled in",
    "other": "see the guards by TORCH_LOGS=recompiles",
}
"""What to do about guards that keep failing, by ``catalog.COMPILE_GUARDS``"""
INFINITE_DERIVATIVES = {
    "at 0": {"sqrt", "rsqrt", "reciprocal", "log", "log2", "log10", "xlogy", "special_xlogy", "hypot"},
    "at 0, if its exponent is below 1": {"pow"},
    "at 1 and -1": {"acos", "asin", "atanh"},
    "at 1": {"acosh"},
    "at -1": {"log1p"},
    "at 0 and 1": {"logit", "special_logit"},
    "where its divisor is 0": {"div"},
}
"""Operators by where their derivative is infinite, or undefined"""
REGIONS = {"compiled_function": "compiled region", "checkpoint_function": "checkpointed region"}
"""Nodes of the graph that stand for many operators"""

_TABLE = """
== events ==
alive info
    short: {who} is running.
    long: {who} is running[, {where}][, {lifetime}. If no optimizer of torch's steps, call torchobs.step() once per step].
hung error alert=TorchobsRankHung
    short: {who} {count:hangs|hang}.
    long: {who} hangs[ {where}]: {quiet:s} without a step[, in the phase {phase}].
unresponsive error alert=TorchobsRankHung
    short: {who} {count:does|do} not respond.
    long: {who} has given no sign of life since {moment}[, in the phase {phase}]: it is stopped, or native code holds Python's
      lock.
unrecorded warning
    short: {who} {count:does|do} not record steps: recording is switched off.
finished info
    short: {who} finished.
    long: {who} finished in order[ {where}]; it ran for {lifetime}[; {signal} had asked it to end].
finished_without_step info
    short: {who} finished without a recorded step.
    long: {who} finished in order after {lifetime}, without a recorded step. If no optimizer of torch's steps, call
      torchobs.step() once per step. Processes that it started are recorded if they join a process group, or call
      torchobs.init().
end_unknown warning
    short: How rank {rank} ended is not known.
    long: How rank {rank} ended is not in this part of the file[; it had come to step {step:,} at least].
exception error alert=TorchobsRankFailed
    short: {who} failed[saves?, as it saved a checkpoint][: {exception}].
    long: {who} ended by {raised}[, raised by the handler of {signal}][, {where}][: {waited}].[ At its root was {cause}.][
      Parameters of {unused_of} without a gradient: {unused}.][saves? It was saving a checkpoint.][{room}][ The last one saved
      is of step {saved_step:,}.]
exit_code error alert=TorchobsRankFailed
    short: {who} failed with an exit status[ of {code}].
    long: {who} left with exit status {code}[ on {signal}, which it handled][, {where}].
interrupted info
    short: {who} {count:was|were} interrupted.
    long: {who} was interrupted (Ctrl-C, SIGINT)[ {where}][; on that it raised {handled}][; it left with exit status {code}].
terminated warning
    short: {who} {count:was|were} terminated.
    long: {who} was terminated by {signal}[ {where}][, in the phase {phase}][; on that it raised {handled}][; it left with exit
      status {code}].
crashed error alert=TorchobsRankFailed
    short: {who} crashed.
    long: {who} crashed[ at {place}][place! in a thread that ran no Python code] ({signal}, {meaning})[, {where}][, in the phase
      {phase}].
lost error alert=TorchobsRankFailed
    short: {who} vanished without a word.
    long: {who} vanished without a word[ {where}][, in the phase {phase}][rebooted!: killed (SIGKILL), os._exit or a
      crash][copied?, or it went on after this copy was made][rebooted?: the machine has been started again since, or the file
      is another machine's].
out_of_memory error alert=TorchobsRankFailed
    short: {who} vanished with memory full.
    long: {who} vanished with memory full[ {where}][, in the phase {phase}].[ The kernel killed a process of its cgroup
      {kill_age:s} before its last sign of life.][ {cgroup:%} of its cgroup's memory was taken.][ The cgroup's limit is
      {limit:size}.][ {machine:%} of the machine's memory was taken.]
thread_exception warning
    short: A thread ended by an exception.
    long: Thread '{thread}' ended by {raised}[, after step {step:,}][, {ago:s} before the end].[ So did {others:other thread}
      before.]
gpu_lost error alert=TorchobsGpuFault source=torchobs.gpu.lost
    short: GPU {hw.id} does not answer[, {ago:s} before the end]: {reason}.
gpu_xid error alert=TorchobsGpuFault source=torchobs.gpu.xid
    short: The driver reports XID {xid}[ ({meaning})] of GPU {hw.id}[, {ago:s} before the end].
gpu_failed error alert=TorchobsGpuFault
    short: {gpus:GPU} {gpus:has|have} failed: {names}.
worker_died error source=torchobs.data.worker_died
    short: A worker of a data loader died.
    long: A data loader's worker (pid {pid}) was ended by {how}[, {ago:s} before the end].
workers_died warning alert=TorchobsLoaderWorkerDied
    short: [earlier?Earlier: ]{workers:worker} of a data loader died[ on {where}].
probes_off warning alert=TorchobsProbeDisabled
    short: These probes failed and are off: {probes}.
dropped info alert=TorchobsFlightDropped
    short: Did not fit the flight file: {items}.
verdict info
    short: {badge}. {headline}
progress info
    short: {activity}, {alive:,} of {expected:rank} alive[ on this node, {world:,} in all].
    long: {activity}[hanging?, no step][ for {quiet:span}][ (usual: {usual:s}][habitual?; it paused as long before][usual?)]:
      {alive:,} of {expected:rank} alive[ on this node, {world:,} in all][step?, step {step:,}][step!, no step yet][, loss
      {loss:n}][, {speed}].
over info
    short: {activity}.
    long: {activity}[ after {ran:span}]: {ranks:rank}[unknown!, {steps:step}][unwritten? at least][unknown?, no step in its
      file][, last loss {loss:n}].
== time ==
stalled warning
    short: {who} {count:makes|make} no step.
    long: No step ended in the last {quiet:s}[, where one usually took {usual:s}][: {phase_s:s} of it in the phase {phase}].[
      Its main thread was at {place}.][ The stacks of all its threads are in {stacks}, beside the flight file.][ The next batch
      was to come from the loader's {worker}.][ Run {command} to see where its threads are.]
left_loop info
    short: {who} {count:has|have} left the training loop.
    long: No step ended in the last {quiet:s}: it had left its training loop.[ Its main thread was at {place}.]
lock_held error
    short: {who} {count:holds|hold} Python's lock in native code.
    long: Native code held Python's lock at the last sign of life[, in the phase {phase}], so that the heartbeat stopped[; a
      step usually took {usual:s}].[ Its main thread was at {place}.][ The stacks of all its threads are in {stacks}, beside the
      flight file.]
held_up info
    short: Step {step:,} took {took:s}, where {usual:s} is usual.
    long: Step {step:,} took {took:s}, where {usual:s} was usual, most of it in the phase {phase}[; so did {more:more step}].
slowdown warning alert=TorchobsSlowdown
    short: The last [one?step took][one!steps take] {now:s}[one! each], usual is {usual:s}.
    long: The last [one!{steps:,} ]{steps:step|steps}[one! ({took:s})] took {now:s}[one! each], usual was {usual:s}; {share:%}
      of the difference is in the phase {phase}.
data warning alert=TorchobsDataStarvation
    short: Training [up?waits][up!waited] for its data[ on {where}][: {share:%} of the time of its steps].
    long: Training [up?waits][up!waited] for its data[: {share:%} of the time of its steps].[ Most of it was one wait of
      {wait:s}, in step {step:,}: something stalled there.][no_batch? Its workers had no batch ready at the end: give the loader
      more workers, or each less work.]
between info
    short: Between the phases of its steps it is most often in {function}, {location}[, on {where}].
    long: {share:%} of the time of steps is between their phases, most often in {function}, {location}[, on {where}].
checkpoint_age info
    short: The last checkpoint was complete[ {age:s} before the end][age! at the end].
    long: The last checkpoint was complete[ {age:s} before the end][age! at the end]: [{lost:step}][more? or more][lost? must be
      done again][lost!nothing has to be done again].
checkpoint_failed error alert=TorchobsCheckpointFailed
    short: Checkpoints cannot be saved.
    long: {saves:checkpoint} could not be saved[ ({why})], and none was since.[{room}][ The last one saved is of step
      {saved_step:,}.]
checkpoint_failed_once info
    short: Checkpoints could not be saved for a time.
    long: {saves:checkpoint} could not be saved[ ({why})]; a later one was.[{room}]
save_raised warning source=torchobs.checkpoint.failed
    short: A save raises {exception.type}.
    long: A save ({format}) raised {exception.type}[, {ago:s} before the end].
checkpoint_keys_unused warning source=torchobs.checkpoint.unused key=keys
    short: load_state_dict(strict=False) of {model} used {matched:,} of {keys:,} keys: the checkpoint has {unexpected}, the
      model {missing}.
checkpoint_optimizer_unused info source=torchobs.checkpoint.unused key=optimizer
    short: The checkpoint has an optimizer's state of {parameters:parameter}, and {optimizer} begins without one: moments and
      counts begin anew. To resume, call optimizer.load_state_dict.
== memory ==
device_out_of_memory error source=torchobs.memory.out_of_memory key=device
    short: {device} has no memory left.
    long: {device} had no memory left[, {ago:s} before the end]: {requested:size} were asked for, {free:size} of {limit:size}
      were free, tensors held {allocated:size} and the allocator {reserved:size}.[ Of the model: {model}.][ Most of it is in
      {modules}.][ Most was allocated at {largest}.]
host_out_of_memory error source=torchobs.memory.out_of_memory key=cpu
    short: [limit?The process][limit!The host] has no memory left.
    long: [limit?The process][limit!The host] had no memory left[, {ago:s} before the end][: {requested:size} were asked for][,
      at its limit of {limit:size} (ulimit)].[ Of the model: {model}.][ Most of it is in {modules}.]
shared_memory_full warning alert=TorchobsSharedMemoryFull source=torchobs.memory.shared_full
    short: Shared memory (/dev/shm) is nearly full[, {ago:s} before the end]: {used:size} of {size:size}.
memory_growth warning alert=TorchobsMemoryGrowth source=torchobs.memory.growth
    short: {memory} memory [ended?grew][ended!grows][ by {per_step:size} a step][ on {where}][, and is full in about
      {left:about}].
    long: {memory} memory [ended?grew][ended!grows][ by {per_step:size} a step][; at that rate it would have been full
      {time_to_limit:s} later][, and is full in about {left:about}].
memory_leak warning source=torchobs.memory.leak
    short: {memory} memory leaks[: {tensor}][, made at {place}][tensor?, are never freed][: what {line} makes is never freed
      ({amount})][native?, but no object of Python's became more: look at native code].
    long: {memory} memory leaks[: {tensor}][, made at {place}][tensor?, are never freed][: what {line} makes is never freed
      ({amount})][native?, but no object of Python's became more: look at native code]. It grew by {grown:size} in
      {steps:step}.[ Also more: {objects}.]
== compile ==
recompile_storm warning alert=TorchobsRecompileStorm source=torchobs.compile.recompile_storm
    short: torch.compile compiles {location} again and again: its guard on {guard} fails ({expression}).
    long: torch.compile compiled {location} again and again (at least {recompiles:,} times in ten minutes): its guard on {guard}
      failed, {expression}.[ To avoid it, {remedy}.]
compile_failure warning source=torchobs.compile.failure
    short: torch.compile failed on {location} ({reason}), which runs uncompiled[; so {more:does|do} {more:other function}].
graph_breaks info source=torchobs.compile.graph_break
    short: torch.compile breaks the graph at {location} ({message})[, and at {more:other place}].
== ranks ==
ranks_missing warning alert=TorchobsRanksMissing
    short: {missing:rank} {missing:has|have} not appeared.
    long: {here:,} of the {expected:,} ranks of this machine are here: the others never started to record.
same_rank warning
    short: Several trainings are rank {rank} of this run.
    long: {here:,} processes that train side by side are rank {rank} of this run: each training needs a TORCHOBS_RUN_ID of its
      own.
only_failed error
    short: Only rank {rank} failed.
    long: Only rank {rank} failed, at {moment}.
failed_first error
    short: Rank {rank} [signal?was ended by {signal}][signal!failed] first.
    long: Rank {rank} [signal?was ended by {signal}][signal!failed] first, {later:s} before rank {next}[signal? failed: look for
      its sender][signal!: look there for the cause].
failed_by_itself error
    short: Rank {rank} failed first, in code of its own.
    long: Rank {rank} raised in code of its own, and the others ended within {within:s} of it: look at rank {rank} first.
vanished_first error
    short: Rank {rank} [crashed?crashed][crashed!vanished] first.
    long: Rank {rank} [crashed?crashed][crashed!vanished], and within {within:s} the others [raised?raised in collective
      operations][raised!were terminated]: look at rank {rank} first.
collective_timeout error
    short: {what} timed out[ after {timeout:s}].[ {waiting}]
    long: {what} timed out[ after {timeout:s}] on {gave_up}.[ {waiting}]
waited_for error alert=TorchobsRankHung
    short: {waiting}
collectives_differ error
    short: Ranks do not call the same collective: number {number:,} of group {group} is {operations}.
ranks_disagree error alert=TorchobsRanksDisagree
    short: Ranks do not agree: DDP averages the gradient, and its norm is not the same on {odd}. They do not train one model.
    long: Ranks do not agree: DDP averages the gradient, and its norm in step {step:,} is not the same ({norms}[, and {usual:n}
      on the others]). They do not train one model: the last backward pass of a step has to be outside of no_sync(), and the
      wrapped model to be called, not model.module.
weights_differ error
    short: Ranks do not train one model: in step {step:,} the weights of {odd} are [all?not the same][all!not those of the
      others].
    long: Ranks do not train one model: in step {step:,} the weights of {odd} are [all?not the same][all!not those of the
      others][ (in step {alike:,} they were)], and DDP averages gradients alone.
same_batches warning
    short: All ranks train on the same data: give the data loader a DistributedSampler.
    long: All ranks train on the same data: from step {step:,} on their batches were the same, and their losses are equal to the
      last bit. Give the data loader a DistributedSampler, and call its set_epoch() in each epoch.
other_run warning
    short: Another run here is in trouble: {name}[ and {more:,} more].
slowest_rank warning alert=TorchobsStraggler
    short: Rank {rank} [up?is][up!was] {factor:n} times as slow as the others, in the phase {phase}.
    long: Rank {rank} [up?is][up!was] {factor:n} times as slow as the others: in the phase {phase} it [up?spends][up!spent]
      {own:s} of a step, and the others, who [up?wait][up!waited] for it, {others_s:s}.
ranks_wait info
    short: Ranks [up?wait][up!waited] for each other, and which one is slow is not certain: of a step rank {rank}
      [up?spends][up!spent] {own:s} in {phase}, and rank {other} {others_s:s} in {elsewhere}.
== training ==
nonfinite_loss error alert=TorchobsLossNotFinite source=torchobs.anomaly key=nonfinite_loss
    short: The loss [since?has not been][since!is not] finite[since! in step {step:,}][ since step {since:,}][ on {where}].
    long: The loss [since?turned {name} in step {since:,}][since!is not finite][, {ago:step} after its gradient was not finite
      while the loss still was {loss:n}][rise_with?, as the gradient norm rose {rise:fold} (from {rise_usual:n} to
      {rise_value:n})][, {rise_ago:step} after the gradient norm rose {rise:fold} (from {rise_usual:n} to {rise_value:n})].[ The
      learning rate had risen {rate:fold} (from {rate_usual:n} to {rate_value:n}) in step {rate_step:,}.][ The learning rate was
      {learning_rate:n}.][ It trained on for {wasted:step} after that.]
nonfinite_loss_before error
    short: The loss is not finite[ on {where}].
    long: The loss has been {name} since step {step:,} or before: older steps are gone from the file.
nonfinite_loss_passed warning
    short: The loss was not finite in {losses:step}.
    long: The loss was not finite in {losses:step}[recovered?, and recovered].
nonfinite_gradient warning source=torchobs.anomaly key=nonfinite_gradient
    short: Gradients [since?have not been][since!are not] finite[since! in step {step:,}][ since step {since:,}][ on {where}].
    long: Gradients were [kinds?{kinds}][kinds!not finite][ in step {first_step:,}][, in {layers:named}][last?, the last that it
      began][steps?; in {steps:measured step} in all].[scaled? The loss scaler skips such steps: a few are usual.]
gradient_explosion warning alert=TorchobsGradientExplosion source=torchobs.anomaly key=gradient_explosion
    short: Gradients explode[: the norm is {value:n} in step {step:,}, usual is {baseline:n}][ on {where}].
    long: The gradient norm rose[ in step {first_step:,} to {first_value:n}, usual was {first_usual:n}][first_step! far above
      what was usual, in {number:step}][; so it did in {again:later step}].[ The gradient of layer {layer} grew most:
      {layer_norm:n}, usual was {layer_usual:n}.][ The learning rate had risen {rate:fold} (from {rate_usual:n} to
      {rate_value:n}) in step {rate_step:,}.]
loss_spike warning source=torchobs.anomaly key=loss_spike
    short: The loss has jumped[ to {value:n} in step {step:,}, usual is {baseline:n}][ on {where}].
    long: The loss rose[ in step {first_step:,} to {first_value:n}, usual was {first_usual:n}][first_step! far above what was
      usual, in {number:step}][; so it did in {again:later step}].[ The gradient of layer {layer} grew most: {layer_norm:n},
      usual was {layer_usual:n}.][ The learning rate had risen {rate:fold} (from {rate_usual:n} to {rate_value:n}) in step
      {rate_step:,}.]
gradient_vanishing warning alert=TorchobsGradientVanishing source=torchobs.anomaly key=gradient_vanishing
    short: Gradients vanish[: the norm is {value:n} in step {step:,}, usual is {baseline:n}][ on {where}].
    long: The gradient norm was vanishingly small, or zero, in {vanished:step} of the {measured:,} measured.[ At the end
      {zero:%} of the parameters had gradients of exactly zero.]
zero_gradients warning
    short: Every gradient is zero[ on {where}]: nothing is learned.
    long: All gradients were exactly zero in each of the {measured:,} measured steps: the parameters do not change the loss.
diverged warning alert=TorchobsLossDiverged source=torchobs.anomaly key=diverged
    short: The loss has diverged[ to {value:n} in step {step:,}, its start was {baseline:n}][ on {where}].
    long: The loss rose[ from {start:n}][start! from its start] to {left:n} times that or more within its first {warm_up:,}
      steps, and [back?came back][back!has not come back][: in step {last_step:,} it was {last_value:n}].[ The highest learning
      rate in them was {highest:n}.]
past_anomalies info
    short: {word} {what}[; the last {calm:,} steps were healthy].
nonfinite_parameters error source=torchobs.nonfinite.rest
    short: {parameter} holds NaN or infinity[ on {where}], and was not found to be finite since.
nonfinite_origin_input error source=torchobs.nonfinite.origin key=input
    short: The input[ {parameter}] [note?is infinite in float16][note!holds NaN or infinity][, in sample {sample:,}].
    long: The NaN or infinity[ of step {step:,}] came with the input[ {parameter}][, in sample {sample:,}]; it went into
      {operator}[ in {module}][ ({location})][: {note}].
nonfinite_origin_parameter error source=torchobs.nonfinite.origin key=parameter
    short: {holder} [several?hold][several!holds] NaN or infinity.
    long: {holder} held the NaN or infinity[ of step {step:,}] already; what made [several?them][several!it] so was not seen.
nonfinite_origin_operator error source=torchobs.nonfinite.origin key=operator
    short: {operator}[ in {module}][ ({location})] makes NaN or infinity.
    long: The NaN or infinity[ of step {step:,}] was born in {operator}[ in {module}][module!, outside of any module][
      ({location})][: {note}].
nonfinite_origin_backward error source=torchobs.nonfinite.origin key=backward
    short: The derivative of {operator}[ in {module}][ ({location})] makes NaN or infinity.
    long: The NaN or infinity[ of step {step:,}] was [note?most likely ]born in the derivative of {operator}[ in
      {module}][module!, outside of any module][ ({location})].[ That derivative is infinite {infinite}.]
nonfinite_origin_overflow error source=torchobs.nonfinite.origin key=overflow
    short: Gradients overflow in float16, in {parameter}: scale the loss, or train in bfloat16.
    long: The NaN or infinity[ of step {step:,}] is most likely gradients that overflowed in float16, in {parameter}[ {note}]:
      the largest number there is 65,504, and no loss scaler was used. Scale the loss (torch.amp.GradScaler, with weights in
      float32), or train in bfloat16.
nonfinite_origin_region error
    short: NaN or infinity appears inside [module!a ]{region}[ {module}][ ({location})]: run `debug.trace_nan(model, batch)`.
    long: The NaN or infinity[ of step {step:,}] appeared inside [backward?the backward pass of ][module!a ]{region}[ {module}][
      ({location})][note? or a later one]. Run `debug.trace_nan(model, batch)`.
nonfinite_origin_unknown error source=torchobs.nonfinite.origin key=unknown
    short: Where NaN or infinity begins was not found[averaged?: if on this rank, most likely in the derivative of
      {operator}][averaged!: it is first seen after {operator}][ in {module}][ ({location})].
    long: Where the NaN or infinity[ of step {step:,}] began was not found[averaged?: if on this rank, most likely in the
      derivative of {operator}][averaged!: it was first seen after {operator}][ in {module}][ ({location})][; {note}].
zero_learning_rate warning
    short: The learning rate is 0[all? in all steps][ from step {since:,}][before? or before][since? on].
    long: The learning rate was 0[all? in all steps][ from step {since:,}][before? or before][since? on]: {steps:step} changed
      nothing.
tiny_learning_rate warning
    short: The learning rate is below {rate:n}[ from step {since:,}][before? or before][since? on], after {highest:n}.
    long: The learning rate was below {rate:n}[ from step {since:,}][before? or before][since? on], after {highest:n}:
      {steps:step} changed next to nothing.
amp_skips warning alert=TorchobsLossScaleStuck
    short: The loss scaler [up?skips][up!skipped] every step[ on {where}]: nothing [up?is][up!was] learned.
    long: The loss scaler skipped the last {streak:step}: nothing was learned in them.
amp_many_skips warning
    short: The loss scaler skipped {skipped:,} of {steps:step}.
amp_scale_collapsed error source=torchobs.amp.scale_collapsed
    short: The loss scale has fallen to {scale:n}: it is lowered, and the step skipped, whenever gradients are not finite.
amp_unscaled warning source=torchobs.amp.unscaled
    short: Training in float16 autocast has no GradScaler: small gradients become zero. Use torch.amp.GradScaler, or
      bfloat16.
clipped_scaled warning source=torchobs.amp.clipped_scaled
    short: Gradients are clipped by norm before scaler.unscale_(optimizer), to {limit:n} over the loss scale, {scale:n}: call
      unscale_ first.
device_unread info source=torchobs.device.unread
    short: Loss and gradient norm are not recorded: torch cannot copy a value from {device_type} without blocking the training.
      torchobs.log(loss=...) is recorded.
model_changes info source=torchobs.model_change
    short: Parameters are trained that were not before (the next model, fold or trial)[, from step {step:,}
      on][changes?, {changes:time} in all]: losses and step times are judged apart from there.
other_thread warning source=torchobs.other_thread
    short: Thread {thread} trains at the same time: its steps are not recorded.
gradients_kept warning source=torchobs.loop.mistake key=gradients_kept
    short: Gradients are never set to zero: each step uses the sum of all before it. Call optimizer.zero_grad() in each step.
evaluation_mode warning source=torchobs.loop.mistake key=evaluation_mode
    short: The model trains in evaluation mode, without dropout and with batch normalisation as it was: call model.train() after
      each evaluation.
never_stepped warning source=torchobs.loop.mistake key=never_stepped
    short: optimizer.step() is missing: [{backward_passes:,} backward {backward_passes:pass|passes}, and ]no step of the
      optimizer[ ({optimizer})].
losses_kept warning source=torchobs.loop.mistake key=losses_kept
    short: Losses, or outputs, are kept with their graphs (losses.append(loss), total += loss), and memory grows with each step:
      keep loss.item() or loss.detach().
same_order warning source=torchobs.loop.mistake key=same_order
    short: Each epoch has the samples in the same order: call the DistributedSampler's set_epoch(epoch) before each.
clipped_late warning source=torchobs.loop.mistake key=clipped_late
    short: Gradients are clipped after the optimizer's step, which has used them as they were: call clip_grad_norm_ between
      backward() and step().
left_out warning source=torchobs.loop.left_out
    short: {parameters_affected:parameter} ({parameters:named}) {parameters_affected:gets|get} gradients and
      {parameters_affected:is|are} in no optimizer that steps: nothing is learned there.[ {optimizer} has them and has not
      stepped by step {step:,}.]
scheduler_before_optimizer warning source=torchobs.scheduler.misused key=before_optimizer
    short: A learning-rate scheduler[ ({scheduler})] is stepped before its optimizer's first step, and its first rate is never
      used: call optimizer.step() first.
scheduler_never_stepped warning source=torchobs.scheduler.misused key=never_stepped
    short: A learning-rate scheduler[ ({scheduler})] is never stepped: the learning rate does not follow it.
scheduler_idle_optimizer warning source=torchobs.scheduler.misused key=idle_optimizer
    short: A learning-rate scheduler[ ({scheduler})] is stepped, and its optimizer is not: another optimizer trains, whose
      learning rate stays as it is.
== layers ==
unmoved_layers warning alert=TorchobsGradientVanishing source=torchobs.grad.unmoved_layers
    short: {unmoved:layer} {unmoved:learns|learn} nothing.
unmoved_layers_vanishing warning source=torchobs.grad.unmoved key=vanishing
    short: {layers_affected:,} of {layers_total:layer} {layers_affected:learns|learn} nothing: only a tiny gradient reaches
      {at}.
    long: {layers_affected:,} of {layers_total:layer} ({layers:named}) {layers_affected:was|were} not learning in step {step:,}:
      the gradient is tiny on its way back to {at}.
unmoved_layers_cut_off warning source=torchobs.grad.unmoved key=cut_off
    short: {layers_affected:,} of {layers_total:layer} {layers_affected:learns|learn} nothing: no gradient reaches {at}.
    long: {layers_affected:,} of {layers_total:layer} ({layers:named}) {layers_affected:was|were} not learning in step {step:,}:
      no gradient at all comes back to {at}, because of saturated or dead units behind it, or a part cut off from the loss.
unmoved_layers_dead_units warning source=torchobs.grad.unmoved key=dead_units
    short: {layers_affected:,} of {layers_total:layer} {layers_affected:learns|learn} nothing: only zeros come into {at}, from
      dead units.
    long: {layers_affected:,} of {layers_total:layer} ({layers:named}) {layers_affected:was|were} not learning in step {step:,}:
      nothing but zeros comes into {at}, the units before it are dead.
unmoved_layers_no_gradient warning source=torchobs.grad.unmoved key=no_gradient
    short: {layers_affected:,} of {layers_total:layer} {layers_affected:learns|learn} nothing: the optimizer gets no gradient
      for {layers_affected:it|them}.
    long: {layers_affected:,} of {layers_total:layer} ({layers:named}) learned nothing from step {step:,} on: the optimizer gets
      no gradient for {layers_affected:it|them}. The loss is cut off from the model (detach, item, no_grad, a new tensor of its
      value), or zero_grad() comes after backward(), or backward() is not called, or the model was copied or replaced after the
      optimizer was made.
unused_layers info source=torchobs.grad.unmoved key=unused
    short: {layers_affected:layer} of the optimizer {layers_affected:has|have} had no gradient by step {step:,}
      ({layers:named}).
dead_units warning source=torchobs.dead_units
    short: {units_dead:,} of {units:,} units of {layer} {units_dead:gives|give} zero for every sample of {steps:step}, and
      {units_dead:learns|learn} nothing[; so do units of {more:other layer}].
activations_unread info source=torchobs.activations
    short: The outputs of {compiled:layer} are not measured: torch.compile has compiled {compiled:it|them}.
"""
"""The kinds by section: name, severity, alert, source, key; below each its texts, with continuation lines indented further."""


def _read(table: str) -> Iterator[Kind]:
    section, rows = "", list[list[str]]()
    for line in table.strip().splitlines():
        if line.startswith("== "):
            section = line.strip("= ")
        elif not line.startswith(" "):
            rows.append([section, line])
        elif line.startswith("      "):
            rows[-1][-1] += line[5:]
        else:
            rows[-1].append(line.strip())
    for section, head, *words in rows:
        name, severity, *more = head.split()
        options = dict(option.split("=") for option in more)
        texts = dict(line.split(": ", 1) for line in words)
        source = options.get("source", "")
        yield Kind(
            name, Severity[severity.upper()], texts["short"], texts.get("long", ""), section, options.get("alert", ""),
            EVENT_BY_NAME.get(source) or BY_NAME.get(source), options.get("key", ""),
        )  # fmt: skip


KINDS: dict[str, Kind] = {kind.name: kind for kind in _read(_TABLE)}


def as_subject(parameter: str) -> str:
    """Return a parameter's name, or the words in its place, for the beginning of a sentence."""
    return text.capital(_NAMELESS) if parameter == _UNNAMED else parameter


def origin_of(attributes: Mapping[str, object], step: int | None = None) -> Finding:
    """Return the finding on the origin of a NaN or an infinity, by the attributes of its event."""
    values = {item.name: attributes.get(item.name) for item in EVENT_BY_NAME["torchobs.nonfinite.origin"].attributes}
    origin, operator = str(values["origin"]), str(values["operator"] or "")
    if operator in REGIONS and origin in {"unknown", "backward"}:
        note = values["note"] if origin == "unknown" else None
        values |= {"region": REGIONS[operator], "backward": origin == "backward", "note": note}
        origin = "region"
    elif origin == "backward":
        values["infinite"] = next((where for where, names in INFINITE_DERIVATIVES.items() if operator in names), None)
    elif origin == "unknown" and not operator and values["parameter"]:
        origin = "parameter"
    values["averaged"] = values["note"] == OTHER_RANKS
    name, more = values["parameter"], values["note"] if origin == "parameter" else None
    if name:
        values["parameter"] = _NAMELESS if name == _UNNAMED else name
        noun = text.capital(_NAMELESS) if name == _UNNAMED else f"The {'parameters' if more else 'parameter'} {name}"
        values |= {"holder": f"{noun} {more}" if more else noun, "several": bool(more)}
    kind = f"{ORIGIN}_{origin}"
    return Finding(kind if kind in KINDS else f"{ORIGIN}_unknown", "", step, values)
