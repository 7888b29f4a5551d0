"""Catalog of every metric, event and span of torchobs. Names follow OpenTelemetry, units UCUM.

Derived from it are the flight file's series, the exporter's metrics page, the dashboards, the alert rules and
``docs/metrics.md``. A dashboard that names an unknown metric is an ``AttributeError``.

Dimensionless gauges that are no ratio have an empty unit, because Prometheus appends ``_ratio`` to a gauge with unit ``1``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

__all__ = ["Attribute", "Event", "Kind", "Metric", "Severity", "Span", "cumulative", "prometheus_label", "prometheus_name"]


class Kind(Enum):
    """Kind of an instrument; the values are stored in the flight file."""

    COUNTER = 1
    UPDOWN = 2
    GAUGE = 3
    HISTOGRAM = 4


def cumulative(kind: Kind) -> bool:
    """Return True if a value only grows; such values are still valid after their process has ended."""
    return kind is Kind.COUNTER or kind is Kind.HISTOGRAM  # faster than a set, for each of 10^6 series


class Severity(Enum):
    """OpenTelemetry severity numbers of the events that torchobs emits."""

    INFO = 9
    WARNING = 13
    ERROR = 17


class Attribute(NamedTuple):
    """A metric's label. ``values``: its closed set of values; empty: open, with a number limited by its probe.

    ``unit``: of an event's number that is a size (``By``) or a duration (``s``), by which it is shown.
    """

    name: str
    brief: str
    values: tuple[str, ...] = ()
    unit: str = ""


class Metric(NamedTuple):
    """One instrument. ``survives``: a dead rank's last value is served during the grace period (a counter's always is).

    ``quiet``: default value; a series is on the exporter's page only from its first other value on. ``shared``: the value is of
    the container or the machine, the same for all its ranks, and so has no rank label.
    """

    name: str
    kind: Kind
    unit: str
    brief: str
    attributes: tuple[Attribute, ...] = ()
    bounds: tuple[float, ...] = ()
    integer: bool = False
    survives: bool = False
    quiet: float | None = None
    shared: bool = False

    @property
    def prometheus(self) -> str:
        """The sample name in Prometheus (a histogram's without ``_bucket``, ``_sum`` and ``_count``)."""
        return prometheus_name(self.name, self.unit, self.kind)

    def described(self, brief: str) -> Metric:
        """Return the same metric with that brief, for a declaration that reads from left to right."""
        return self._replace(brief=brief)


class Event(NamedTuple):
    """An event with a time in the event ring, exported as a log record and as a span event, shown by page and ``inspect``."""

    name: str
    brief: str
    severity: Severity
    attributes: tuple[Attribute, ...] = ()


class Span(NamedTuple):
    """A timed region exported as an OpenTelemetry span."""

    name: str
    brief: str
    attributes: tuple[Attribute, ...] = ()


# Powers of two and of four are exact boundaries of base-2 exponential and of Prometheus native histograms, so that conversion
# to both is lossless. Norms are resolved from 2e-4 to 4096 only, because each bound is a series per rank; a norm beyond them is
# an anomaly, with its size in the gauge and the event.
SECONDS_BOUNDS = tuple(2.0**exponent for exponent in range(-11, 11))
NORM_BOUNDS = tuple(4.0**exponent for exponent in range(-6, 7))
SIZE_BOUNDS = tuple(4.0**exponent for exponent in range(3, 16))
COLLECTIVE_SECONDS_BOUNDS = tuple(4.0**exponent for exponent in range(-8, 4))

_UNITS = {
    "s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds", "min": "minutes", "h": "hours",
    "d": "days", "By": "bytes", "KiBy": "kibibytes", "MiBy": "mebibytes", "GiBy": "gibibytes", "TiBy": "tibibytes",
    "KBy": "kilobytes", "MBy": "megabytes", "GBy": "gigabytes", "TBy": "terabytes", "m": "meters", "V": "volts",
    "A": "amperes", "J": "joules", "W": "watts", "g": "grams", "Cel": "celsius", "Hz": "hertz", "1": "", "%": "percent",
}  # fmt: skip
_PER_UNITS = {"s": "second", "m": "minute", "h": "hour", "d": "day", "w": "week", "mo": "month", "y": "year"}
_NOT_METRIC = re.compile(r"[^a-zA-Z0-9:]+")
_NOT_LABEL = re.compile(r"[^a-zA-Z0-9_]")


UNNAMED = "unnamed"
"""Name in Prometheus of a metric that has no valid character in its own."""


def prometheus_name(name: str, unit: str, kind: Kind) -> str:
    """Translate an OpenTelemetry instrument name as Prometheus' own OTLP endpoint does (UnderscoreEscapingWithSuffixes).

    Source: the rules of ``prometheus/otlptranslator``; a test compares with a running Prometheus 3. A name without valid
    characters, which Prometheus refuses, becomes ``unnamed`` on the page and in the push.
    """
    words = [word for word in _NOT_METRIC.split(name) if word]
    words += _unit_suffixes(unit, words)
    if kind is Kind.COUNTER:
        words = [word for word in words if word != "total"] + ["total"]
    if kind is Kind.GAUGE and unit == "1":
        words = [word for word in words if word != "ratio"] + ["ratio"]
    joined = "_".join(words)
    return f"_{joined}" if joined[:1].isdigit() else joined or UNNAMED


def prometheus_label(name: str) -> str:
    """Translate an attribute's name to a Prometheus label as its OTLP endpoint does: ``a.b`` becomes ``a_b``.

    Names that the endpoint refuses (only underscores) or drops (``__name__``, which on a page would rename the series) get the
    prefix ``key`` that it adds to names with a single leading underscore.
    """
    label = _NOT_LABEL.sub("_", name)
    if label[:1].isdigit():
        return f"key_{label}"
    reserved = not label.strip("_") or label == "__name__" or (label.startswith("_") and not label.startswith("__"))
    return f"key{label}" if reserved else label


def _unit_suffixes(unit: str, words: list[str]) -> list[str]:
    """Return the words that a unit adds to a name: ``bytes``, ``per_second`` for ``By/s``, unless it has them already."""
    amount, _, per = unit.partition("/")
    # An odd unit keeps one underscore at its end (`m²` is `m_`), unless a `per` follows: the translator does so too.
    main = _NOT_METRIC.sub("_", _unit_word(amount, _UNITS)).removeprefix("_")
    rate = _NOT_METRIC.sub("_", _unit_word(per, _PER_UNITS)).strip("_")
    suffixes = [suffix for suffix in (main, f"per_{rate}" if rate else "") if suffix and suffix not in words]
    return [suffixes[0].removesuffix("_"), suffixes[1]] if len(suffixes) > 1 else suffixes


def _unit_word(unit: str, words: dict[str, str]) -> str:
    unit = unit.strip()
    return "" if "{" in unit or "}" in unit else words.get(unit, unit)


# Declarations below: what a program needs to know comes first, then the sentence for people.
def _counter(name: str, unit: str, *attributes: Attribute, quiet: float | None = None, shared: bool = False) -> Metric:
    integer = unit not in {"s", "J"}  # times and energy are measured, everything else is counted
    return Metric(name, Kind.COUNTER, unit, "", attributes, integer=integer, quiet=quiet, shared=shared)


def _gauge(
    name: str, unit: str, *attributes: Attribute, survives: bool = False, quiet: float | None = None, shared: bool = False
) -> Metric:
    return Metric(name, Kind.GAUGE, unit, "", attributes, survives=survives, quiet=quiet, shared=shared)


def _updown(name: str, unit: str, *attributes: Attribute) -> Metric:
    return Metric(name, Kind.UPDOWN, unit, "", attributes)


def _histogram(name: str, unit: str, bounds: tuple[float, ...]) -> Metric:
    return Metric(name, Kind.HISTOGRAM, unit, "", bounds=bounds)


def _info(name: str, brief: str, *attributes: Attribute) -> Event:
    return Event(name, brief, Severity.INFO, attributes)


def _warning(name: str, brief: str, *attributes: Attribute) -> Event:
    return Event(name, brief, Severity.WARNING, attributes)


def _error(name: str, brief: str, *attributes: Attribute) -> Event:
    return Event(name, brief, Severity.ERROR, attributes)


def _span(name: str, brief: str, *attributes: Attribute) -> Span:
    return Span(name, brief, attributes)


# --- attributes ---------------------------------------------------------------------------------------------------------------
PHASES = ("data", "forward", "backward", "optimizer", "other")
GOODPUT_STATES = ("productive", "data", "skipped", "evaluation", "checkpoint", "compile", "idle")
STARTUP = "startup"
"""The goodput state before the first step; the only one that is not computed from step records."""
ANOMALY_KINDS = (
    "nonfinite_loss", "nonfinite_gradient", "gradient_explosion", "loss_spike", "gradient_vanishing", "diverged",
)  # fmt: skip
SCHEDULER_MISUSES = ("before_optimizer", "never_stepped", "idle_optimizer")
COMPILE_STAGES = ("dynamo", "aot", "inductor", "kernels")
COMPILE_GUARDS = ("shape", "tensor", "global_state", "type", "value", "other")
RANK_STATES = ("alive", "unresponsive", "hung", "finished", "failed", "lost")
SAVE_RESULTS = ("saved", "failed")
EXIT_REASONS = ("finished", "exception", "exit_code", "interrupted", "terminated", "crashed", "lost", "out_of_memory")

ANOMALY_SEVERITY = dict.fromkeys(ANOMALY_KINDS, Severity.WARNING) | {"nonfinite_loss": Severity.ERROR}
"""Severity by kind, so no label. A non-finite gradient is only a warning, because a loss scaler may have caused it."""

PHASE = Attribute("phase", "part of a training step", PHASES)
OWN_PHASES = ("data", "forward", "optimizer", "other")
OWN_PHASE = Attribute("phase", "part of a step, without backward, in which a rank may wait for the slowest one", OWN_PHASES)
STALL_PHASES = (*PHASES, "evaluation", "checkpoint", "compile", "idle")
STALL_PHASE = Attribute("phase", "what the rank does while a rank of its run hangs", STALL_PHASES)
GOODPUT_STATE = Attribute("state", "use of the wall time", (*GOODPUT_STATES, STARTUP))
ANOMALY_KIND = Attribute("kind", "kind of anomaly", ANOMALY_KINDS)
ORIGIN = Attribute(
    "origin",
    "where a value that is not finite was born",
    ("input", "parameter", "operator", "backward", "overflow", "unknown"),
)
RANK_STATE = Attribute("state", "the rank's state; one is 1, the others 0", RANK_STATES)
EXIT_REASON = Attribute("reason", "how the rank ended", EXIT_REASONS)
GPU_ID = Attribute("hw.id", "UUID of the GPU")
HW_TYPE = Attribute("hw.type", "kind of component", ("gpu",))
HW_STATE = Attribute("hw.state", "one is 1, the others 0", ("ok", "degraded", "failed"))
XID_ERRORS = ("xid_application", "xid_driver", "xid_hardware")
HW_ERROR = Attribute(
    "error.type",
    "what failed; an XID by whose fault it most likely is, as NVIDIA's catalog has it",
    ("ecc_corrected", "ecc_uncorrected", *XID_ERRORS, "nvlink", "pcie_replay"),
)
HW_SENSOR = Attribute("hw.sensor_location", "where it is measured", ("gpu", "memory"))
GPU_TASK = Attribute("hw.gpu.task", "kind of work", ("general",))
GPU_THROTTLE = Attribute("reason", "cause of the throttling", ("power", "thermal"))
IO_DIRECTION = Attribute("network.io.direction", "seen from the GPU", ("receive", "transmit"))
DDP_PART = Attribute(
    "part",
    "forward, backward (to the last gradient), communication (from the first all-reduce to the last), and how much of that"
    " computation hid",
    ("forward", "backward", "communication", "overlap"),
)
GROUP = Attribute("group", "index of the optimizer's parameter group, the first eight")
COLLECTIVE_OPERATIONS = (
    "none", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all", "barrier",
    "send", "recv", "coalesced", "other",
)  # fmt: skip
COLLECTIVE_TIMEOUTS = ("collective", "monitored_barrier", "rendezvous")
PROCESS_GROUP = Attribute("group", "process group: default, or its description and name in torch, the first eight")
PROCESS_GROUP_BACKEND = Attribute("backend", "the backend whose recorder counts it", ("gloo", "nccl", "other"))
COLLECTIVE_OPERATION = Attribute("operation", "what waits longest; none: nothing does", COLLECTIVE_OPERATIONS)
SCHEDULER_MISUSE_KIND = Attribute("kind", "kind of misuse", SCHEDULER_MISUSES)
SCALER = Attribute("scaler", "index of the GradScaler in use, by its first update", ("0", "1", "2", "3"))
OPTIMIZER = Attribute("optimizer", "index of the optimizer in use, by its first step under a loss scaler", ("0", "1", "2", "3"))
SCALAR = Attribute("name", "the name given to torchobs.log(), the first 64")
LAYER = Attribute(
    "layer", "path of the module with the parameters; the largest and recently anomalous ones, the others are 'other'"
)
OUTPUT_LAYER = Attribute("layer", "path of the module without children; at most 64, evenly chosen in the model's order")
DEVICE = Attribute("device", "torch device, e.g. cuda:0")
SPACE = Attribute("space", "kind of memory that grows", ("host", "device"))
LIMIT = Attribute("limit", "origin of the limit", ("cgroup", "machine"))
RESOURCE = Attribute("resource", "what tasks waited for", ("cpu", "memory", "io"))
WAITING = Attribute("waiting", "some, or all (full), of the tasks", ("some", "full"))
COMPILE_STAGE = Attribute("stage", "stage of the compilation", COMPILE_STAGES)
COMPILE_CAUSE = Attribute("cause", "why it was compiled", ("first", "recompile"))
COMPILE_GUARD = Attribute("guard", "kind of the guard that failed", COMPILE_GUARDS)
COMPILE_FAILURE = Attribute("reason", "why nothing was compiled", ("unsupported", "recompile_limit", "error"))
COMPILE_BREAK = Attribute("reason", "kind of reason", ("data_dependent", "call", "other"))
COMPILE_LOCATION = Attribute("location", "file:line of the function's first line")
COMPILE_CACHE = Attribute("cache", "Inductor's cache of graphs, or AOTAutograd's above it", ("fx_graph", "autograd"))
CACHE_RESULT = Attribute("result", "outcome of the lookup", ("hit", "miss", "bypass"))
SAVE_RESULT = Attribute("result", "how the save ended", SAVE_RESULTS)
WORKER_STATE = Attribute("state", "configured, or alive among these", ("configured", "alive"))
PROBE = Attribute("probe", "the probe's name")

HOST_COLLECTORS = ("cpu", "memory", "disk", "filesystem", "network")
CPU_MODES = ("user", "nice", "system", "idle", "iowait", "interrupt", "steal")
THREAD_STATES = ("runnable", "blocked")
HOST_COLLECTOR = Attribute("collector", "part of the machine", HOST_COLLECTORS)
CPU_MODE = Attribute("cpu.mode", "mode of the processors", CPU_MODES)
THREAD_STATE = Attribute("state", "runnable: running or waiting for a processor; blocked: for a disk", THREAD_STATES)
MEMORY_STATE = Attribute(
    "system.memory.state", "use of the memory; the states add up to the total", ("used", "free", "buffers", "cached")
)
UNWRITTEN_STATE = Attribute("state", "dirty: to be written; writeback: being written", ("dirty", "writeback"))
PAGING_STATE = Attribute("system.paging.state", "whether it is in use", ("used", "free"))
SYSTEM_DEVICE = Attribute("system.device", "physical disk, e.g. nvme0n1; 64 at most")
DISK_DIRECTION = Attribute("disk.io.direction", "read or write", ("read", "write"))
MOUNTPOINT = Attribute("system.filesystem.mountpoint", "where it is mounted")
FILESYSTEM_TYPE = Attribute("system.filesystem.type", "its type, e.g. xfs")
FILESYSTEM_STATE = Attribute("system.filesystem.state", "reserved: free, for root only", ("used", "free", "reserved"))
INODE_STATE = Attribute("state", "whether the inode is in use", ("used", "free"))
NETWORK_INTERFACE = Attribute("network.interface.name", "physical interface, or a container's own, e.g. eth0; 64 at most")
NETWORK_DIRECTION = Attribute("network.io.direction", "seen from this machine", ("receive", "transmit"))

# --- progress -----------------------------------------------------------------------------------------------------------------
STEPS = _counter("torchobs.steps", "{step}").described("Training steps completed, including those that a loss scaler skipped.")
STEP_DURATION = _histogram("torchobs.step.duration", "s", SECONDS_BOUNDS).described(
    "Time from the end of one step to the end of the next, without evaluation, checkpoints and compilation."
)
STEP_PHASE_TIME = _counter("torchobs.step.phase.time", "s", PHASE).described("Time spent in each phase of the steps.")
STEP_DEVICE_TIME = _gauge("torchobs.step.device.time", "s", PHASE).described(
    "Time that the CUDA device was in each phase of a step, idle or not, of one step a second."
)
LAST_STEP_TIMESTAMP = _gauge("torchobs.last_step.timestamp", "s", survives=True).described(
    "Unix time at which the last step ended."
)
MODEL_CHANGES = _counter("torchobs.model_changes", "{change}", quiet=0.0).described(
    "Times that training continued with parameters never trained before (the next fold or trial); baselines are reset then."
)
LOSS = _gauge("torchobs.loss", "", survives=True).described(
    "Loss of the last step: the sum over its backward passes, or the value given to torchobs.log(). Finite values only."
)
LEARNING_RATE = _gauge("torchobs.learning_rate", "", GROUP, survives=True).described("Learning rate of each parameter group.")
OPTIMIZER_WEIGHT_DECAY = _gauge("torchobs.optimizer.weight_decay", "", GROUP, survives=True).described(
    "Weight decay of the first parameter group, and of the next three where it differs."
)
OPTIMIZER_MOMENTUM = _gauge("torchobs.optimizer.momentum", "", GROUP, survives=True).described(
    "Momentum, or Adam's beta1, of the first parameter group, and of the next three where it differs."
)
OPTIMIZER_BETA2 = _gauge("torchobs.optimizer.beta2", "", GROUP, survives=True).described(
    "Adam's beta2, or RMSprop's alpha, of the first parameter group, and of the next three where it differs."
)
SCHEDULER_STEPS = _counter("torchobs.scheduler.steps", "{step}").described(
    "Steps of learning-rate schedulers; a chain of schedulers counts once."
)
SCHEDULER_MISUSE = _counter("torchobs.scheduler.misuses", "{scheduler}", SCHEDULER_MISUSE_KIND, quiet=0.0).described(
    "Learning-rate schedulers used wrongly, by kind of misuse."
)
SAMPLES = _counter("torchobs.samples", "{sample}", quiet=0.0).described(
    "Samples trained on: those given to torchobs.log(); before the first, inferred: for each batch fetched for training, the "
    "leading dimension of the loader's batch that was last looked at (one in ten seconds, and the first of each iteration)."
)
TOKENS = _counter("torchobs.tokens", "{token}", quiet=0.0).described(
    "Tokens trained on, inferred likewise before the first are given to torchobs.log(): the elements of the batch's "
    "two-dimensional integer ids, padding included."
)
MODEL_FLOPS = _gauge("torchobs.model.flops", "{operation}").described(
    "Floating-point operations of a training step on this rank, forward and backward: those given to torchobs.log(flops=...), "
    "else 6 for each token and trained parameter and 4 for each frozen one, without embeddings that are only looked up. "
    "Attention scores, recomputation and the optimizer are left out. Absent where no tokens are known."
)
MFU = _gauge("torchobs.mfu", "1").described(
    "Model FLOPs utilization: these operations per second of step time, over the dense peak of the rank's devices for the data "
    "type in use. Absent where the device is not in the table of peaks."
)
STEPS_PLANNED = _gauge("torchobs.steps.planned", "{step}", survives=True).described(
    "Planned number of steps of the run, if known."
)
STEPS_RESUMED_FROM = _gauge("torchobs.steps.resumed_from", "{step}").described(
    "Steps of the run before this process: given to `torchobs.log(resumed_from=...)`, or as the optimizer's state counts them "
    "before its first step; 0 for one that begins anew. Absent if neither says it, as with SGD."
)
EPOCHS = _counter("torchobs.epochs", "{epoch}").described("Passes over the training loader begun on this rank since its start.")
GOODPUT_TIME = _counter("torchobs.goodput.time", "s", GOODPUT_STATE, quiet=0.0).described(
    "Wall time by use; the states add up to the rank's lifetime. productive: training without waiting for data; startup: "
    "before the first step; idle: after the last one, or when no part of a step was seen for three times the longest step "
    "(at least 10 s)."
)
SCALAR_VALUE = _gauge("torchobs.scalar", "", SCALAR, survives=True).described(
    "Last value of each extra number given to torchobs.log()."
)

# --- gradients ----------------------------------------------------------------------------------------------------------------
GRAD_NORM = _gauge("torchobs.grad.norm", "", survives=True).described(
    "L2 norm of all gradients before the optimizer's step, unscaled and before clipping (after it, where compiled code clips)."
    " Finite values only."
)
GRAD_NORM_DISTRIBUTION = _histogram("torchobs.grad.norm_distribution", "", NORM_BOUNDS).described(
    "Distribution of the total gradient norm over the measured steps."
)
GRAD_INTERVAL = _gauge("torchobs.grad.interval", "{step}").described(
    "Steps from one measurement of the gradient norm to the next, at present."
)
GRAD_NORM_RANKS = _gauge("torchobs.grad.norm_ranks", "{rank}", survives=True, quiet=1.0).described(
    "Ranks over which the gradient is sharded: their squared norms add up to the whole's. 1 where each rank has all of it, or"
    " the whole's norm, as where sharded gradients are clipped by norm."
)
GRAD_LAYER_NORM = _gauge("torchobs.grad.layer.norm", "", LAYER).described(
    "L2 norm of a layer's gradient, of this rank's shard where parameters are sharded."
)
GRAD_LAYER_GROWTH = _gauge("torchobs.grad.layer.growth", "1", LAYER, survives=True).described(
    "How many times its usual norm the gradient of the layer was that had grown most in an explosion or a spike of the last ten"
    " minutes; absent for all other layers. At most 8 layers of a rank."
)
GRAD_LAYERS_FOLDED = _gauge("torchobs.grad.layers_folded", "{layer}", quiet=0.0).described(
    "Layers without series of their own, combined as 'other'."
)
GRAD_UNMOVED_LAYERS = _gauge("torchobs.grad.unmoved_layers", "{layer}", survives=True, quiet=0.0).described(
    "Layers that have learned nothing for a while: gradients too small to change a weight, none, or inputs that are all zero."
)
GRAD_ZERO = _gauge("torchobs.grad.zero", "1", quiet=0.0).described(
    "Share of the parameters whose gradient is exactly zero in every element."
)
PARAM_LAYER_NORM = _gauge("torchobs.param.layer.norm", "", LAYER).described(
    "L2 norm of a layer's weights (of the first 8 million). From level advanced on."
)
UPDATE_LAYER_RATIO = _gauge("torchobs.update.layer.ratio", "1", LAYER).described(
    "Norm of one step's change of a layer's weights, divided by the norm of the weights. From level advanced on."
)
ACTIVATION_LAYER_MEAN_ABS = _gauge("torchobs.activation.layer.mean_abs", "", OUTPUT_LAYER).described(
    "Mean absolute value of a layer's output. At level extreme."
)
ACTIVATION_LAYER_STD = _gauge("torchobs.activation.layer.std", "", OUTPUT_LAYER).described(
    "Standard deviation of a layer's output. At level extreme."
)
ACTIVATION_LAYER_MAX = _gauge("torchobs.activation.layer.max", "", OUTPUT_LAYER).described(
    "Greatest absolute value of a layer's output. At level extreme."
)
ACTIVATION_LAYER_ZERO = _gauge("torchobs.activation.layer.zero", "1", OUTPUT_LAYER, quiet=0.0).described(
    "Share of a layer's output that is exactly zero. At level extreme."
)
ACTIVATION_LAYER_NONFINITE = _gauge("torchobs.activation.layer.nonfinite", "1", OUTPUT_LAYER, quiet=0.0).described(
    "Share of a layer's output that is NaN or infinite. At level extreme."
)
GRAD_NONFINITE_ELEMENTS = _counter("torchobs.grad.nonfinite_elements", "{element}", quiet=0.0).described(
    "Gradient elements that were NaN or infinite in measured steps; on a GPU only in layers that recently had some."
)
GRAD_NONFINITE_STEPS = _counter("torchobs.grad.nonfinite_steps", "{step}").described(
    "Measured steps whose gradient norm was NaN or infinite."
)
GRAD_CLIPPED_STEPS = _counter("torchobs.grad.clipped_steps", "{step}", quiet=0.0).described(
    "Steps with clipped gradients. The effect of clipping by value is known in measured steps only; clipping in compiled code,"
    " by FSDP1's own method or to a limit on a device is not seen."
)
GRAD_CLIP_MAX_NORM = _gauge("torchobs.grad.clip.max_norm", "").described("Threshold for clipping gradients by norm, if used.")
GRAD_CLIP_MAX_VALUE = _gauge("torchobs.grad.clip.max_value", "").described(
    "Threshold for clipping gradients by value, if used."
)

# --- verdicts -----------------------------------------------------------------------------------------------------------------
ANOMALIES = _counter("torchobs.anomalies", "{anomaly}", ANOMALY_KIND).described(
    "Steps judged anomalous, by kind; a loss that has diverged counts once."
)
ANOMALY_ACTIVE = _gauge("torchobs.anomaly.active", "", ANOMALY_KIND, quiet=0.0).described(
    "1 while the last measured step was anomalous in this way; of kind `diverged` until the loss comes back."
)

# --- automatic mixed precision ------------------------------------------------------------------------------------------------
AMP_SCALE = _gauge("torchobs.amp.scale", "", SCALER).described(
    "Loss scale of each enabled GradScaler; read from a device at most ten times a second."
)
AMP_GROWTH_TRACKER = _gauge("torchobs.amp.growth_tracker", "{step}", SCALER).described(
    "Steps without overflow since the loss scale last changed."
)
AMP_SKIP_STREAK = _gauge("torchobs.amp.skip_streak", "{step}").described(
    "Steps that a loss scaler has skipped in a row up to now; of several optimizers, the longest streak."
)
AMP_STEPS_SKIPPED = _counter("torchobs.amp.steps_skipped", "{step}", quiet=0.0).described(
    "Steps that the loss scaler skipped because of non-finite gradients."
)
AMP_OVERFLOWS = _counter("torchobs.amp.overflows", "{step}", OPTIMIZER, quiet=0.0).described(
    "Steps of each optimizer under a loss scaler that found non-finite gradients."
)
AMP_AUTOCAST = _gauge(
    "torchobs.amp.autocast",
    "",
    Attribute("device_type", "torch.autocast's device type, e.g. cuda"),
    Attribute("dtype", "data type, e.g. bfloat16; eight pairs at most"),
).described("1 for each data type that autocast uses. With bfloat16 alone there is no loss scaler, and no scale.")

# --- data ---------------------------------------------------------------------------------------------------------------------
DATA_WORKER_START_TIME = _counter("torchobs.data.worker_start.time", "s", quiet=0.0).described(
    "Time spent starting the worker processes of data loaders; part of the phase data."
)
DATA_WORKERS = _gauge("torchobs.data.workers", "{process}", WORKER_STATE).described(
    "Worker processes of the data loaders being iterated."
)
DATA_WORKERS_DIED = _counter("torchobs.data.workers_died", "{process}", quiet=0.0).described(
    "Worker processes of data loaders that were ended by a signal or an error."
)
DATA_BATCHES_READY = _gauge("torchobs.data.batches_ready", "{batch}").described(
    "Batches that the workers have finished and training has not used yet; 0 means that training waits for data."
)
DATA_STARVED = _gauge("torchobs.data.starved", "", quiet=0.0).described(
    "1 while training waits for data for a fifth of its time or more, judged over a minute and ten steps."
)

# --- compilation --------------------------------------------------------------------------------------------------------------
COMPILE_TIME = _counter("torchobs.compile.time", "s", COMPILE_STAGE, quiet=0.0).described(
    "Time that torch.compile kept the rank's threads busy; the stages add up. dynamo: tracing and guards; aot: AOTAutograd, or "
    "another backend; inductor: lowering and code generation; kernels: compilers, autotuning and recording of CUDA graphs."
)
COMPILE_COMPILATIONS = _counter("torchobs.compile.compilations", "{compilation}", COMPILE_CAUSE, quiet=0.0).described(
    "Compilations of functions, and of their parts after graph breaks."
)
COMPILE_RECOMPILES = _counter("torchobs.compile.recompiles", "{compilation}", COMPILE_GUARD, quiet=0.0).described(
    "Recompilations by the kind of the guard that failed."
)
COMPILE_FAILURES = _counter("torchobs.compile.failures", "{compilation}", COMPILE_FAILURE, quiet=0.0).described(
    "Failed compilations: the function runs uncompiled, or raises (fullgraph=True)."
)
COMPILE_GRAPH_BREAKS = _counter("torchobs.compile.graph_breaks", "{break}", COMPILE_BREAK, quiet=0.0).described(
    "Graph breaks, counted in each compilation that has them."
)
COMPILE_CACHE_LOOKUPS = _counter(
    "torchobs.compile.cache.lookups", "{lookup}", COMPILE_CACHE, CACHE_RESULT, quiet=0.0
).described("Lookups in the caches of compiled code: a warm start hits.")
COMPILE_IN_PROGRESS = _gauge("torchobs.compile.in_progress", "").described("1 while torch.compile is compiling in any thread.")

# --- memory -------------------------------------------------------------------------------------------------------------------
MEMORY_DEVICE_ALLOCATED = _gauge("torchobs.memory.device.allocated", "By", DEVICE).described("Device memory in use by tensors.")
MEMORY_DEVICE_RESERVED = _gauge("torchobs.memory.device.reserved", "By", DEVICE).described(
    "Device memory held by the caching allocator."
)
MEMORY_DEVICE_ACTIVE = _gauge("torchobs.memory.device.active", "By", DEVICE).described(
    "Device memory in blocks that are in use, or that a stream may still use."
)
MEMORY_DEVICE_INACTIVE_SPLIT = _gauge("torchobs.memory.device.inactive_split", "By", DEVICE).described(
    "Device memory in inactive split blocks: fragmentation."
)
MEMORY_DEVICE_PEAK = _gauge("torchobs.memory.device.peak", "By", DEVICE).described(
    "Highest allocated device memory seen by torchobs, regardless of resets of the allocator's own peaks."
)
MEMORY_DEVICE_LIMIT = _gauge("torchobs.memory.device.limit", "By", DEVICE).described(
    "Device memory that this process may use: all of the device's, or its configured fraction."
)
MEMORY_ALLOC_RETRIES = _counter("torchobs.memory.alloc_retries", "{retry}", DEVICE, quiet=0.0).described(
    "Device allocations retried after flushing the allocator's cache."
)
MEMORY_OOMS = _counter("torchobs.memory.ooms", "{error}", DEVICE, quiet=0.0).described(
    "Out-of-memory errors of the device allocator."
)
MEMORY_HOST_RSS = _gauge("torchobs.memory.host.rss", "By").described("Resident set size of the rank's process.")
MEMORY_HOST_PSS = _gauge("torchobs.memory.host.pss", "By").described(
    "Proportional set size of the rank's process. From level advanced on."
)
MEMORY_HOST_CHILDREN_RSS = _gauge("torchobs.memory.host.children_rss", "By", quiet=0.0).described(
    "Sum of the resident set sizes of the process's children (DataLoader workers); shared pages count in each."
)
MEMORY_HOST_AVAILABLE = _gauge("torchobs.memory.host.available", "By", shared=True).described("The machine's available memory.")
MEMORY_HOST_UTILIZATION = _gauge("torchobs.memory.host.utilization", "1", LIMIT, shared=True).described(
    "Share of the limit, including swap, in use and not reclaimable; at 1 the kernel kills processes."
)
MEMORY_SHARED_SIZE = _gauge("torchobs.memory.shared.size", "By", shared=True).described("Size of /dev/shm.")
MEMORY_SHARED_USED = _gauge("torchobs.memory.shared.used", "By", shared=True).described("Bytes in use in /dev/shm.")
MEMORY_GROWTH_PER_STEP = _gauge("torchobs.memory.growth_per_step", "By", SPACE).described(
    "Trend of the memory in use, per step; available after four minutes."
)
MEMORY_TIME_TO_LIMIT = _gauge("torchobs.memory.time_to_limit", "s", SPACE).described(
    "Time until memory that grows steadily with the steps reaches its limit; absent without such growth."
)

# --- the container ------------------------------------------------------------------------------------------------------------
CGROUP_MEMORY_WORKING_SET = _gauge("torchobs.cgroup.memory.working_set", "By", shared=True).described(
    "Memory of the rank's cgroup without inactive file pages, as the kubelet counts it; of the tightest, where nested."
)
CGROUP_MEMORY_LIMIT = _gauge("torchobs.cgroup.memory.limit", "By", shared=True).described("Memory limit of that cgroup.")
CGROUP_MEMORY_PEAK = _gauge("torchobs.cgroup.memory.peak", "By", shared=True).described(
    "Highest memory usage of that cgroup, file pages included."
)
CGROUP_MEMORY_SWAP = _gauge("torchobs.cgroup.memory.swap", "By", shared=True).described("Swap in use by that cgroup.")
CGROUP_MEMORY_OOM_KILLS = _counter("torchobs.cgroup.memory.oom_kills", "{process}", shared=True).described(
    "Processes of that cgroup ended by the kernel's OOM killer."
)
CGROUP_MEMORY_LAST_OOM_KILL = _gauge(
    "torchobs.cgroup.memory.last_oom_kill.timestamp", "s", survives=True, shared=True
).described("Unix time at which the last such kill was seen.")
CGROUP_CPU_LIMIT = _gauge("torchobs.cgroup.cpu.limit", "{cpu}", shared=True).described(
    "CPU quota of the rank's cgroup, in cores."
)
CGROUP_CPU_PERIODS = _counter("torchobs.cgroup.cpu.periods", "{period}", shared=True).described(
    "Quota periods in which the cgroup ran."
)
CGROUP_CPU_THROTTLED_PERIODS = _counter("torchobs.cgroup.cpu.throttled_periods", "{period}", shared=True).described(
    "Quota periods in which the cgroup was throttled."
)
CGROUP_CPU_THROTTLED_TIME = _counter("torchobs.cgroup.cpu.throttled_time", "s", shared=True).described(
    "Time for which the cgroup's threads were throttled, summed."
)
CGROUP_PRESSURE_TIME = _counter("torchobs.cgroup.pressure.time", "s", RESOURCE, WAITING, shared=True).described(
    "Time in which some, or all, of the cgroup's tasks waited for a resource."
)

# --- checkpoints --------------------------------------------------------------------------------------------------------------
CHECKPOINTS = _counter("torchobs.checkpoints", "{checkpoint}", SAVE_RESULT, quiet=0.0).described(
    "Checkpoints by torch.save, safetensors and torch.distributed.checkpoint. All saves between two steps are one; saves to "
    "memory count from 64 KiB on; each save that raised is a failed one. Not seen: `from torch import save` before `init()`."
)
CHECKPOINT_FAILURE_STREAK = _gauge("torchobs.checkpoint.failure_streak", "{checkpoint}", survives=True, quiet=0.0).described(
    "Saves that raised since the last one that succeeded."
)
CHECKPOINT_TIMESTAMP = _gauge("torchobs.checkpoint.timestamp", "s", survives=True).described(
    "Unix time at which the last checkpoint was complete."
)
CHECKPOINT_DURATION = _gauge("torchobs.checkpoint.duration", "s", survives=True).described(
    "Duration of the last checkpoint until it was complete; the time that training waited is the goodput state checkpoint."
)
CHECKPOINT_SIZE = _gauge("torchobs.checkpoint.size", "By", survives=True).described(
    "Bytes that this rank wrote for the last checkpoint."
)

# --- distributed training -----------------------------------------------------------------------------------------------------
DISTRIBUTED_WORLD_SIZE = _gauge("torchobs.distributed.world_size", "{rank}").described("Ranks in the default process group.")
DISTRIBUTED_COPIES = _gauge("torchobs.distributed.copies", "{rank}", quiet=1.0).described(
    "Ranks that are given the same batch, where the mesh is known: the product of its tensor-, pipeline- and context-parallel "
    "dimensions."
)
DISTRIBUTED_COORDINATES = _gauge(
    "torchobs.distributed.coordinates",
    "",
    Attribute("dp", "index in data parallelism; shards count first where it is replicated, too"),
    Attribute("tp", "index in tensor parallelism"),
    Attribute("pp", "pipeline stage"),
    Attribute("cp", "index in context parallelism"),
    Attribute("ep", "index in expert parallelism"),
    survives=True,
).described(
    "Constant 1; its labels are the rank's place, from 0, on each known axis of parallelism: by the names of device-mesh"
    " dimensions, or by Megatron's or DeepSpeed's parallel state. A join on rank and instance groups other series by them."
)
DISTRIBUTED_INFO = _gauge(
    "torchobs.distributed.info",
    "",
    Attribute("backend", "of the default process group, e.g. nccl"),
    Attribute("parallelism", "recognised kinds: ddp, fsdp1, fsdp2, hsdp, tensor; joined by +"),
    Attribute("mesh", "dimensions of the device mesh, e.g. dp=4,tp=2"),
    survives=True,
).described("Constant 1; its labels say how the training is spread over ranks.")
DDP_TIME = _gauge("torchobs.ddp.time", "s", DDP_PART).described(
    "Time in the iteration that DistributedDataParallel timed last: each of its first ten, then one in a hundred."
)
DDP_BUCKETS = _gauge("torchobs.ddp.buckets", "{bucket}").described("Gradient buckets; each is one all-reduce.")
DDP_BUCKET_SIZE = _gauge("torchobs.ddp.bucket.size", "By").described("Size of the largest gradient bucket.")
DDP_UNUSED_SIZE = _gauge("torchobs.ddp.unused.size", "By").described(
    "Size of the parameters unused in the iteration timed last, with find_unused_parameters."
)
DDP_INFO = _gauge(
    "torchobs.ddp.info",
    "",
    Attribute("find_unused_parameters", "whether it searches for unused parameters in every iteration", ("true", "false")),
    Attribute("static_graph", "whether the graph was declared static", ("true", "false")),
    Attribute("gradient_as_bucket_view", "whether gradients live in the buckets", ("true", "false")),
    Attribute("comm_hook", "the communication hook's name, if there is one"),
    survives=True,
).described("Constant 1; its labels are the settings of DistributedDataParallel.")
COLLECTIVE_ENQUEUED = _gauge("torchobs.collective.enqueued", "", PROCESS_GROUP_BACKEND, PROCESS_GROUP, survives=True).described(
    "Sequence number of the last collective that this rank has called in a process group of several, as the group counts it:"
    " the same on all its ranks, but for those in flight. In a hang the lowest is that of the rank that did not come."
)
COLLECTIVE_COMPLETED = _gauge("torchobs.collective.completed", "", PROCESS_GROUP_BACKEND, PROCESS_GROUP).described(
    "Sequence number of the last collective of a process group that has come back on this rank. Absent while training moves."
)
COLLECTIVE_PENDING_AGE = _gauge(
    "torchobs.collective.pending.age", "s", PROCESS_GROUP_BACKEND, PROCESS_GROUP, COLLECTIVE_OPERATION
).described(
    "Time since this rank called its oldest collective that has not come back, where neither a step nor a collective has ended"
    " for ten seconds; 0: nothing waits here. Absent while training moves."
)
COLLECTIVE_PENDING_SIZE = _gauge(
    "torchobs.collective.pending.size", "By", PROCESS_GROUP_BACKEND, PROCESS_GROUP, COLLECTIVE_OPERATION
).described("Size of that collective's input on this rank.")
COLLECTIVE_INPUT = _counter(
    "torchobs.collective.input", "By", Attribute("operation", "which collective", COLLECTIVE_OPERATIONS[1:])
).described(
    "Size of what this rank gave to collectives, of those that torch's flight recorder still holds every ten seconds: the last"
    " 2,000 by default. From level advanced on."
)
COLLECTIVE_SIZE = _histogram("torchobs.collective.size", "By", SIZE_BOUNDS).described(
    "Size of the input of each of these collectives. From level advanced on."
)
COLLECTIVE_DURATION = _histogram("torchobs.collective.duration", "s", COLLECTIVE_SECONDS_BOUNDS).described(
    "Duration of each of these collectives on the device, where it is recorded: by NCCL with TORCH_NCCL_ENABLE_TIMING=1. From"
    " level advanced on."
)

# --- hardware: OpenTelemetry's names, and what they lack as torchobs.gpu.* ----------------------------------------------------
HW_GPU_UTILIZATION = _gauge("hw.gpu.utilization", "1", GPU_ID, GPU_TASK).described(
    "Share of recent time in which a kernel ran, averaged by the driver."
)
GPU_MEMORY_BUSY = _gauge("torchobs.gpu.memory.busy", "1", GPU_ID).described(
    "Share of recent time in which the GPU's memory was read or written."
)
HW_GPU_MEMORY_USAGE = _updown("hw.gpu.memory.usage", "By", GPU_ID).described("GPU memory in use by all processes.")
HW_GPU_MEMORY_LIMIT = _updown("hw.gpu.memory.limit", "By", GPU_ID).described("Total GPU memory.")
HW_POWER = _gauge("hw.power", "W", GPU_ID, HW_TYPE).described("Power drawn at present.")
HW_ENERGY = _counter("hw.energy", "J", GPU_ID, HW_TYPE).described("Energy used since the rank began to observe the GPU.")
GPU_POWER_LIMIT = _gauge("torchobs.gpu.power.limit", "W", GPU_ID).described("Power that the GPU may draw.")
HW_TEMPERATURE = _gauge("hw.temperature", "Cel", GPU_ID, HW_SENSOR).described("Temperature.")
GPU_CLOCK_FREQUENCY = _gauge("torchobs.gpu.clock.frequency", "Hz", GPU_ID).described("Clock of the streaming multiprocessors.")
GPU_CLOCK_LIMIT = _gauge("torchobs.gpu.clock.limit", "Hz", GPU_ID).described("Highest clock that the multiprocessors can have.")
GPU_THROTTLE_TIME = _counter("torchobs.gpu.throttle.time", "s", GPU_ID, GPU_THROTTLE, quiet=0.0).described(
    "Time in which the clocks were throttled, as counted by the driver, else from a sample every ten seconds."
)
HW_ERRORS = _counter("hw.errors", "{error}", GPU_ID, HW_TYPE, HW_ERROR, quiet=0.0).described(
    "Errors of the GPU since the rank began to observe it."
)
GPU_NVLINK_IO = _counter("torchobs.gpu.nvlink.io", "By", GPU_ID, IO_DIRECTION).described(
    "Payload sent and received over NVLink."
)
GPU_NVLINK_LINKS = _gauge("torchobs.gpu.nvlink.links", "{link}", GPU_ID).described("NVLinks that are up.")
HW_STATUS = _updown("hw.status", "1", GPU_ID, HW_TYPE, HW_STATE).described(
    "State of the GPU. failed: lost, or a memory row cannot be remapped; degraded: it needs a reset, or had an uncorrectable"
    " ECC error."
)
RANK_GPU_INFO = _gauge(
    "torchobs.rank.gpu.info",
    "",
    GPU_ID,
    Attribute("UUID", "the same, as dcgm-exporter labels it"),
    DEVICE,
    Attribute("hw.model", "product name"),
    survives=True,
).described("Constant 1 for each GPU on which the rank holds memory; the label UUID is dcgm-exporter's.")

# --- ranks, as the exporter sees them -----------------------------------------------------------------------------------------
RANK_STATE_SET = _gauge("torchobs.rank.state", "", RANK_STATE, survives=True).described("1 for the state that the rank is in.")
RANK_UP = _gauge("torchobs.rank.up", "", survives=True).described("1 while the rank's process lives.")
RANK_HEARTBEAT_TIMESTAMP = _gauge("torchobs.rank.heartbeat.timestamp", "s", survives=True).described(
    "Unix time of the rank's last heartbeat."
)
RANK_PROGRESS_AGE = _gauge("torchobs.rank.progress.age", "s").described(
    "Time since the rank last finished a step (since its start, before the first)."
)
RANK_START_TIME = _gauge("torchobs.rank.start_time", "s", survives=True).described(
    "Unix time at which torchobs started in the rank."
)
RANK_RESTARTS = _counter("torchobs.rank.restarts", "{restart}").described("Times the launcher has restarted the rank.")
RANK_SLOWDOWN = _gauge("torchobs.rank.slowdown", "1").described(
    "Rank's step time over what it would be if its peers on this machine did not wait for it."
)
RANK_EXCESS = _gauge("torchobs.rank.excess", "s", OWN_PHASE).described(
    "Time per step that the rank's peers on this machine wait for it, by the phase in which it is late."
)
RANK_BEHIND = _gauge("torchobs.rank.behind", "{step}").described(
    "Steps by which the rank is behind the furthest rank of its replica group on this machine."
)
RANK_STALL_POSITION = _gauge("torchobs.rank.stall.position", "{step}", STALL_PHASE).described(
    "Where the rank is while a rank of its replica group on this machine hangs: steps done, and a fifth for each phase of the"
    " next that is behind it. The ranks with the lowest are those that the others likely wait for; absent while none hangs."
)
RUN_LOCAL_RANKS = _gauge("torchobs.run.local_ranks", "{rank}").described("Ranks of the run that live on this machine.")
RUN_MISSING_RANKS = _gauge("torchobs.run.missing_ranks", "{rank}").described(
    "Ranks that the launcher started on this machine and that the exporter does not see."
)
RUN_STEP_SPREAD = _gauge("torchobs.run.step_spread", "{step}").described(
    "Steps between the first and the last rank on this machine, the most of any replica group."
)
RUN_GRAD_NORM = _gauge("torchobs.run.grad_norm", "").described(
    "L2 norm of the whole gradient, combined from all ranks, if all are on this machine."
)
RANK_EXIT = _gauge("torchobs.rank.exit", "", EXIT_REASON, survives=True).described(
    "1 for the way in which the rank ended; absent while it lives."
)
RANK_EXCEPTION = _gauge(
    "torchobs.rank.exception",
    "",
    Attribute("exception.type", "its class"),
    Attribute("message", "first line of its message, without secrets, at most 100 characters; absent if it has none"),
    Attribute("location", "innermost file:line of the user's own code, else where it was raised"),
    survives=True,
).described("Constant 1 for the exception that ended the rank; absent while it lives, and if no exception ended it.")
PROCESS_CHILDREN = _gauge("torchobs.rank.process.children", "{process}", quiet=0.0).described(
    "Processes that descend from the rank's: DataLoader workers, compilers."
)
PROCESS_THREADS = _gauge("torchobs.rank.process.threads", "{thread}").described("Threads of the rank's process.")
PROCESS_OPEN_FILES = _gauge("torchobs.rank.process.open_fds", "{file}").described(
    "File descriptors that the rank's process has open."
)
PROCESS_MAX_FILES = _gauge("torchobs.rank.process.max_fds", "{file}").described("File descriptors that it may have open.")
RANK_INFO = _gauge("torchobs.rank.info", "", survives=True).described("Constant 1; its labels describe the rank.")
WORLD_SIZE = _gauge("torchobs.world_size", "{rank}", survives=True).described("Ranks in the run, as its launcher says.")

# --- the machine: OpenTelemetry's names, and what they lack as torchobs.host.* ------------------------------------------------
SYSTEM_CPU_TIME = _counter("system.cpu.time", "s", CPU_MODE).described("CPU time of all processors together, by mode.")
SYSTEM_CPU_LOAD = _gauge("system.cpu.load_average.1m", "{thread}").described(
    "Threads that ran, or waited to run or for a disk, averaged over a minute."
)
HOST_CPUS = _gauge("torchobs.host.cpus", "{cpu}").described("Logical processors that are online.")
HOST_THREADS = _gauge("torchobs.host.threads", "{thread}", THREAD_STATE).described(
    "Threads that run, or wait to run or for a disk."
)
SYSTEM_MEMORY_LIMIT = _updown("system.memory.limit", "By").described("The machine's memory.")
SYSTEM_MEMORY_USAGE = _updown("system.memory.usage", "By", MEMORY_STATE).described("The machine's memory by use.")
SYSTEM_MEMORY_AVAILABLE = _updown("system.memory.linux.available", "By").described(
    "The kernel's estimate of the memory available without swapping."
)
SYSTEM_MEMORY_SHARED = _updown("system.memory.linux.shared", "By").described(
    "Shared memory, including files in a tmpfs; part of the state cached."
)
HOST_MEMORY_UNWRITTEN = _gauge("torchobs.host.memory.unwritten", "By", UNWRITTEN_STATE).described(
    "File pages not yet written to disk, for instance of checkpoints."
)
HOST_OOM_KILLS = _counter("torchobs.host.memory.oom_kills", "{process}").described(
    "Processes ended by the kernel's OOM killer, in any cgroup."
)
SYSTEM_PAGING_USAGE = _updown("system.paging.usage", "By", PAGING_STATE).described("The machine's swap space.")
SYSTEM_DISK_IO = _counter("system.disk.io", "By", SYSTEM_DEVICE, DISK_DIRECTION).described(
    "Bytes read from and written to disks."
)
SYSTEM_DISK_OPERATIONS = _counter("system.disk.operations", "{operation}", SYSTEM_DEVICE, DISK_DIRECTION).described(
    "Reads and writes that disks completed."
)
SYSTEM_DISK_IO_TIME = _counter("system.disk.io_time", "s", SYSTEM_DEVICE).described("Time in which a disk was busy.")
SYSTEM_DISK_OPERATION_TIME = _counter("system.disk.operation_time", "s", SYSTEM_DEVICE, DISK_DIRECTION).described(
    "Time that a disk's reads and writes took, summed."
)
SYSTEM_FILESYSTEM_LIMIT = _updown("system.filesystem.limit", "By", MOUNTPOINT, FILESYSTEM_TYPE).described(
    "Size of a file system."
)
SYSTEM_FILESYSTEM_USAGE = _updown("system.filesystem.usage", "By", MOUNTPOINT, FILESYSTEM_TYPE, FILESYSTEM_STATE).described(
    "Space in a file system by state."
)
SYSTEM_FILESYSTEM_INODES = _updown(
    "system.filesystem.inodes.usage", "{inode}", MOUNTPOINT, FILESYSTEM_TYPE, INODE_STATE
).described("Inodes of a file system by state.")
HOST_FILESYSTEM_READONLY = _gauge("torchobs.host.filesystem.readonly", "", MOUNTPOINT, FILESYSTEM_TYPE).described(
    "1 if the file system is read-only, as after a disk error."
)
SYSTEM_NETWORK_IO = _counter("system.network.io", "By", NETWORK_INTERFACE, NETWORK_DIRECTION).described(
    "Bytes received and transmitted."
)
SYSTEM_NETWORK_ERRORS = _counter("system.network.errors", "{error}", NETWORK_INTERFACE, NETWORK_DIRECTION).described(
    "Errors of receiving and transmitting."
)
SYSTEM_NETWORK_DROPPED = _counter("system.network.packet.dropped", "{packet}", NETWORK_INTERFACE, NETWORK_DIRECTION).described(
    "Packets dropped although they had no error."
)

# --- torchobs.guard -----------------------------------------------------------------------------------------------------------
GUARD_SEVERITY = Attribute("severity", "how bad it is, see guard.Severity", ("info", "warning", "error"))
GUARD_VIOLATIONS = _counter(
    "torchobs.guard.violations",
    "{violation}",
    Attribute("what", "what a tensor is not", ("type", "shape", "dtype", "device", "finite", "min", "max", "norm")),
    Attribute("category", "what it is about", ("contract",)),
    GUARD_SEVERITY,
    quiet=0.0,
).described("Tensors that did not keep their contract, by what is wrong.")
GUARD_SANITIZED = _counter(
    "torchobs.guard.sanitized",
    "{element}",
    Attribute("policy", "what was done", ("refuse", "clamp", "nan_to_num")),
    Attribute("category", "what it is about", ("numerics",)),
    GUARD_SEVERITY,
    quiet=0.0,
).described("Elements of outputs that were refused or replaced by torchobs.guard.sanitize_outputs.")
GUARD_RECOVERIES = _counter(
    "torchobs.guard.recoveries",
    "{time}",
    Attribute("category", "what the error was about", ("memory", "numerics", "data", "io", "other")),
    Attribute("action", "what was done", ("split", "skip", "restore", "retry", "raise", "return")),
    GUARD_SEVERITY,
    quiet=0.0,
).described(
    "Errors that torchobs.guard.Recovery went on after, or raised because its budget was spent, and that "
    "torchobs.guard.safe_inference repeated an inference for, or returned."
)
GUARD_EXCEEDED = _counter(
    "torchobs.guard.exceeded",
    "{time}",
    Attribute("resource", "what is used up", ("cpu", "memory", "gpu_memory", "disk")),
    Attribute("category", "what it is about", ("resources",)),
    GUARD_SEVERITY,
    quiet=0.0,
).described("Times that a resource got above its threshold of torchobs.guard.resources.")
GUARD_FINDINGS = _counter(
    "torchobs.guard.findings",
    "{finding}",
    Attribute("by", "function that found it", ("scan_file", "load", "verify", "check_model", "check_outputs")),
    Attribute("category", "what it is about", ("file", "numerics")),
    GUARD_SEVERITY,
    quiet=0.0,
).described("Files, models and outputs in which torchobs.guard found something wrong.")

# --- tune: plans, benchmarks --------------------------------------------------------------------------------------------------
TUNE_ACTION = Attribute(
    "action",
    "what happened; refused: its outputs differ too much from float32; compile_failed: the model runs eagerly",
    ("applied", "undone", "refused", "compile_failed"),
)
TUNE_PLANS = _counter("torchobs.tune.plans", "{plan}", TUNE_ACTION, quiet=0.0).described(
    "Plans of torchobs.tune that were applied, undone or refused, or whose compilation failed."
)
TUNE_SPEEDUP = _gauge(
    "torchobs.tune.speedup",
    "{ratio}",
    Attribute("mode", "mode of tune.optimize()", ("none", "amp", "compile", "memory_efficient", "full", "inference")),
    survives=True,
).described("Speed-up of each mode over the first, by the last tune.benchmark().")

# --- torchobs.debug -----------------------------------------------------------------------------------------------------------
DEBUG_OPERATION = Attribute("operation", "name given to debug.context(), the first 16; the others are 'other'")
STEP_ANOMALIES = ("gradient_explosion", "gradient_vanishing", "loss_anomaly")
STEP_ANOMALY = Attribute("kind", "what was found in the step", STEP_ANOMALIES)
DEBUG_OPERATIONS = _counter("torchobs.debug.operations", "{operation}", DEBUG_OPERATION).described(
    "Operations that a debug.context() or debug.operation() enclosed; from the first one on, as all of torchobs.debug."
)
DEBUG_OPERATION_TIME = _counter("torchobs.debug.operation.time", "s", DEBUG_OPERATION).described("Time that they took.")
DEBUG_OPERATION_LONGEST = _gauge("torchobs.debug.operation.longest", "s", DEBUG_OPERATION, survives=True).described(
    "Time that the longest of them took."
)
DEBUG_OPERATION_MEMORY = _gauge("torchobs.debug.operation.memory", "By", DEBUG_OPERATION, SPACE, survives=True).described(
    "Most memory of the process, or of its devices, during one of them."
)
DEBUG_OPERATION_ANOMALIES = _counter("torchobs.debug.operation.anomalies", "{operation}", DEBUG_OPERATION).described(
    "Operations with an anomaly: values that are not finite, or torch's anomaly mode raised."
)
DEBUG_STEPS = _counter("torchobs.debug.steps", "{step}").described(
    "Steps checked by debug.monitor_step() or debug.training_step()."
)
DEBUG_ANOMALY_STEPS = _counter("torchobs.debug.anomaly_steps", "{step}").described("Checked steps with an anomaly of any kind.")
DEBUG_STEP_ANOMALIES = _counter("torchobs.debug.step_anomalies", "{step}", STEP_ANOMALY).described(
    "Checked steps with an anomaly, by kind: gradient norm above or below debug's thresholds, loss not finite or a spike."
)

# --- torchobs itself ----------------------------------------------------------------------------------------------------------
OVERHEAD = _counter("torchobs.overhead", "s", PROBE, quiet=0.0).described(
    "Time that torchobs itself took in the training thread."
)
PROBE_ERRORS = _counter("torchobs.probe.errors", "{error}", PROBE, quiet=0.0).described(
    "Exceptions raised inside a probe; the first disables it."
)
PROBE_DISABLED = _gauge("torchobs.probe.disabled", "", PROBE, quiet=0.0).described("1 if the probe is disabled.")
FLIGHT_DROPPED = _counter(
    "torchobs.flight.dropped", "{item}", Attribute("what", "what was dropped", ("series", "event", "record")), quiet=0.0
).described("Items that did not fit the flight file.")
BUILD_INFO = _gauge(
    "torchobs.build.info", "", Attribute("version", "torchobs version"), Attribute("python", "Python version")
).described("Constant 1; its labels are the exporter's versions.")
EXPORTER_FILES = _gauge(
    "torchobs.exporter.files",
    "{file}",
    Attribute(
        "status",
        "outcome of reading; left_out: beyond the 4,096 that are read, living ranks' first",
        ("served", "superseded", "expired", "bad", "left_out"),
    ),
).described("Flight files in the directory, by status.")
EXPORTER_READ_ERRORS = _counter(
    "torchobs.exporter.read_errors", "{error}", Attribute("reason", "why", ("header", "io", "kind", "memory", "timeout"))
).described("Flight files that could not be read, by reason.")
EXPORTER_SCAN_DURATION = _gauge("torchobs.exporter.scan.duration", "s").described(
    "Duration of the last scan of all flight files."
)
EXPORTER_SCRAPES = _counter("torchobs.exporter.scrapes", "{scrape}").described(
    "Scrapes of the metrics page; a page does not count its own."
)
EXPORTER_SCRAPE_TIME = _counter("torchobs.exporter.scrape.time", "s").described(
    "Time that these scrapes took, from the request to the page's last byte."
)
EXPORTER_CONFIG_OK = _gauge("torchobs.exporter.config_ok", "").described(
    "0 while part of the configuration is invalid or cannot be applied."
)
EXPORTER_DUPLICATES = _counter("torchobs.exporter.duplicate_ranks", "{rank}").described(
    "Times two living processes claimed one rank of one run."
)
EXPORTER_SERIES_DROPPED = _counter(
    "torchobs.exporter.series_dropped",
    "{series}",
    Attribute("reason", "why", ("limit", "total_limit", "conflict", "drop_list")),
).described("Series not served, by reason.")
EXPORTER_WRITE_ERRORS = _counter(
    "torchobs.exporter.write_errors",
    "{error}",
    Attribute("what", "what was to be written", ("log", "file_sd", "announcement", "control")),
).described("Writes that failed, as on a full disk.")
EXPORTER_HOST_DURATION = _gauge("torchobs.exporter.host.duration", "s").described(
    "Duration of the last collection of the machine's metrics."
)
EXPORTER_HOST_ERRORS = _counter("torchobs.exporter.host.errors", "{error}", HOST_COLLECTOR).described(
    "Times that a collector of the machine's metrics failed."
)
_SIGNAL = Attribute("signal", "what is pushed over OTLP: data points, spans or log records", ("metrics", "traces", "logs"))
OTLP_SENT = _counter("torchobs.exporter.otlp.sent", "{item}", _SIGNAL).described(
    "Data points, spans or log records that the receiver accepted."
)
OTLP_DROPPED = _counter(
    "torchobs.exporter.otlp.dropped",
    "{item}",
    _SIGNAL,
    Attribute("reason", "why", ("overflow", "refused", "rejected", "shutdown")),
).described(
    "Data points, spans or log records dropped: the queue was full, the receiver refused the request or rejected a part of"
    " it, or the exporter ended."
)
OTLP_QUEUED = _gauge("torchobs.exporter.otlp.queued", "{item}", _SIGNAL).described(
    "Data points, spans or log records that wait to be sent."
)
OTLP_FAILURES = _counter("torchobs.exporter.otlp.failures", "{request}", _SIGNAL).described(
    "Requests that failed and were, or will be, retried."
)

# --- events -------------------------------------------------------------------------------------------------------------------
EVIDENCE = Attribute("evidence", "id of the file in the exporter's API")
EVENT_RUN_START = _info("torchobs.run.start", "torchobs.init() has finished.")
EXIT_SIGNAL = Attribute("signal", "the signal whose handler raised it or led to it, if one did")
EVENT_RUN_END = _info("torchobs.run.end", "The rank ended, by itself or by a signal that it handled.", EXIT_REASON, EXIT_SIGNAL)
EVENT_TRAINER = _info(
    "torchobs.trainer",
    "A framework's trainer started. Its other attributes are its settings with a number or a single word as value.",
    Attribute("framework", "lightning, transformers or accelerate"),
    Attribute("version", "the framework's"),
)
RECENT_COLLECTIVES = Attribute(
    "collectives",
    "of a rank that waits, or that a timeout ended: its last collectives, by torch's flight recorder, with group,"
    " number, kind and the line that called each",
)
EVENT_EXCEPTION = _error(
    "torchobs.exception",
    "An uncaught exception. In the main thread it ends the rank; in another thread, a notebook's cell or a test it does not.",
    Attribute("exception.type", "its class"),
    Attribute("exception.message", "first line of its message, without secrets, at most 100 characters"),
    Attribute("location", "file:line where it was raised"),
    Attribute("caller", "innermost file:line of the user's own code, if different"),
    Attribute("cause.type", "class of the first exception of the chain, if it is a chain"),
    Attribute("cause.message", "first line of that exception's message, likewise"),
    Attribute("cause.location", "file:line where that exception was raised"),
    Attribute("cause.caller", "innermost file:line of the user's own code in it, if different"),
    Attribute("origin", "the worker or other process that raised it, if not the rank's own; location is there then"),
    Attribute("reraised", "file:line of the user's own code in the rank where it was raised again"),
    Attribute("cause.origin", "origin of the first exception of the chain"),
    Attribute("cause.reraised", "reraised of the first exception of the chain"),
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
EVENT_DISTRIBUTED = _info(
    "torchobs.distributed",
    "How the training is spread over ranks was recognised, or changed.",
    Attribute("backend", "of the default process group"),
    Attribute("world_size", "its ranks"),
    Attribute("parallelism", "what was recognised"),
    Attribute("mesh", "dimensions of the device mesh"),
)
EVENT_COLLECTIVES_UNKNOWN = _info(
    "torchobs.collectives.unknown",
    "torch's flight recorder tells nothing of this rank's collectives.",
    Attribute("reason", "why"),
)
EVENT_GPU_LOST = _error(
    "torchobs.gpu.lost",
    "A GPU no longer responds.",
    GPU_ID,
    Attribute("reason", "what its library says: lost, reset_required, silent"),
)
EVENT_GPU_XID = _error(
    "torchobs.gpu.xid",
    "The driver reported an error of a GPU (an XID).",
    GPU_ID,
    Attribute("xid", "number in NVIDIA's list of XIDs"),
    Attribute("meaning", "its meaning, if known"),
)
EVENT_ANOMALY = _warning(
    "torchobs.anomaly",
    "A step was judged anomalous.",
    ANOMALY_KIND,
    Attribute("value", "observed value"),
    Attribute("baseline", "usual value"),
    ORIGIN,
    Attribute("module", "module in which a value that is not finite was born"),
    Attribute("operator", "operator that made it"),
    Attribute("parameter", "parameter or input that held it"),
    Attribute("left_out", "number of earlier ones of the kind without an event: of many in a row, one in ten minutes has one"),
    Attribute("layer", "layer whose gradient has grown most in that step, of an explosion or a spike in a measured step"),
    Attribute("layer_norm", "norm of its gradient"),
    Attribute("layer_usual", "its usual norm: the median of up to 16 measured steps before"),
)
_SEVERITY = Attribute("severity", "info: nothing was lost; warning: something was refused or lost; error: it was raised")
_CATEGORY = Attribute("category", "what it is about: memory, numerics, data, io, contract, resources, file")
EVENT_GUARD_VIOLATION = _warning(
    "torchobs.guard.violation",
    "A tensor did not keep its contract.",
    _CATEGORY,
    _SEVERITY,
    Attribute("tensor", "names of the tensors"),
    Attribute("what", "what is wrong with the first"),
    Attribute("found", "what was found"),
    Attribute("expected", "what was expected"),
)
EVENT_GUARD_RECOVERY = _warning(
    "torchobs.guard.recovery",
    "An error that a training or an inference went on after, that was raised because its budget was spent, or returned.",
    _CATEGORY,
    _SEVERITY,
    Attribute("action", "what was done"),
    Attribute("error", "class of the exception"),
)
EVENT_GUARD_FILE = _warning(
    "torchobs.guard.file",
    "A model file would run code that is not known, or do harm, or is not the one that was published.",
    _CATEGORY,
    _SEVERITY,
    Attribute("verdict", "suspicious, dangerous, refused (by load) or wrong (by verify)"),
    Attribute("reason", "the first of its reasons"),
)
EVENT_GUARD_MODEL = _warning(
    "torchobs.guard.model",
    "A model has weights that a sound one does not have.",
    _CATEGORY,
    _SEVERITY,
    Attribute("layer", "name of the first parameter or buffer"),
    Attribute("problem", "what is wrong with it"),
    Attribute("problems", "number of problems"),
)
EVENT_GUARD_RESOURCE = _warning(
    "torchobs.guard.resource",
    "A resource got above its threshold.",
    _CATEGORY,
    _SEVERITY,
    Attribute("resource", "what is used up"),
    Attribute("where", "the container, the machine, a device or a path"),
    Attribute("percent", "how much of it is used"),
    Attribute("threshold", "the threshold in percent"),
)
EVENT_GUARD_OUTPUTS = _warning(
    "torchobs.guard.outputs",
    "A model's outputs were refused, replaced or found suspicious.",
    _CATEGORY,
    _SEVERITY,
    Attribute("output", "its name"),
    Attribute("problem", "what is wrong with it"),
    Attribute("policy", "what was done about it"),
)
EVENT_SCHEDULER_MISUSED = _warning(
    "torchobs.scheduler.misused",
    "A learning-rate scheduler is used wrongly: stepped before the optimizer, never, or for one that does not step.",
    SCHEDULER_MISUSE_KIND,
    Attribute("scheduler", "its class"),
)
LOOP_MISTAKES = (
    "gradients_kept", "evaluation_mode", "never_stepped", "losses_kept", "same_order", "clipped_late",
)  # fmt: skip
EVENT_LOOP_MISTAKE = _warning(
    "torchobs.loop.mistake",
    "The training loop has a mistake: gradients are never set to zero, or the model is trained in evaluation mode after it "
    "was trained in training mode; or its optimizer never steps; or losses are kept with their graphs; or a "
    "DistributedSampler gives each epoch one order; or gradients are clipped after the optimizer's step.",
    Attribute("kind", "which", LOOP_MISTAKES),
    Attribute("optimizer", "class of an optimizer that never steps"),
    Attribute("parameters_affected", "0 in a later event that takes the kind back"),
    Attribute("backward_passes", "number of them without a step of an optimizer that never steps"),
)
EVENT_LEFT_OUT_PARAMETERS = _warning(
    "torchobs.loop.left_out",
    "Parameters get gradients and are in no optimizer, or in one that never steps: they learn nothing.",
    Attribute("parameters", "which, the first eight"),
    Attribute("parameters_affected", "how many; in a later event those that are left, 0 if all are trained by then"),
    Attribute("parameters_trained", "how many the optimizers that step have"),
    Attribute("optimizer", "class of the one that has them and has not stepped"),
)
EVENT_AMP_SCALE_COLLAPSED = _warning(
    "torchobs.amp.scale_collapsed",
    "A loss scale has fallen below 1: the gradients are not finite at any scale.",
    SCALER,
    Attribute("scale", "the loss scale"),
)
EVENT_AMP_UNSCALED = _warning(
    "torchobs.amp.unscaled",
    "The run trains in float16 autocast without a GradScaler: small gradients become zero.",
    Attribute("steps", "steps done so far"),
)
EVENT_AMP_CLIPPED_SCALED = _warning(
    "torchobs.amp.clipped_scaled",
    "Gradients were clipped by norm before the loss scaler divided them by its scale: to the limit over the scale.",
    Attribute("limit", "the threshold that was given"),
    Attribute("scale", "the loss scale"),
)
EVENT_DEVICE_UNREAD = _warning(
    "torchobs.device.unread",
    "Losses and gradient norms on this kind of device are not recorded: reading them would block the training.",
    Attribute("device_type", "torch's name of the kind of device"),
)
EVENT_MEMORY_GROWTH = _warning(
    "torchobs.memory.growth",
    "Memory grows steadily with the steps, and would reach its limit within a day.",
    SPACE,
    Attribute("per_step", "bytes a step", unit="By"),
    Attribute("time_to_limit", "seconds until then", unit="s"),
)
EVENT_MEMORY_LEAK = _warning(
    "torchobs.memory.leak",
    "What grew while memory was leaking: once growth was told, for some ten seconds. Sizes in bytes, the largest first.",
    SPACE,
    Attribute("ended", "why it ended early, if it did", ("complete", "memory")),
    Attribute("seconds", "for which it was watched", unit="s"),
    Attribute("steps", "in which it was watched"),
    Attribute("grown", "growth of the process, or of the device's blocks in use", unit="By"),
    Attribute("tensor_bytes", "of it, what tensors known to Python take", unit="By"),
    Attribute(
        "lines", "file:line whose living allocations grew: how many more, and their size; of a tensor on the host the object"
    ),
    Attribute("objects", "types of which there are more objects"),
    Attribute("tensors", "shapes of which there are more tensors, with the size of their memory"),
    EVIDENCE,
)
EVENT_OUT_OF_MEMORY = _error(
    "torchobs.memory.out_of_memory",
    "Memory ran out: in a device's allocator, before the exception is raised, or on the host (cpu), when it ends. In bytes.",
    DEVICE,
    Attribute("requested", "requested size", unit="By"),
    Attribute("limit", "memory that it may use; of the host only a limit of its address space (ulimit -v, -d)", unit="By"),
    Attribute("free", "free memory of the device", unit="By"),
    Attribute("allocated", "in use by tensors", unit="By"),
    Attribute("reserved", "held by the allocator", unit="By"),
    Attribute("active", "in blocks that are in use", unit="By"),
    Attribute("inactive_split", "in inactive split blocks", unit="By"),
    Attribute("allocations", "blocks in use"),
    Attribute("alloc_retries", "allocations tried again so far"),
    Attribute("ooms", "such errors so far, without this one"),
    Attribute("parameters", "of it, what models' parameters take", unit="By"),
    Attribute("gradients", "their gradients", unit="By"),
    Attribute("optimizer_state", "the state of the optimizers", unit="By"),
    Attribute("buffers", "models' buffers", unit="By"),
    Attribute("modules", "the modules that take most of these, with their size"),
    Attribute("largest", "where most of it was allocated (file:line, size, blocks), if torch records its history"),
)
EVENT_SHARED_MEMORY_FULL = _warning(
    "torchobs.memory.shared_full",
    "Shared memory (/dev/shm), through which DataLoader workers and NCCL pass data, is nearly full.",
    Attribute("used", "bytes in use", unit="By"),
    Attribute("size", "bytes in all", unit="By"),
)
EVENT_NONFINITE_GRADIENT = _warning(
    "torchobs.grad.nonfinite",
    "Gradients were not finite: the first time, and then at most once a minute.",
    Attribute("layers", "in which layers, the first eight in the model's order"),
    Attribute("layers_affected", "in how many"),
    Attribute("elements", "how many elements, where they were counted"),
    Attribute("kinds", "nan, inf or both"),
    Attribute("measured", "false for what the end of the training left, and no measurement saw"),
)
EVENT_NONFINITE_ORIGIN = _error(
    "torchobs.nonfinite.origin",
    "Where a NaN or an infinity was born: at its first occurrence, and for the same place at most once in ten minutes.",
    ORIGIN,
    Attribute("operator", "torch's operator that made it, or was the first to be given it"),
    Attribute("module", "path of the module that called the operator; absent outside of any"),
    Attribute("parameter", "the parameter's name, or that of the variable with the batch"),
    Attribute("location", "file:line of the user's code, if known"),
    Attribute("sample", "index of the sample in the batch"),
    Attribute("element", "index of the first such element in that tensor"),
    Attribute("inputs", "statistics of the operator's inputs"),
    Attribute("note", "how it was found, or what makes such values there"),
)
EVENT_NONFINITE_REST = _info(
    "torchobs.nonfinite.rest",
    "What NaN or infinity has left in parameters and buffers, looked for after fifty steps without either.",
    Attribute("parameters_affected", "how many hold such values; 0: all are finite"),
    Attribute("parameter", "name of the first"),
)
EVENT_STEP_HELD = _warning(
    "torchobs.step.held",
    "debug.nan_guard() held an optimizer's step back: gradients were not finite.",
    Attribute("parameters", "how many had such gradients"),
    Attribute("held", "steps held back so far"),
)
STUCK_CAUSES = ("vanishing", "cut_off", "dead_units", "no_gradient", "unused")
EVENT_UNMOVED_LAYERS = _warning(
    "torchobs.grad.unmoved",
    "Layers learn nothing, all for one cause: each cause has an event of its own in that step. Of layers that are unused it is "
    "information.",
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
EVENT_REPLICA_WEIGHTS = _info(
    "torchobs.replica.weights",
    "Of a DistributedDataParallel model, in steps that are powers of two: what is the same on all ranks whose weights are.",
    Attribute("values", "the norm of some weights, and eight sums of them with random signs"),
)
EVENT_REPLICA_BATCHES = _info(
    "torchobs.replica.batches",
    "Of a DistributedDataParallel model: what is the same on all ranks whose batches of a data loader are.",
    Attribute("values", "of each of the first eight batches of an iteration"),
)
EVENT_ACTIVATIONS = _info(
    "torchobs.activations",
    "At level extreme: how many layers' outputs are looked at, and how many are not.",
    Attribute("layers", "looked at"),
    Attribute("left_out", "not, since there are more than have series"),
    Attribute("compiled", "not, since torch.compile has compiled a module that they are part of"),
    Attribute("silent", "not, since they are not called as modules: in a compiled function, or unused"),
)
EVENT_DEAD_UNITS = _warning(
    "torchobs.dead_units",
    "At level extreme: half of a rectifier's units or more gave zero for every sample, for a hundred steps or more.",
    Attribute("layer", "path of the module"),
    Attribute("units_dead", "how many"),
    Attribute("units", "of how many"),
    Attribute("steps", "over which they were looked at"),
)
EVENT_LAYER_HISTORY = _info(
    "torchobs.layer_history",
    "What the layers put out in the last steps looked at before an anomaly, and in two after it, was written to a file.",
    Attribute("kind", "the anomaly's"),
    Attribute("steps", "number of steps in it at first"),
    EVIDENCE,
    Attribute("reason", "why it could not be written", ("no_room", "not_permitted", "error")),
    Attribute("detail", "the system's error message"),
)
EVENT_PROBE_DISABLED = _warning(
    "torchobs.probe.disabled",
    "A probe raised and was switched off.",
    PROBE,
    Attribute("exception.type", "its class"),
    Attribute("location", "file:line where it was raised"),
)
EVENT_MODEL = _info(
    "torchobs.model",
    "A model was passed to torchobs.watch().",
    Attribute("name", "its class"),
    Attribute("parameters", "elements in its parameters"),
    Attribute("trainable", "elements that are trained"),
)
EVENT_SCALARS = _info(
    "torchobs.scalars",
    "Points of the curves of scalars given to torchobs.log(), for the page, top, inspect and the API.",
    Attribute("names", "names of the scalars"),
    Attribute("steps", "step after which each was logged"),
    Attribute("values", "values logged"),
)
EVENT_MODEL_CHANGE = _info(
    "torchobs.model_change",
    "Training continues with parameters never trained before (the next fold, the next trial); baselines are reset.",
    Attribute("changes", "how many there were"),
    Attribute("steps_before", "steps done before it"),
)
EVENT_CHILDREN = _info(
    "torchobs.children",
    "A process without a step has started others by multiprocessing; they become ranks only by joining a process group.",
    Attribute("count", "how many there were at the same time"),
)
EVENT_OTHER_THREAD = _warning(
    "torchobs.other_thread",
    "A second thread steps optimizers at the same time as the recorded one; its steps are not counted.",
    Attribute("thread", "its name"),
)
EVENT_WORKER_DIED = _error(
    "torchobs.data.worker_died",
    "A worker process of a data loader was ended by a signal or an error.",
    Attribute("pid", "its process id"),
    Attribute("code", "its exit code, 0 for a signal"),
    Attribute("signal", "the signal's name, e.g. SIGKILL: the out-of-memory killer's"),
)
EVENT_STARVED = _warning(
    "torchobs.data.starved",
    "Training has begun to wait for data for a fifth of its time or more.",
    Attribute("share", "of the training time of the last minute, or the last ten steps"),
)
EVENT_CHECKPOINT_FAILED = _error(
    "torchobs.checkpoint.failed",
    "A save raised an exception, for lack of space or another reason.",
    Attribute("format", "what was saving", ("torch", "safetensors", "distributed")),
    Attribute("exception.type", "the exception's class"),
    Attribute("saved_step", "step of the last checkpoint that was saved; 0 if there was none"),
    Attribute("free", "bytes that the target's file system has left, where it is a path", unit="By"),
    Attribute("needed", "bytes of the last checkpoint that was saved, else of the trained parameters", unit="By"),
)
EVENT_RECOMPILE = _info(
    "torchobs.compile.recompile",
    "A function was compiled again.",
    COMPILE_LOCATION,
    COMPILE_GUARD,
    Attribute("expression", "the guard that failed, without values"),
)
EVENT_RECOMPILE_STORM = _warning(
    "torchobs.compile.recompile_storm",
    "A function is compiled again and again; at most once a minute for each.",
    COMPILE_LOCATION,
    COMPILE_GUARD,
    Attribute("expression", "the guard that failed last, without values"),
    Attribute("recompiles", "how often it failed within ten minutes"),
)
EVENT_COMPILE_FAILED = _warning(
    "torchobs.compile.failure",
    "torch.compile gave up on a function.",
    COMPILE_LOCATION,
    COMPILE_FAILURE,
    Attribute("exception.type", "class of the compiler's exception"),
)
EVENT_GRAPH_BREAK = _info(
    "torchobs.compile.graph_break",
    "A graph break; recorded once per location.",
    Attribute("location", "file:line"),
    COMPILE_BREAK,
    Attribute("message", "the reason's first line, without values"),
)
EVENT_TUNE_PLAN = _info(
    "torchobs.tune.plan",
    "A plan of torchobs.tune changed the model: what is measured before and after it is not comparable.",
    TUNE_ACTION,
    Attribute("mode", "its mode"),
    Attribute("level", "its level"),
    Attribute("techniques", "names of what it uses"),
    Attribute("difference", "if refused: relative difference of the outputs"),
    Attribute("reason", "if the compilation failed: the error's first line"),
)
EVENT_TUNE_BENCHMARK = _info(
    "torchobs.tune.benchmark",
    "Modes of torchobs.tune were timed against each other.",
    Attribute("recommended", "mode to use"),
    Attribute("reason", "why"),
    Attribute("rounds", "timed steps of each mode"),
    Attribute("speedups", "each mode's speed-up over the first, with its quartiles"),
)
EVENT_DEBUG_FINDING = _warning(
    "torchobs.debug.finding",
    "A function of torchobs.debug found something. Its other attributes are the numbers that go with it.",
    Attribute("function", "public function that found it"),
    Attribute("kind", "kind of finding"),
    Attribute("name", "name of the tensor, parameter or operation"),
    Attribute("message", "the finding in a sentence"),
    Attribute("left_out", "number of earlier ones of the kind without an event: of many in a row, one in ten minutes has one"),
)
EVENT_DEBUG_EARLY_STOPPING = _info(
    "torchobs.debug.early_stopping",
    "A check of debug.early_stopping(), and its decision.",
    Attribute("monitor", "name of the value"),
    Attribute("value", "the value"),
    Attribute("best", "the best value so far"),
    Attribute("patience_left", "checks without improvement that it still waits for"),
    Attribute("improved", "whether the value is the best so far"),
    Attribute("stop", "whether training should stop"),
)
EVENT_DEBUG_VALIDATION = _info(
    "torchobs.debug.validation",
    "The end of a debug.validation(). Its other attributes are the metrics.",
    Attribute("name", "name of the validation"),
    Attribute("samples", "samples added"),
    Attribute("batches", "batches added"),
    Attribute("seconds", "its duration", unit="s"),
)
EVENT_STACKS = _info(
    "torchobs.stacks",
    "The stacks of all threads were written, on request, because the GIL was held for seconds, or early in a stall.",
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
EVENT_STACKS_FAILED = _warning(
    "torchobs.stacks_failed",
    "Stacks could not be written, or not completely.",
    Attribute("cause", "why they were to be written", ("asked", "stuck", "stalled")),
    Attribute("reason", "why they were not written", ("no_room", "not_permitted", "error")),
    LACK,
    EVIDENCE,
)
EVENT_PROFILE_START = _info(
    "torchobs.profile.start", "A requested profile has begun.", Attribute("steps", "number of steps to profile"), EVIDENCE
)
EVENT_PROFILE_END = _info(
    "torchobs.profile.end",
    "The profiler's trace was written.",
    Attribute("reason", "why it ended", ("complete", "time", "memory", "interrupted")),
    Attribute("steps", "number of steps profiled"),
    Attribute("size", "bytes of the trace, compressed", unit="By"),
    EVIDENCE,
)
EVENT_PROFILE_FAILED = _warning(
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
SPAN_RUN = _span(
    "torchobs.run",
    "From init() to the begin of training (to the rank's end, if it does not train), at most an hour; the launcher's "
    "TRACEPARENT is its parent. Its trace is the same on all ranks, and the spans of all other traces link to it.",
    Attribute("reason", "how the rank ended, if within it without saying so itself"),
)
SPAN_SEGMENT = _span(
    "torchobs.segment",
    "A part of the training: an epoch, epochs of together a minute, an hour of one, or an hour. A trace of its own, the same "
    "on all ranks; it links to the run and to the previous segment.",
    Attribute("epoch", "number of the epoch it begins in, from 1; absent without epochs"),
    Attribute("part", "number of the hour within the epoch, from 0"),
    Attribute("steps", "steps that ended in it"),
    Attribute("reason", "how the rank ended, if within it without saying so itself"),
)
SPAN_PHASE = _span(
    "torchobs.phase",
    "A region opened by torchobs.phase(), when it lasts 100 ms or longer.",
    Attribute("phase", "the name given"),
)
SPAN_EPOCH = _span(
    "torchobs.epoch",
    "A pass over the training loader, until the next one begins or the run ends. Not sent over OTLP if longer than an hour.",
    Attribute("epoch", "its number, from 1"),
    Attribute("steps", "steps that ended in it"),
)
SPAN_EVALUATION = _span(
    "torchobs.evaluation",
    "An evaluation: between eval() and train(), or while batches are fetched with gradients disabled. All of 100 ms "
    "or longer, and some shorter ones.",
)
SPAN_CHECKPOINT = _span(
    "torchobs.checkpoint",
    "A save; an asynchronous one until it is complete. All of 100 ms or longer, and some shorter ones.",
    Attribute("format", "what saved", ("torch", "safetensors", "distributed")),
    Attribute("size", "bytes this rank wrote", unit="By"),
    Attribute("blocked_s", "for an asynchronous one: seconds for which training waited", unit="s"),
)
SPAN_RESTORE = _span(
    "torchobs.restore",
    "torch.load or torch.distributed.checkpoint.load in the training thread, when it takes 100 ms or longer.",
    Attribute("format", "what loaded", ("torch", "distributed")),
)
SPAN_STEP = _span(
    "torchobs.step",
    "A training step, from the end of the last one: about one in ten seconds, by its number, so that it is the same on all "
    "ranks; and some slow and anomalous ones, and ones with events. A trace of its own, the same on all ranks; it links to the "
    "run and to its segment. If a step is not one fetch, backward and optimizer in sequence, its phases are sums, in "
    "attributes (`forward_s` ...).",
    Attribute("step", "its number"),
    Attribute(
        "reason",
        "why it was recorded: user means that the application began a span in it",
        ("sampled", "slow", "anomalous", "event", "user"),
    ),
    Attribute("duration_s", "as in torchobs.step.duration; absent for the first step, whose start is unknown", unit="s"),
    Attribute("loss", "its loss"),
    Attribute("grad_norm", "its gradient norm"),
    Attribute("skipped", "true if the loss scaler skipped it"),
    Attribute("ended", "false for one that the run's end interrupted"),
)
SPAN_STEP_PHASE = _span("torchobs.step_phase", "A part of a step whose span is recorded.", PHASE)
SPAN_COMPILE = _span(
    "torchobs.compile",
    "A compilation: of a function, or of a graph's backward.",
    Attribute("function", "its name"),
    COMPILE_LOCATION,
    Attribute("cause", "first, recompile or backward"),
    Attribute("cached", "whether Inductor's code came from its cache; absent without a lookup"),
)


METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
EVENTS: tuple[Event, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Event))
SPANS: tuple[Span, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Span))
BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}
EVENT_BY_NAME: dict[str, Event] = {event.name: event for event in EVENTS}


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
