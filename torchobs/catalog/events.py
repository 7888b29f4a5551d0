"""Events, with the time at which they happened, and spans."""

from __future__ import annotations

from collections.abc import Mapping

from torchobs.catalog.model import *
from torchobs.catalog.own import TUNE_ACTION

# --- events -------------------------------------------------------------------------------------------------------------------
EVIDENCE = Attribute("evidence", "id of the file in the exporter's API")
EVENT_RUN_START = info("torchobs.run.start", "torchobs.init() has finished.")
EXIT_SIGNAL = Attribute("signal", "the signal, if a handler of one raised it or led to it")
EVENT_RUN_END = info("torchobs.run.end", "The rank ended, by itself or by a signal that it handled.", EXIT_REASON, EXIT_SIGNAL)
EVENT_TRAINER = info(
    "torchobs.trainer", "A framework's trainer started. Further attributes: its settings.", *named("framework", "version")
)
RECENT_COLLECTIVES = Attribute(
    "collectives",
    "of a rank that waits, or that a timeout ended: its last collectives, by torch's flight recorder, with group,"
    " number, kind and the line that called each",
)
EVENT_EXCEPTION = error(
    "torchobs.exception",
    "An uncaught exception; in the main thread it ends the rank, except in a notebook or test.",
    Attribute("exception.type", "its class"),
    Attribute("exception.message", "first line of its message, without secrets, at most 100 characters"),
    Attribute("location", "file:line where it was raised"),
    Attribute("caller", "innermost file:line of the user's own code, if different"),
    Attribute("cause.type", "class of the first exception of the chain, if it is a chain"),
    Attribute("cause.message", "first line of that exception's message, likewise"),
    Attribute("cause.location", "file:line where that exception was raised"),
    Attribute("cause.caller", "innermost file:line of the user's own code in it, if different"),
    Attribute("origin", "the data loader's worker that raised it, if not the rank itself; location is there then"),
    Attribute("reraised", "file:line of the user's own code in the rank where it was raised again"),
    Attribute("thread", "the thread's name, if it is not the main one"),
    EXIT_SIGNAL,
    Attribute("timeout", "of an operation of torch.distributed that timed out: which", COLLECTIVE_TIMEOUTS),
    Attribute("timeout_s", "after how many seconds, if torch says so", unit="s"),
    Attribute("absent_ranks", "the ranks that did not come, if torch says so"),
    RECENT_COLLECTIVES,
    Attribute("unused", "of DistributedDataParallel's error: names of the parameters without a gradient, at most eight"),
    Attribute(
        "unused_count", "number of those parameters; absent where torch's message has a hundred of them, and more follow"
    ),
    Attribute("unused_of", "class of the model that DistributedDataParallel wraps"),
)
EVENT_DISTRIBUTED = info(
    "torchobs.distributed", "How the training is spread over ranks.", *named("backend", "world_size", "parallelism", "mesh")
)
EVENT_COLLECTIVES_UNKNOWN = info(
    "torchobs.collectives.unknown",
    "torch's flight recorder says nothing of this rank's collectives.",
    Attribute("reason", "why"),
)
EVENT_GPU_LOST = error(
    "torchobs.gpu.lost",
    "A GPU has stopped responding.",
    GPU_ID,
    Attribute("reason", "what its library says: lost, reset_required, silent"),
)
EVENT_GPU_XID = error("torchobs.gpu.xid", "The driver reported a GPU's error (an XID).", GPU_ID, *named("xid", "meaning"))
EVENT_ANOMALY = warning(
    "torchobs.anomaly",
    "A step was judged anomalous.",
    ANOMALY_KIND,
    *named("value", "baseline"),
    ORIGIN,
    *named("module", "operator", "parameter"),
    Attribute("left_out", "number of earlier ones of the kind without an event: of many in a row, one in ten minutes has one"),
    Attribute("layer", "layer with the gradient that grew most in that step, of an explosion or a spike in a measured step"),
    Attribute("layer_norm", "norm of its gradient"),
    Attribute("layer_usual", "its usual norm: the median of up to 16 measured steps before"),
)
_SEVERITY = Attribute("severity", "info: nothing was lost; warning: something was refused or lost; error: it was raised")
_CATEGORY = Attribute("category", "what it is about: memory, numerics, data, io, contract, resources, file")
EVENT_GUARD_VIOLATION = warning(
    "torchobs.guard.violation",
    "A tensor did not keep its contract.",
    _CATEGORY,
    _SEVERITY,
    *named("tensor", "what", "found", "expected"),
)
EVENT_GUARD_RECOVERY = warning(
    "torchobs.guard.recovery",
    "An error after which a training or inference went on, or gave up.",
    _CATEGORY,
    _SEVERITY,
    *named("action", "error"),
)
EVENT_GUARD_FILE = warning(
    "torchobs.guard.file",
    "A model file is dangerous, would run unknown code, or is not the one published.",
    _CATEGORY,
    _SEVERITY,
    *named("verdict", "reason"),
)
EVENT_GUARD_MODEL = warning(
    "torchobs.guard.model",
    "A model has weights that a sound one does not have.",
    _CATEGORY,
    _SEVERITY,
    *named("layer", "problem", "problems"),
)
EVENT_GUARD_RESOURCE = warning(
    "torchobs.guard.resource",
    "A resource got above its threshold.",
    _CATEGORY,
    _SEVERITY,
    Attribute("resource", "what is used up"),
    Attribute("where", "the container, the machine, a device or a path"),
    *named("percent", "threshold"),
)
EVENT_GUARD_OUTPUTS = warning(
    "torchobs.guard.outputs",
    "A model's outputs were refused, replaced or found suspicious.",
    _CATEGORY,
    _SEVERITY,
    *named("output", "problem", "policy"),
)
EVENT_SCHEDULER_MISUSED = warning(
    "torchobs.scheduler.misused",
    "A learning-rate scheduler is used wrongly.",
    SCHEDULER_MISUSE_KIND,
    Attribute("scheduler", "its class"),
)
LOOP_MISTAKES = (
    "gradients_kept", "evaluation_mode", "never_stepped", "losses_kept", "same_order", "clipped_late",
)  # fmt: skip
EVENT_LOOP_MISTAKE = warning(
    "torchobs.loop.mistake",
    "The training loop has a mistake.",
    Attribute(
        "kind",
        "gradients never set to zero, training in evaluation mode, an optimizer that never steps, losses kept with their "
        "graphs, one order for each epoch, or gradients clipped after the optimizer's step",
        LOOP_MISTAKES,
    ),
    Attribute("optimizer", "class of an optimizer that never steps"),
    Attribute("parameters_affected", "0 in a later event that takes the kind back"),
    Attribute("backward_passes", "number of them without a step of an optimizer that never steps"),
)
EVENT_LEFT_OUT_PARAMETERS = warning(
    "torchobs.loop.left_out",
    "Parameters with gradients are in no optimizer, or in one that never steps.",
    Attribute("parameters", "which, the first eight"),
    Attribute("parameters_affected", "how many; in a later event those that are left, 0 if all are trained by then"),
    Attribute("parameters_trained", "how many the optimizers that step have"),
    Attribute("optimizer", "class of the one that has them and has not stepped"),
)
EVENT_AMP_SCALE_COLLAPSED = warning(
    "torchobs.amp.scale_collapsed",
    "A loss scale fell below 1: again and again gradients are not finite.",
    SCALER,
    Attribute("scale", "the loss scale"),
)
EVENT_AMP_UNSCALED = warning(
    "torchobs.amp.unscaled",
    "Training in float16 without a GradScaler: small gradients become zero.",
    Attribute("steps", "steps done so far"),
)
EVENT_AMP_CLIPPED_SCALED = warning(
    "torchobs.amp.clipped_scaled",
    "Gradients were clipped by norm before the loss scaler unscaled them.",
    *named("limit", "scale"),
)
EVENT_DEVICE_UNREAD = warning(
    "torchobs.device.unread",
    "This device's losses and gradient norms are not recorded: reading them would block.",
    Attribute("device_type", "torch's name of the kind of device"),
)
EVENT_MEMORY_GROWTH = warning(
    "torchobs.memory.growth",
    "Memory grows steadily and would reach its limit within a day.",
    SPACE,
    Attribute("per_step", "bytes a step", unit="By"),
    Attribute("time_to_limit", "seconds until then", unit="s"),
)
EVENT_MEMORY_LEAK = warning(
    "torchobs.memory.leak",
    "What grew while host memory leaked, over some ten seconds, largest first.",
    SPACE,
    Attribute("ended", "why it ended early, if it did", ("complete", "memory")),
    Attribute("seconds", "for which it was watched", unit="s"),
    Attribute("steps", "in which it was watched"),
    Attribute("grown", "growth of the process", unit="By"),
    Attribute("tensor_bytes", "of it, what tensors known to Python take", unit="By"),
    Attribute(
        "lines", "file:line with more living allocations: how many more, and their size; of a tensor on the host the object"
    ),
    Attribute("objects", "types with more objects"),
    Attribute("tensors", "shapes with more tensors, with the size of their memory"),
    EVIDENCE,
)
EVENT_OUT_OF_MEMORY = error(
    "torchobs.memory.out_of_memory",
    "Memory ran out, in a device's allocator or on the host (cpu).",
    DEVICE,
    Attribute("requested", "requested size", unit="By"),
    Attribute("limit", "memory that it may use; of the host only a limit of its address space (ulimit -v, -d)", unit="By"),
    Attribute("free", "free memory of the device", unit="By"),
    Attribute("allocated", "in use by tensors", unit="By"),
    Attribute("reserved", "held by the allocator", unit="By"),
    Attribute("active", "in blocks that are in use", unit="By"),
    Attribute("inactive_split", "in inactive split blocks", unit="By"),
    *named("allocations", "alloc_retries"),
    Attribute("ooms", "such errors so far, without this one"),
    Attribute("parameters", "of it, what models' parameters take", unit="By"),
    Attribute("gradients", "their gradients", unit="By"),
    Attribute("optimizer_state", "the state of the optimizers", unit="By"),
    Attribute("buffers", "models' buffers", unit="By"),
    Attribute("modules", "the modules that take most of these, with their size"),
    Attribute("largest", "where most of it was allocated (file:line, size, blocks), if torch records its history"),
)
EVENT_SHARED_MEMORY_FULL = warning(
    "torchobs.memory.shared_full",
    "Shared memory (/dev/shm), which workers and NCCL use, is nearly full.",
    Attribute("used", "bytes in use", unit="By"),
    Attribute("size", "bytes in all", unit="By"),
)
EVENT_NONFINITE_GRADIENT = warning(
    "torchobs.grad.nonfinite",
    "Gradients were not finite; at most once a minute.",
    Attribute("layers", "in which layers, the first eight in the model's order"),
    Attribute("layers_affected", "in how many"),
    Attribute("elements", "how many elements, where they were counted"),
    Attribute("kinds", "nan, inf or both"),
    Attribute("measured", "false for what the end of the training left, and no measurement saw"),
)
EVENT_NONFINITE_ORIGIN = error(
    "torchobs.nonfinite.origin",
    "Where a NaN or infinity was born; at most once in ten minutes for one place.",
    ORIGIN,
    Attribute("operator", "torch's operator that made it, or was the first to be given it"),
    Attribute("module", "path of the module that called the operator; absent outside of any"),
    Attribute("parameter", "the parameter's name, or that of the variable with the batch"),
    *named("location", "sample"),
    Attribute("element", "index of the first such element in that tensor"),
    Attribute("inputs", "statistics of the operator's inputs"),
    Attribute("note", "how it was found, or what makes such values there"),
)
EVENT_NONFINITE_REST = info(
    "torchobs.nonfinite.rest",
    "What is not finite in parameters and buffers, fifty steps after the last NaN or infinity.",
    Attribute("parameters_affected", "how many hold such values; 0: all are finite"),
    Attribute("parameter", "name of the first"),
)
EVENT_STEP_HELD = warning(
    "torchobs.step.held",
    "debug.nan_guard() held an optimizer's step back: gradients were not finite.",
    *named("parameters", "held"),
)
STUCK_CAUSES = ("vanishing", "cut_off", "dead_units", "no_gradient", "unused")
EVENT_UNMOVED_LAYERS = warning(
    "torchobs.grad.unmoved",
    "Layers learn nothing, for one cause; information where they are unused.",
    Attribute("layers", "which, the first eight in the model's order"),
    Attribute("layers_affected", "how many; 0 in a later event that takes the cause back"),
    Attribute("layers_total", "of how many that the model has"),
    Attribute(
        "cause",
        "why: the gradient that reaches them is tiny, or zero, or the units before them are dead, or their optimizer gets no "
        "gradient, or they alone have never had one",
        STUCK_CAUSES,
    ),
    Attribute("at", "the first with only zeros as input, else the layer nearest to the loss"),
)
EVENT_REPLICA_WEIGHTS = info(
    "torchobs.replica.weights",
    "What is the same on all ranks with the same weights; in steps that are powers of two, with DistributedDataParallel.",
    Attribute("values", "the norm of some weights, and eight sums of them with random signs"),
)
EVENT_REPLICA_BATCHES = info(
    "torchobs.replica.batches",
    "What is the same on all ranks that are given the same batches, with DistributedDataParallel.",
    Attribute("values", "of each of the first eight batches of an iteration"),
)
EVENT_ACTIVATIONS = info(
    "torchobs.activations",
    "At level extreme: how many layers' outputs are measured.",
    Attribute("layers", "looked at"),
    Attribute("left_out", "not, since there are more than have series"),
    Attribute("compiled", "not, since torch.compile has compiled a module that they are part of"),
    Attribute("silent", "not, since they are not called as modules: in a compiled function, or unused"),
)
EVENT_DEAD_UNITS = warning(
    "torchobs.dead_units",
    "At level extreme: at least half of a rectifier's units gave only zeros for a hundred steps.",
    *named("layer", "units_dead", "units", "steps"),
)
EVENT_PROBE_DISABLED = warning(
    "torchobs.probe.disabled", "A probe raised and was switched off.", PROBE, *named("exception.type", "location")
)
EVENT_MODEL = info("torchobs.model", "A model was passed to torchobs.watch().", *named("name", "parameters", "trainable"))
EVENT_FROZEN_BETWEEN = info(
    "torchobs.frozen_between",
    "Frozen layers stand between trained ones; at most once for each model.",
    *named("layers", "layers_affected"),
)
EVENT_SCALARS = info(
    "torchobs.scalars",
    "Points of the curves of scalars given to torchobs.log().",
    *named("names", "steps", "values"),
)
EVENT_MODEL_CHANGE = info(
    "torchobs.model_change",
    "Training continues with new parameters (next fold or trial), which resets baselines.",
    *named("changes", "steps_before"),
)
EVENT_OTHER_THREAD = warning(
    "torchobs.other_thread", "A second thread steps optimizers too; its steps are not counted.", Attribute("thread", "its name")
)
EVENT_WORKER_DIED = error(
    "torchobs.data.worker_died",
    "A data loader's worker was ended by a signal or an error.",
    Attribute("pid", "its process id"),
    Attribute("code", "its exit code, 0 for a signal"),
    Attribute("signal", "the signal's name, e.g. SIGKILL: the out-of-memory killer's"),
)
EVENT_STARVED = warning(
    "torchobs.data.starved",
    "Training waits for data for a fifth of its time or more.",
    Attribute("share", "of the training time of the last minute, or the last ten steps"),
)
EVENT_CHECKPOINT_FAILED = error(
    "torchobs.checkpoint.failed",
    "A save raised an exception.",
    Attribute("format", "what was saving", ("torch", "safetensors", "distributed")),
    Attribute("exception.type", "the exception's class"),
    Attribute("saved_step", "step of the last checkpoint that was saved; 0 if there was none"),
    Attribute("free", "bytes that the target's file system has left, where it is a path", unit="By"),
    Attribute("needed", "bytes of the last checkpoint that was saved, else of the trained parameters", unit="By"),
)
EVENT_CHECKPOINT_UNUSED = warning(
    "torchobs.checkpoint.unused",
    "Little of a loaded checkpoint fits the model, or its optimizer's state was not loaded.",
    Attribute("kind", "what is unused", ("keys", "optimizer")),
    Attribute("model", "class of the model that load_state_dict(strict=False) was called of"),
    Attribute("keys", "how many the checkpoint has"),
    Attribute("matched", "how many of them the model has"),
    Attribute("unexpected", "the first that it does not have"),
    Attribute("missing", "the first that it has and the checkpoint has not"),
    Attribute("optimizer", "class of the optimizer that begins without a state"),
    Attribute("parameters", "how many it has, as has the state in the file"),
)
EVENT_RECOMPILE = info(
    "torchobs.compile.recompile",
    "A function was compiled again.",
    COMPILE_LOCATION,
    COMPILE_GUARD,
    Attribute("expression", "the guard that failed, without values"),
)
EVENT_RECOMPILE_STORM = warning(
    "torchobs.compile.recompile_storm",
    "A function is compiled again and again.",
    COMPILE_LOCATION,
    COMPILE_GUARD,
    *named("expression", "recompiles"),
)
EVENT_COMPILE_FAILED = warning(
    "torchobs.compile.failure",
    "torch.compile gave up on a function.",
    COMPILE_LOCATION,
    COMPILE_FAILURE,
    Attribute("exception.type", "class of the compiler's exception"),
)
EVENT_STEP_BETWEEN = info(
    "torchobs.step.between",
    "The script's most frequent line between the phases of a step.",
    *named("location", "function"),
)
EVENT_GRAPH_BREAK = info(
    "torchobs.compile.graph_break",
    "A graph break; recorded once per location.",
    Attribute("location", "file:line"),
    COMPILE_BREAK,
    Attribute("message", "the reason's first line, without values"),
)
EVENT_TUNE_PLAN = info(
    "torchobs.tune.plan",
    "A plan of torchobs.tune changed the model.",
    TUNE_ACTION,
    *named("mode", "level", "techniques"),
    Attribute("difference", "if refused: relative difference of the outputs"),
    Attribute("reason", "if the compilation failed: the error's first line"),
)
EVENT_TUNE_BENCHMARK = info(
    "torchobs.tune.benchmark",
    "Modes of torchobs.tune were timed.",
    *named("recommended", "reason", "rounds"),
    Attribute("speedups", "each mode's speed-up over the first, with its quartiles"),
)
EVENT_DEBUG_FINDING = warning(
    "torchobs.debug.finding",
    "A function of torchobs.debug found something. Further attributes: its numbers.",
    *named("function", "kind", "name", "message"),
    Attribute("left_out", "number of earlier ones of the kind without an event: of many in a row, one in ten minutes has one"),
)
EVENT_DEBUG_EARLY_STOPPING = info(
    "torchobs.debug.early_stopping",
    "A check of debug.early_stopping(), and its decision.",
    *named("monitor", "value", "best", "patience_left", "improved", "stop"),
)
EVENT_DEBUG_VALIDATION = info(
    "torchobs.debug.validation",
    "The end of a debug.validation(). Further attributes: its metrics.",
    *named("name", "samples", "batches"),
    Attribute("seconds", "its duration", unit="s"),
)
EVENT_STACKS = info(
    "torchobs.stacks",
    "The stacks of all threads were written: asked for, the GIL held for seconds, or early in a stall.",
    Attribute("cause", "why", ("asked", "stuck", "stalled")),
    EVIDENCE,
    Attribute("silent_s", "for a stuck rank: seconds for which no other thread could run", unit="s"),
    Attribute("quiet_s", "for one that stood still: seconds without a sign of a step", unit="s"),
    Attribute("phase", "for one that stood still: the phase in which it did"),
    Attribute("workers", "state of at most eight worker processes of its data loaders, those first that the next batch is of"),
    Attribute("awaited", "the worker that the next batch is expected of"),
    RECENT_COLLECTIVES,
)
LACK = Attribute("detail", "the system's error message, or the space needed")
EVENT_STACKS_FAILED = warning(
    "torchobs.stacks_failed",
    "Stacks could not be written, or not completely.",
    Attribute("cause", "why they were to be written", ("asked", "stuck", "stalled")),
    Attribute("reason", "why they were not written", ("no_room", "not_permitted", "error")),
    LACK,
    EVIDENCE,
)
EVENT_PROFILE_START = info(
    "torchobs.profile.start", "A requested profile has begun.", Attribute("steps", "number of steps to profile"), EVIDENCE
)
EVENT_PROFILE_END = info(
    "torchobs.profile.end",
    "The profiler's trace was written.",
    Attribute("reason", "why it ended", ("complete", "time", "memory", "interrupted")),
    Attribute("steps", "number of steps profiled"),
    Attribute("size", "bytes of the trace, compressed", unit="By"),
    EVIDENCE,
)
EVENT_PROFILE_FAILED = warning(
    "torchobs.profile.failed",
    "A requested profile has no trace.",
    Attribute(
        "reason",
        "why",
        ("profiler_in_use", "no_step", "too_large", "no_room", "not_permitted", "temporary_directory", "error"),
    ),
    LACK,
    Attribute("exception.type", "class of the exception, for an error"),
    EVIDENCE,
)
# --- spans --------------------------------------------------------------------------------------------------------------------
SPAN_RUN = span(
    "torchobs.run",
    "From init() to the beginning of training, or the rank's end, at most an hour.",
    Attribute("reason", "how the rank ended, if within it without saying so itself"),
)
SPAN_SEGMENT = span(
    "torchobs.segment",
    "An epoch, short epochs of together a minute, or an hour.",
    Attribute("epoch", "number of the epoch it begins in, from 1; absent without epochs"),
    Attribute("part", "number of the hour within the epoch, from 0"),
    Attribute("steps", "steps that ended in it"),
    Attribute("reason", "how the rank ended, if within it without saying so itself"),
)
SPAN_PHASE = span(
    "torchobs.phase", "A region opened by torchobs.phase(), of 100 ms or longer.", Attribute("phase", "the name given")
)
SPAN_EPOCH = span(
    "torchobs.epoch", "A pass over the training loader. Not sent over OTLP if longer than an hour.", *named("epoch", "steps")
)
SPAN_EVALUATION = span(
    "torchobs.evaluation",
    "Between eval() and train(), or while batches are fetched without gradients. All of 100 ms, some shorter ones.",
)
SPAN_CHECKPOINT = span(
    "torchobs.checkpoint",
    "A save until it is complete. All of 100 ms, some shorter ones.",
    Attribute("format", "what saved", ("torch", "safetensors", "distributed")),
    Attribute("size", "bytes this rank wrote", unit="By"),
    Attribute("blocked_s", "for an asynchronous one: seconds for which training waited", unit="s"),
    Attribute("file", "its time of change and size, by which a run that goes on from it finds its step"),
)
SPAN_RESTORE = span(
    "torchobs.restore",
    "A load by torch or torch.distributed.checkpoint in the training thread, of 100 ms or longer.",
    Attribute("format", "what loaded", ("torch", "distributed")),
)
SPAN_STEP = span(
    "torchobs.step",
    "A step: one in ten seconds, some slow or anomalous ones, and those with events. Where it is not one fetch, "
    "backward and optimizer step, its phases are attributes (`forward_s` ...).",
    Attribute("step", "its number"),
    Attribute(
        "reason",
        "why it was recorded: user means that the application began a span in it",
        ("sampled", "slow", "anomalous", "event", "user"),
    ),
    Attribute("duration_s", "as in torchobs.step.duration; absent for the first step, as its start is unknown", unit="s"),
    *named("loss", "grad_norm", "skipped"),
    Attribute("ended", "false for one that the run's end interrupted"),
)
SPAN_STEP_PHASE = span("torchobs.step_phase", "A phase of a step that has a span.", PHASE)
SPAN_COMPILE = span(
    "torchobs.compile",
    "A compilation: of a function, or of a graph's backward.",
    Attribute("function", "its name"),
    COMPILE_LOCATION,
    Attribute("cause", "first, recompile or backward"),
    Attribute("cached", "whether Inductor's code came from its cache; absent without a lookup"),
)

EVENTS: tuple[Event, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Event))
SPANS: tuple[Span, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Span))
EVENT_BY_NAME: dict[str, Event] = {event.name: event for event in EVENTS}
TITLES = {
    EVENT_DISTRIBUTED.name: "Distributed training",
    EVENT_GPU_LOST.name: "GPU lost",
    EVENT_GPU_XID.name: "GPU error (XID)",
    EVENT_LOOP_MISTAKE.name: "Mistake in the training loop",
    EVENT_LEFT_OUT_PARAMETERS.name: "Parameters in no optimizer",
    EVENT_AMP_SCALE_COLLAPSED.name: "Loss scale collapsed",
    EVENT_AMP_UNSCALED.name: "float16 without a loss scaler",
    EVENT_AMP_CLIPPED_SCALED.name: "Clipped before unscaling",
    EVENT_DEVICE_UNREAD.name: "Values of a device not read",
    EVENT_OUT_OF_MEMORY.name: "Out of memory",
    EVENT_SHARED_MEMORY_FULL.name: "Shared memory full",
    EVENT_NONFINITE_GRADIENT.name: "Gradients not finite",
    EVENT_NONFINITE_ORIGIN.name: "Where NaN or infinity began",
    EVENT_NONFINITE_REST.name: "NaN or infinity in weights",
    EVENT_STEP_HELD.name: "Step held back",
    EVENT_STEP_BETWEEN.name: "Most often between phases",
    EVENT_UNMOVED_LAYERS.name: "Layers that learn nothing",
    EVENT_REPLICA_WEIGHTS.name: "Weights to compare",
    EVENT_REPLICA_BATCHES.name: "Batches to compare",
    EVENT_ACTIVATIONS.name: "Layer outputs",
    EVENT_FROZEN_BETWEEN.name: "Frozen layers between trained ones",
    EVENT_MODEL_CHANGE.name: "Another model",
    EVENT_OTHER_THREAD.name: "Another training thread",
    EVENT_WORKER_DIED.name: "Data loader's worker died",
    EVENT_STARVED.name: "Waiting for data",
    EVENT_CHECKPOINT_UNUSED.name: "Checkpoint not used",
    EVENT_RECOMPILE.name: "Recompiled",
    EVENT_RECOMPILE_STORM.name: "Recompiled again and again",
    EVENT_COMPILE_FAILED.name: "Compilation given up",
    EVENT_GRAPH_BREAK.name: "Graph break",
    EVENT_STACKS.name: "Stacks written",
    EVENT_STACKS_FAILED.name: "Stacks not written",
    EVENT_PROFILE_START.name: "Profile started",
    EVENT_PROFILE_END.name: "Profile written",
}
"""Names for people of events with a name that says too little"""


def event_title(name: str) -> str:
    """Return an event's name for people: ``Out of memory``."""
    return TITLES.get(name) or name.removeprefix("torchobs.").replace("_", " ").replace(".", " ").capitalize()


def event_severity(name: str, attributes: Mapping[str, object]) -> Severity:
    """Return the severity of an event: an anomaly's by its kind; info of Ctrl-C, unused layers, an application's own events."""
    if attributes.get("exception.type") == "builtins.KeyboardInterrupt":
        return Severity.INFO
    kind, event = attributes.get("kind"), EVENT_BY_NAME.get(name)
    if event is EVENT_ANOMALY and isinstance(kind, str):
        return ANOMALY_SEVERITY.get(kind, event.severity)
    if event is EVENT_UNMOVED_LAYERS and attributes.get("cause") == "unused":
        return Severity.INFO
    return event.severity if event else Severity.INFO
