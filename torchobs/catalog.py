"""Catalog of every metric, event and span of torchobs. Names follow OpenTelemetry, units UCUM.

Derived from it are the flight file's series, the exporter's metrics page, the dashboards, the alert rules and
``docs/metrics.md``. A dashboard that names an unknown metric is an ``AttributeError``.

Dimensionless gauges that are no ratio have an empty unit, because Prometheus appends ``_ratio`` to a gauge with unit ``1``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

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


@dataclass(frozen=True, slots=True)
class Attribute:
    """A metric's label. ``values``: its closed set of values; empty: open, with a number limited by its probe."""

    name: str
    brief: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Metric:
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


@dataclass(frozen=True, slots=True)
class Event:
    """An event with a time in the event ring, exported as a span event and shown by the page and by ``inspect``."""

    name: str
    brief: str
    severity: Severity
    attributes: tuple[Attribute, ...] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """A timed region exported as an OpenTelemetry span."""

    name: str
    brief: str
    attributes: tuple[Attribute, ...] = ()


# Powers of two and of four are exact boundaries of base-2 exponential and of Prometheus native histograms, so that conversion
# to both is lossless. Norms are resolved from 2e-4 to 4096 only, because each bound is a series per rank; a norm beyond them is
# an anomaly, with its size in the gauge and the event.
SECONDS_BOUNDS = tuple(2.0**exponent for exponent in range(-11, 11))
NORM_BOUNDS = tuple(4.0**exponent for exponent in range(-6, 7))

_UNITS = {
    "s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds", "min": "minutes", "h": "hours",
    "d": "days", "By": "bytes", "KiBy": "kibibytes", "MiBy": "mebibytes", "GiBy": "gibibytes", "TiBy": "tibibytes",
    "KBy": "kilobytes", "MBy": "megabytes", "GBy": "gigabytes", "TBy": "terabytes", "m": "meters", "V": "volts",
    "A": "amperes", "J": "joules", "W": "watts", "g": "grams", "Cel": "celsius", "Hz": "hertz", "1": "", "%": "percent",
}  # fmt: skip
_PER_UNITS = {"s": "second", "m": "minute", "h": "hour", "d": "day", "w": "week", "mo": "month", "y": "year"}
_NOT_METRIC = re.compile(r"[^a-zA-Z0-9:]+")
_NOT_LABEL = re.compile(r"[^a-zA-Z0-9_]")


def prometheus_name(name: str, unit: str, kind: Kind) -> str:
    """Translate an OpenTelemetry instrument name as Prometheus' own OTLP endpoint does (UnderscoreEscapingWithSuffixes).

    Source: the rules of ``prometheus/otlptranslator``; a test compares with a running Prometheus 3. A name without valid
    characters, which Prometheus refuses, becomes ``_``, so that the page stays valid.
    """
    words = [word for word in _NOT_METRIC.split(name) if word]
    words += _unit_suffixes(unit, words)
    if kind is Kind.COUNTER:
        words = [word for word in words if word != "total"] + ["total"]
    if kind is Kind.GAUGE and unit == "1":
        words = [word for word in words if word != "ratio"] + ["ratio"]
    joined = "_".join(words)
    return f"_{joined}" if not joined or joined[0].isdigit() else joined


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


def _counter(
    name: str,
    unit: str,
    brief: str,
    *attributes: Attribute,
    integer: bool = True,
    quiet: float | None = None,
    shared: bool = False,
) -> Metric:
    return Metric(name, Kind.COUNTER, unit, brief, attributes, integer=integer, quiet=quiet, shared=shared)


def _gauge(
    name: str,
    unit: str,
    brief: str,
    *attributes: Attribute,
    survives: bool = False,
    quiet: float | None = None,
    shared: bool = False,
) -> Metric:
    return Metric(name, Kind.GAUGE, unit, brief, attributes, survives=survives, quiet=quiet, shared=shared)


def _updown(name: str, unit: str, brief: str, *attributes: Attribute) -> Metric:
    return Metric(name, Kind.UPDOWN, unit, brief, attributes)


def _histogram(name: str, unit: str, brief: str, bounds: tuple[float, ...]) -> Metric:
    return Metric(name, Kind.HISTOGRAM, unit, brief, bounds=bounds)


# --- attributes ---------------------------------------------------------------------------------------------------------------
PHASES = ("data", "forward", "backward", "optimizer", "other")
GOODPUT_STATES = ("productive", "data", "skipped", "evaluation", "checkpoint", "compile", "idle")
STARTUP = "startup"
"""The goodput state before the first step; the only one that is not computed from step records."""
ANOMALY_KINDS = ("nonfinite_loss", "nonfinite_gradient", "gradient_explosion", "loss_spike", "gradient_vanishing")
SCHEDULER_MISUSES = ("before_optimizer", "never_stepped", "idle_optimizer")
COMPILE_STAGES = ("dynamo", "aot", "inductor", "kernels")
COMPILE_GUARDS = ("shape", "tensor", "global_state", "type", "value", "other")
RANK_STATES = ("alive", "unresponsive", "hung", "finished", "failed", "lost")
SAVE_RESULTS = ("saved", "failed")
EXIT_REASONS = ("finished", "exception", "exit_code", "interrupted", "terminated", "lost", "out_of_memory")

ANOMALY_SEVERITY = {
    "nonfinite_loss": Severity.ERROR,
    "nonfinite_gradient": Severity.WARNING,
    "gradient_explosion": Severity.WARNING,
    "loss_spike": Severity.WARNING,
    "gradient_vanishing": Severity.WARNING,
}
"""Severity by kind, so no label. A non-finite gradient is only a warning, because a loss scaler may have caused it."""

PHASE = Attribute("phase", "part of a training step", PHASES)
OWN_PHASES = ("data", "forward", "optimizer", "other")
OWN_PHASE = Attribute("phase", "part of a step, without backward, in which a rank may wait for the slowest one", OWN_PHASES)
GOODPUT_STATE = Attribute("state", "use of the wall time", (*GOODPUT_STATES, STARTUP))
ANOMALY_KIND = Attribute("kind", "kind of anomaly", ANOMALY_KINDS)
RANK_STATE = Attribute("state", "the rank's state; one is 1, the others 0", RANK_STATES)
EXIT_REASON = Attribute("reason", "how the rank ended", EXIT_REASONS)
GPU_ID = Attribute("hw.id", "UUID of the GPU, or of the MIG instance")
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
SCHEDULER_MISUSE_KIND = Attribute("kind", "kind of misuse", SCHEDULER_MISUSES)
SCALER = Attribute("scaler", "index of the GradScaler in use, by its first update", ("0", "1", "2", "3"))
OPTIMIZER = Attribute("optimizer", "index of the optimizer in use, by its first step under a loss scaler", ("0", "1", "2", "3"))
SCALAR = Attribute("name", "the name given to torchobs.log(), the first 64")
LAYER = Attribute(
    "layer", "path of the module with the parameters; the largest and recently anomalous ones, the others are 'other'"
)
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
MEMORY_STATES = ("used", "free", "buffers", "cached")
UNWRITTEN_STATES = ("dirty", "writeback")
PAGING_STATES = ("used", "free")
FILESYSTEM_STATES = ("used", "free", "reserved")
INODE_STATES = ("used", "free")
HOST_COLLECTOR = Attribute("collector", "part of the machine", HOST_COLLECTORS)
CPU_MODE = Attribute("cpu.mode", "mode of the processors", CPU_MODES)
THREAD_STATE = Attribute("state", "runnable: running or waiting for a processor; blocked: for a disk", THREAD_STATES)
MEMORY_STATE = Attribute("system.memory.state", "use of the memory; the states add up to the total", MEMORY_STATES)
UNWRITTEN_STATE = Attribute("state", "dirty: to be written; writeback: being written", UNWRITTEN_STATES)
PAGING_STATE = Attribute("system.paging.state", "whether it is in use", PAGING_STATES)
SYSTEM_DEVICE = Attribute("system.device", "physical disk, e.g. nvme0n1; 64 at most")
DISK_DIRECTION = Attribute("disk.io.direction", "read or write", ("read", "write"))
MOUNTPOINT = Attribute("system.filesystem.mountpoint", "where it is mounted")
FILESYSTEM_TYPE = Attribute("system.filesystem.type", "its type, e.g. xfs")
FILESYSTEM_STATE = Attribute("system.filesystem.state", "reserved: free, for root only", FILESYSTEM_STATES)
INODE_STATE = Attribute("state", "whether the inode is in use", INODE_STATES)
NETWORK_INTERFACE = Attribute("network.interface.name", "physical interface, or a container's own, e.g. eth0; 64 at most")
NETWORK_DIRECTION = Attribute("network.io.direction", "seen from this machine", ("receive", "transmit"))

# --- progress -----------------------------------------------------------------------------------------------------------------
STEPS = _counter("torchobs.steps", "{step}", "Training steps completed, including those that a loss scaler skipped.")
STEP_DURATION = _histogram(
    "torchobs.step.duration",
    "s",
    "Time from the end of one step to the end of the next, without evaluation, checkpoints and compilation.",
    SECONDS_BOUNDS,
)
STEP_PHASE_TIME = _counter("torchobs.step.phase.time", "s", "Time spent in each phase of the steps.", PHASE, integer=False)
LAST_STEP_TIMESTAMP = _gauge("torchobs.last_step.timestamp", "s", "Unix time at which the last step ended.", survives=True)
MODEL_CHANGES = _counter(
    "torchobs.model_changes",
    "{change}",
    "Times that training continued with parameters never trained before (the next fold or trial); baselines are reset then.",
    quiet=0.0,
)
LOSS = _gauge(
    "torchobs.loss",
    "",
    "Loss of the last step: the sum over its backward passes, or the value given to torchobs.log(). Finite values only.",
    survives=True,
)
LEARNING_RATE = _gauge("torchobs.learning_rate", "", "Learning rate of each parameter group.", GROUP, survives=True)
OPTIMIZER_WEIGHT_DECAY = _gauge(
    "torchobs.optimizer.weight_decay",
    "",
    "Weight decay of the first parameter group, and of the next three where it differs.",
    GROUP,
    survives=True,
)
OPTIMIZER_MOMENTUM = _gauge(
    "torchobs.optimizer.momentum",
    "",
    "Momentum, or Adam's beta1, of the first parameter group, and of the next three where it differs.",
    GROUP,
    survives=True,
)
OPTIMIZER_BETA2 = _gauge(
    "torchobs.optimizer.beta2",
    "",
    "Adam's beta2 of the first parameter group, and of the next three where it differs.",
    GROUP,
    survives=True,
)
SCHEDULER_STEPS = _counter(
    "torchobs.scheduler.steps", "{step}", "Steps of learning-rate schedulers; a chain of schedulers counts once."
)
SCHEDULER_MISUSE = _counter(
    "torchobs.scheduler.misuses",
    "{scheduler}",
    "Learning-rate schedulers used wrongly, by kind of misuse.",
    SCHEDULER_MISUSE_KIND,
    quiet=0.0,
)
SAMPLES = _counter("torchobs.samples", "{sample}", "Samples given to torchobs.log().", quiet=0.0)
TOKENS = _counter("torchobs.tokens", "{token}", "Tokens given to torchobs.log().", quiet=0.0)
STEPS_PLANNED = _gauge("torchobs.steps.planned", "{step}", "Planned number of steps of the run, if known.", survives=True)
EPOCHS = _counter("torchobs.epochs", "{epoch}", "Passes over the training loader begun on this rank since its start.")
GOODPUT_TIME = _counter(
    "torchobs.goodput.time",
    "s",
    "Wall time by use; the states add up to the rank's lifetime. productive: training without waiting for data; startup: "
    "before the first step; idle: after the last one, or when no part of a step was seen for three times the longest step "
    "(at least 10 s).",
    GOODPUT_STATE,
    integer=False,
    quiet=0.0,
)
SCALAR_VALUE = _gauge("torchobs.scalar", "", "Last value of each extra number given to torchobs.log().", SCALAR, survives=True)

# --- gradients ----------------------------------------------------------------------------------------------------------------
GRAD_NORM = _gauge(
    "torchobs.grad.norm",
    "",
    "L2 norm of all gradients before the optimizer's step, unscaled and before clipping (after it, where compiled code clips)."
    " Finite values only.",
    survives=True,
)
GRAD_NORM_DISTRIBUTION = _histogram(
    "torchobs.grad.norm_distribution", "", "Distribution of the total gradient norm over the measured steps.", NORM_BOUNDS
)
GRAD_INTERVAL = _gauge(
    "torchobs.grad.interval", "{step}", "Steps from one measurement of the gradient norm to the next, at present."
)
GRAD_NORM_RANKS = _gauge(
    "torchobs.grad.norm_ranks",
    "{rank}",
    "Ranks over which the gradient is sharded: their squared norms add up to the whole's. 1 where each rank has all of it.",
    survives=True,
    quiet=1.0,
)
GRAD_LAYER_NORM = _gauge(
    "torchobs.grad.layer.norm", "", "L2 norm of a layer's gradient, of this rank's shard where parameters are sharded.", LAYER
)
GRAD_LAYERS_FOLDED = _gauge(
    "torchobs.grad.layers_folded", "{layer}", "Layers without series of their own, combined as 'other'.", quiet=0.0
)
GRAD_UNMOVED_LAYERS = _gauge(
    "torchobs.grad.unmoved_layers",
    "{layer}",
    "Layers that have learned nothing for a while: gradients too small to change a weight, or inputs that are all zero.",
    survives=True,
    quiet=0.0,
)
GRAD_ZERO = _gauge(
    "torchobs.grad.zero", "1", "Share of the parameters whose gradient is exactly zero in every element.", quiet=0.0
)
PARAM_LAYER_NORM = _gauge(
    "torchobs.param.layer.norm", "", "L2 norm of a layer's weights (of the first 8 million). From level advanced on.", LAYER
)
UPDATE_LAYER_RATIO = _gauge(
    "torchobs.update.layer.ratio",
    "1",
    "Norm of one step's change of a layer's weights, divided by the norm of the weights. From level advanced on.",
    LAYER,
)
GRAD_NONFINITE_ELEMENTS = _counter(
    "torchobs.grad.nonfinite_elements",
    "{element}",
    "Gradient elements that were NaN or infinite in measured steps; on a GPU only in layers that recently had some.",
    quiet=0.0,
)
GRAD_NONFINITE_STEPS = _counter(
    "torchobs.grad.nonfinite_steps", "{step}", "Measured steps whose gradient norm was NaN or infinite."
)
GRAD_CLIPPED_STEPS = _counter(
    "torchobs.grad.clipped_steps",
    "{step}",
    "Steps with clipped gradients. The effect of clipping by value is known in measured steps only; clipping in compiled code"
    " is not seen.",
    quiet=0.0,
)
GRAD_CLIP_MAX_NORM = _gauge("torchobs.grad.clip.max_norm", "", "Threshold for clipping gradients by norm, if used.")
GRAD_CLIP_MAX_VALUE = _gauge("torchobs.grad.clip.max_value", "", "Threshold for clipping gradients by value, if used.")

# --- verdicts -----------------------------------------------------------------------------------------------------------------
ANOMALIES = _counter("torchobs.anomalies", "{anomaly}", "Steps judged anomalous, by kind.", ANOMALY_KIND)
ANOMALY_ACTIVE = _gauge(
    "torchobs.anomaly.active",
    "",
    "1 while the last measured step was anomalous in this way.",
    ANOMALY_KIND,
    quiet=0.0,
)

# --- automatic mixed precision ------------------------------------------------------------------------------------------------
AMP_SCALE = _gauge(
    "torchobs.amp.scale",
    "",
    "Loss scale of each enabled GradScaler; read from a device at most ten times a second.",
    SCALER,
)
AMP_GROWTH_TRACKER = _gauge(
    "torchobs.amp.growth_tracker", "{step}", "Steps without overflow since the loss scale last changed.", SCALER
)
AMP_SKIP_STREAK = _gauge(
    "torchobs.amp.skip_streak",
    "{step}",
    "Steps that a loss scaler has skipped in a row up to now; of several optimizers, the longest streak.",
)
AMP_STEPS_SKIPPED = _counter(
    "torchobs.amp.steps_skipped",
    "{step}",
    "Steps that the loss scaler skipped because of non-finite gradients.",
    quiet=0.0,
)
AMP_OVERFLOWS = _counter(
    "torchobs.amp.overflows",
    "{step}",
    "Steps of each optimizer under a loss scaler that found non-finite gradients.",
    OPTIMIZER,
    quiet=0.0,
)
AMP_AUTOCAST = _gauge(
    "torchobs.amp.autocast",
    "",
    "1 for each data type that autocast uses. With bfloat16 alone there is no loss scaler, and no scale.",
    Attribute("device_type", "torch.autocast's device type, e.g. cuda"),
    Attribute("dtype", "data type, e.g. bfloat16; eight pairs at most"),
)

# --- data ---------------------------------------------------------------------------------------------------------------------
DATA_WORKER_START_TIME = _counter(
    "torchobs.data.worker_start.time",
    "s",
    "Time spent starting the worker processes of data loaders; part of the phase data.",
    integer=False,
    quiet=0.0,
)
DATA_WORKERS = _gauge(
    "torchobs.data.workers", "{process}", "Worker processes of the data loaders being iterated.", WORKER_STATE
)
DATA_WORKERS_DIED = _counter(
    "torchobs.data.workers_died",
    "{process}",
    "Worker processes of data loaders that were ended by a signal or an error.",
    quiet=0.0,
)
DATA_BATCHES_READY = _gauge(
    "torchobs.data.batches_ready",
    "{batch}",
    "Batches that the workers have finished and training has not used yet; 0 means that training waits for data.",
)
DATA_STARVED = _gauge(
    "torchobs.data.starved",
    "",
    "1 while training waits for data for a fifth of its time or more, judged over a minute and ten steps.",
)
DATA_UNPINNED_BATCHES = _counter(
    "torchobs.data.unpinned_batches",
    "{batch}",
    "Batches found in pageable memory while training on a CUDA device; one is checked every ten seconds. See `pin_memory`.",
    quiet=0.0,
)

# --- compilation --------------------------------------------------------------------------------------------------------------
COMPILE_TIME = _counter(
    "torchobs.compile.time",
    "s",
    "Time that torch.compile kept the rank's threads busy; the stages add up. dynamo: tracing and guards; aot: AOTAutograd, or "
    "another backend; inductor: lowering and code generation; kernels: compilers, autotuning and recording of CUDA graphs.",
    COMPILE_STAGE,
    integer=False,
    quiet=0.0,
)
COMPILE_COMPILATIONS = _counter(
    "torchobs.compile.compilations", "{compilation}", "Compilations of functions, and of their parts after graph breaks.",
    COMPILE_CAUSE, quiet=0.0,
)  # fmt: skip
COMPILE_RECOMPILES = _counter(
    "torchobs.compile.recompiles",
    "{compilation}",
    "Recompilations by the kind of the guard that failed.",
    COMPILE_GUARD,
    quiet=0.0,
)
COMPILE_FAILURES = _counter(
    "torchobs.compile.failures",
    "{compilation}",
    "Failed compilations: the function runs uncompiled, or raises (fullgraph=True).",
    COMPILE_FAILURE,
    quiet=0.0,
)
COMPILE_GRAPH_BREAKS = _counter(
    "torchobs.compile.graph_breaks",
    "{break}",
    "Graph breaks, counted in each compilation that has them.",
    COMPILE_BREAK,
    quiet=0.0,
)
COMPILE_CACHE_LOOKUPS = _counter(
    "torchobs.compile.cache.lookups",
    "{lookup}",
    "Lookups in the caches of compiled code: a warm start hits.",
    COMPILE_CACHE,
    CACHE_RESULT,
    quiet=0.0,
)
COMPILE_IN_PROGRESS = _gauge("torchobs.compile.in_progress", "", "1 while torch.compile is compiling in any thread.")

# --- memory -------------------------------------------------------------------------------------------------------------------
MEMORY_DEVICE_ALLOCATED = _gauge("torchobs.memory.device.allocated", "By", "Device memory in use by tensors.", DEVICE)
MEMORY_DEVICE_RESERVED = _gauge("torchobs.memory.device.reserved", "By", "Device memory held by the caching allocator.", DEVICE)
MEMORY_DEVICE_ACTIVE = _gauge(
    "torchobs.memory.device.active", "By", "Device memory in blocks that are in use, or that a stream may still use.", DEVICE
)
MEMORY_DEVICE_INACTIVE_SPLIT = _gauge(
    "torchobs.memory.device.inactive_split", "By", "Device memory in inactive split blocks: fragmentation.", DEVICE
)
MEMORY_DEVICE_PEAK = _gauge(
    "torchobs.memory.device.peak",
    "By",
    "Highest allocated device memory seen by torchobs, regardless of resets of the allocator's own peaks.",
    DEVICE,
)
MEMORY_DEVICE_LIMIT = _gauge(
    "torchobs.memory.device.limit",
    "By",
    "Device memory that this process may use: all of the device's, or its configured fraction.",
    DEVICE,
)
MEMORY_ALLOC_RETRIES = _counter(
    "torchobs.memory.alloc_retries",
    "{retry}",
    "Device allocations retried after flushing the allocator's cache.",
    DEVICE,
    quiet=0.0,
)
MEMORY_OOMS = _counter("torchobs.memory.ooms", "{error}", "Out-of-memory errors of the device allocator.", DEVICE, quiet=0.0)
MEMORY_HOST_RSS = _gauge("torchobs.memory.host.rss", "By", "Resident set size of the rank's process.")
MEMORY_HOST_PSS = _gauge(
    "torchobs.memory.host.pss",
    "By",
    "Proportional set size of the rank's process. From level advanced on.",
)
MEMORY_HOST_CHILDREN_RSS = _gauge(
    "torchobs.memory.host.children_rss",
    "By",
    "Sum of the resident set sizes of the process's children (DataLoader workers); shared pages count in each.",
    quiet=0.0,
)
MEMORY_HOST_AVAILABLE = _gauge("torchobs.memory.host.available", "By", "The machine's available memory.", shared=True)
MEMORY_HOST_UTILIZATION = _gauge(
    "torchobs.memory.host.utilization",
    "1",
    "Share of the limit, including swap, in use and not reclaimable; at 1 the kernel kills processes.",
    LIMIT,
    shared=True,
)
MEMORY_SHARED_SIZE = _gauge("torchobs.memory.shared.size", "By", "Size of /dev/shm.", shared=True)
MEMORY_SHARED_USED = _gauge("torchobs.memory.shared.used", "By", "Bytes in use in /dev/shm.", shared=True)
MEMORY_GROWTH_PER_STEP = _gauge(
    "torchobs.memory.growth_per_step", "By", "Trend of the memory in use, per step; available after four minutes.", SPACE
)
MEMORY_TIME_TO_LIMIT = _gauge(
    "torchobs.memory.time_to_limit",
    "s",
    "Time until memory that grows steadily with the steps reaches its limit; absent without such growth.",
    SPACE,
)

# --- the container ------------------------------------------------------------------------------------------------------------
CGROUP_MEMORY_WORKING_SET = _gauge(
    "torchobs.cgroup.memory.working_set",
    "By",
    "Memory of the rank's cgroup without inactive file pages, as the kubelet counts it; of the tightest, where nested.",
    shared=True,
)
CGROUP_MEMORY_LIMIT = _gauge("torchobs.cgroup.memory.limit", "By", "Memory limit of that cgroup.", shared=True)
CGROUP_MEMORY_PEAK = _gauge(
    "torchobs.cgroup.memory.peak", "By", "Highest memory usage of that cgroup, file pages included.", shared=True
)
CGROUP_MEMORY_SWAP = _gauge("torchobs.cgroup.memory.swap", "By", "Swap in use by that cgroup.", shared=True)
CGROUP_MEMORY_OOM_KILLS = _counter(
    "torchobs.cgroup.memory.oom_kills",
    "{process}",
    "Processes of that cgroup ended by the kernel's OOM killer.",
    shared=True,
)
CGROUP_MEMORY_LAST_OOM_KILL = _gauge(
    "torchobs.cgroup.memory.last_oom_kill.timestamp",
    "s",
    "Unix time at which the last such kill was seen.",
    survives=True,
    shared=True,
)
CGROUP_CPU_LIMIT = _gauge("torchobs.cgroup.cpu.limit", "{cpu}", "CPU quota of the rank's cgroup, in cores.", shared=True)
CGROUP_CPU_PERIODS = _counter("torchobs.cgroup.cpu.periods", "{period}", "Quota periods in which the cgroup ran.", shared=True)
CGROUP_CPU_THROTTLED_PERIODS = _counter(
    "torchobs.cgroup.cpu.throttled_periods",
    "{period}",
    "Quota periods in which the cgroup was throttled.",
    shared=True,
)
CGROUP_CPU_THROTTLED_TIME = _counter(
    "torchobs.cgroup.cpu.throttled_time",
    "s",
    "Time for which the cgroup's threads were throttled, summed.",
    integer=False,
    shared=True,
)
CGROUP_PRESSURE_TIME = _counter(
    "torchobs.cgroup.pressure.time",
    "s",
    "Time in which some, or all, of the cgroup's tasks waited for a resource.",
    RESOURCE,
    WAITING,
    integer=False,
    shared=True,
)

# --- checkpoints --------------------------------------------------------------------------------------------------------------
CHECKPOINTS = _counter(
    "torchobs.checkpoints",
    "{checkpoint}",
    "Checkpoints by torch.save, safetensors and torch.distributed.checkpoint. All saves between two steps are one; saves to "
    "memory count from 64 KiB on; each save that raised is a failed one. Not seen: `from torch import save` before `init()`.",
    SAVE_RESULT,
    quiet=0.0,
)
CHECKPOINT_TIMESTAMP = _gauge(
    "torchobs.checkpoint.timestamp", "s", "Unix time at which the last checkpoint was complete.", survives=True
)
CHECKPOINT_DURATION = _gauge(
    "torchobs.checkpoint.duration",
    "s",
    "Duration of the last checkpoint until it was complete; the time that training waited is the goodput state checkpoint.",
    survives=True,
)
CHECKPOINT_SIZE = _gauge("torchobs.checkpoint.size", "By", "Bytes that this rank wrote for the last checkpoint.", survives=True)

# --- distributed training -----------------------------------------------------------------------------------------------------
DISTRIBUTED_WORLD_SIZE = _gauge("torchobs.distributed.world_size", "{rank}", "Ranks in the default process group.")
DISTRIBUTED_COPIES = _gauge(
    "torchobs.distributed.copies",
    "{rank}",
    "Ranks that train on the same batch, where the mesh is known: the product of its tensor- and pipeline-parallel dimensions.",
    quiet=1.0,
)
DISTRIBUTED_INFO = _gauge(
    "torchobs.distributed.info",
    "",
    "Constant 1; its labels say how the training is spread over ranks.",
    Attribute("backend", "of the default process group, e.g. nccl"),
    Attribute("parallelism", "recognised kinds: ddp, fsdp1, fsdp2, hsdp, tensor; joined by +"),
    Attribute("mesh", "dimensions of the device mesh, e.g. dp=4,tp=2"),
    survives=True,
)
DDP_TIME = _gauge(
    "torchobs.ddp.time",
    "s",
    "Time in the iteration that DistributedDataParallel timed last: each of its first ten, then one in a hundred.",
    DDP_PART,
)
DDP_BUCKETS = _gauge("torchobs.ddp.buckets", "{bucket}", "Gradient buckets; each is one all-reduce.")
DDP_BUCKET_SIZE = _gauge("torchobs.ddp.bucket.size", "By", "Size of the largest gradient bucket.")
DDP_UNUSED_SIZE = _gauge(
    "torchobs.ddp.unused.size", "By", "Size of the parameters unused in the iteration timed last, with find_unused_parameters."
)
DDP_INFO = _gauge(
    "torchobs.ddp.info",
    "",
    "Constant 1; its labels are the settings of DistributedDataParallel.",
    Attribute("find_unused_parameters", "whether it searches for unused parameters in every iteration", ("true", "false")),
    Attribute("static_graph", "whether the graph was declared static", ("true", "false")),
    Attribute("gradient_as_bucket_view", "whether gradients live in the buckets", ("true", "false")),
    Attribute("comm_hook", "the communication hook's name, if there is one"),
    survives=True,
)

# --- hardware: OpenTelemetry's names, and what they lack as torchobs.gpu.* ----------------------------------------------------
HW_GPU_UTILIZATION = _gauge(
    "hw.gpu.utilization", "1", "Share of recent time in which a kernel ran, averaged by the driver.", GPU_ID, GPU_TASK
)
GPU_MEMORY_BUSY = _gauge(
    "torchobs.gpu.memory.busy", "1", "Share of recent time in which the GPU's memory was read or written.", GPU_ID
)
HW_GPU_MEMORY_USAGE = _updown("hw.gpu.memory.usage", "By", "GPU memory in use by all processes.", GPU_ID)
HW_GPU_MEMORY_LIMIT = _updown("hw.gpu.memory.limit", "By", "Total GPU memory.", GPU_ID)
HW_POWER = _gauge("hw.power", "W", "Power drawn at present.", GPU_ID, HW_TYPE)
HW_ENERGY = _counter("hw.energy", "J", "Energy used since the rank began to observe the GPU.", GPU_ID, HW_TYPE, integer=False)
GPU_POWER_LIMIT = _gauge("torchobs.gpu.power.limit", "W", "Power that the GPU may draw.", GPU_ID)
HW_TEMPERATURE = _gauge("hw.temperature", "Cel", "Temperature.", GPU_ID, HW_SENSOR)
GPU_CLOCK_FREQUENCY = _gauge("torchobs.gpu.clock.frequency", "Hz", "Clock of the streaming multiprocessors.", GPU_ID)
GPU_CLOCK_LIMIT = _gauge("torchobs.gpu.clock.limit", "Hz", "Highest clock that the multiprocessors can have.", GPU_ID)
GPU_THROTTLE_TIME = _counter(
    "torchobs.gpu.throttle.time",
    "s",
    "Time in which the clocks were throttled, as counted by the driver, else from a sample every ten seconds.",
    GPU_ID,
    GPU_THROTTLE,
    integer=False,
    quiet=0.0,
)
HW_ERRORS = _counter(
    "hw.errors", "{error}", "Errors of the GPU since the rank began to observe it.", GPU_ID, HW_TYPE, HW_ERROR, quiet=0.0
)
GPU_NVLINK_IO = _counter("torchobs.gpu.nvlink.io", "By", "Payload sent and received over NVLink.", GPU_ID, IO_DIRECTION)
GPU_NVLINK_LINKS = _gauge("torchobs.gpu.nvlink.links", "{link}", "NVLinks that are up.", GPU_ID)
HW_STATUS = _updown(
    "hw.status",
    "1",
    "State of the GPU. failed: lost, or a memory row cannot be remapped; degraded: it needs a reset, or had an uncorrectable"
    " ECC error.",
    GPU_ID,
    HW_TYPE,
    HW_STATE,
)
RANK_GPU_INFO = _gauge(
    "torchobs.rank.gpu.info",
    "",
    "Constant 1 for each GPU on which the rank holds memory; the labels UUID and GPU_I_ID are dcgm-exporter's.",
    GPU_ID,
    Attribute("UUID", "UUID of the physical GPU"),
    Attribute("GPU_I_ID", "number of the MIG instance on it, if it is one"),
    DEVICE,
    Attribute("hw.model", "product name"),
    survives=True,
)

# --- ranks, as the exporter sees them -----------------------------------------------------------------------------------------
RANK_STATE_SET = _gauge("torchobs.rank.state", "", "1 for the state that the rank is in.", RANK_STATE, survives=True)
RANK_UP = _gauge("torchobs.rank.up", "", "1 while the rank's process lives.", survives=True)
RANK_HEARTBEAT_TIMESTAMP = _gauge(
    "torchobs.rank.heartbeat.timestamp", "s", "Unix time of the rank's last heartbeat.", survives=True
)
RANK_PROGRESS_AGE = _gauge(
    "torchobs.rank.progress.age", "s", "Time since the rank last finished a step (since its start, before the first)."
)
RANK_START_TIME = _gauge("torchobs.rank.start_time", "s", "Unix time at which torchobs started in the rank.", survives=True)
RANK_RESTARTS = _counter("torchobs.rank.restarts", "{restart}", "Times the launcher has restarted the rank.")
RANK_SLOWDOWN = _gauge(
    "torchobs.rank.slowdown",
    "1",
    "Rank's step time over that of its peers on this machine, both without waiting for each other.",
)
RANK_EXCESS = _gauge(
    "torchobs.rank.excess", "s", "Time per step above the median of its peers on this machine, by phase.", OWN_PHASE
)
RANK_BEHIND = _gauge(
    "torchobs.rank.behind", "{step}", "Steps by which the rank is behind the furthest rank of the run on this machine."
)
RUN_LOCAL_RANKS = _gauge("torchobs.run.local_ranks", "{rank}", "Ranks of the run that live on this machine.")
RUN_MISSING_RANKS = _gauge(
    "torchobs.run.missing_ranks",
    "{rank}",
    "Ranks that the launcher started on this machine and that the exporter does not see.",
)
RUN_STEP_SPREAD = _gauge("torchobs.run.step_spread", "{step}", "Steps between the first and the last rank on this machine.")
RUN_GRAD_NORM = _gauge(
    "torchobs.run.grad_norm", "", "L2 norm of the whole gradient, combined from all ranks, if all are on this machine."
)
RANK_EXIT = _gauge(
    "torchobs.rank.exit", "", "1 for the way in which the rank ended; absent while it lives.", EXIT_REASON, survives=True
)
PROCESS_CHILDREN = _gauge(
    "torchobs.rank.process.children",
    "{process}",
    "Processes that descend from the rank's: DataLoader workers, compilers.",
    quiet=0.0,
)
PROCESS_THREADS = _gauge("torchobs.rank.process.threads", "{thread}", "Threads of the rank's process.")
PROCESS_OPEN_FILES = _gauge("torchobs.rank.process.open_fds", "{file}", "File descriptors that the rank's process has open.")
PROCESS_MAX_FILES = _gauge("torchobs.rank.process.max_fds", "{file}", "File descriptors that it may have open.")
RANK_INFO = _gauge("torchobs.rank.info", "", "Constant 1; its labels describe the rank.", survives=True)
WORLD_SIZE = _gauge("torchobs.world_size", "{rank}", "Ranks in the run, as its launcher says.", survives=True)

# --- the machine: OpenTelemetry's names, and what they lack as torchobs.host.* ------------------------------------------------
SYSTEM_CPU_TIME = _counter("system.cpu.time", "s", "CPU time of all processors together, by mode.", CPU_MODE, integer=False)
SYSTEM_CPU_LOAD = _gauge(
    "system.cpu.load_average.1m", "{thread}", "Threads that ran, or waited to run or for a disk, averaged over a minute."
)
HOST_CPUS = _gauge("torchobs.host.cpus", "{cpu}", "Logical processors that are online.")
HOST_THREADS = _gauge("torchobs.host.threads", "{thread}", "Threads that run, or wait to run or for a disk.", THREAD_STATE)
SYSTEM_MEMORY_LIMIT = _updown("system.memory.limit", "By", "The machine's memory.")
SYSTEM_MEMORY_USAGE = _updown("system.memory.usage", "By", "The machine's memory by use.", MEMORY_STATE)
SYSTEM_MEMORY_AVAILABLE = _updown(
    "system.memory.linux.available", "By", "The kernel's estimate of the memory available without swapping."
)
SYSTEM_MEMORY_SHARED = _updown(
    "system.memory.linux.shared", "By", "Shared memory, including files in a tmpfs; part of the state cached."
)
HOST_MEMORY_UNWRITTEN = _gauge(
    "torchobs.host.memory.unwritten", "By", "File pages not yet written to disk, for instance of checkpoints.",
    UNWRITTEN_STATE,
)  # fmt: skip
HOST_OOM_KILLS = _counter(
    "torchobs.host.memory.oom_kills", "{process}", "Processes ended by the kernel's OOM killer, in any cgroup."
)
SYSTEM_PAGING_USAGE = _updown("system.paging.usage", "By", "The machine's swap space.", PAGING_STATE)
SYSTEM_DISK_IO = _counter("system.disk.io", "By", "Bytes read from and written to disks.", SYSTEM_DEVICE, DISK_DIRECTION)
SYSTEM_DISK_OPERATIONS = _counter(
    "system.disk.operations", "{operation}", "Reads and writes that disks completed.", SYSTEM_DEVICE, DISK_DIRECTION
)
SYSTEM_DISK_IO_TIME = _counter("system.disk.io_time", "s", "Time in which a disk was busy.", SYSTEM_DEVICE, integer=False)
SYSTEM_DISK_OPERATION_TIME = _counter(
    "system.disk.operation_time", "s", "Time that a disk's reads and writes took, summed.", SYSTEM_DEVICE, DISK_DIRECTION,
    integer=False,
)  # fmt: skip
SYSTEM_FILESYSTEM_LIMIT = _updown("system.filesystem.limit", "By", "Size of a file system.", MOUNTPOINT, FILESYSTEM_TYPE)
SYSTEM_FILESYSTEM_USAGE = _updown(
    "system.filesystem.usage", "By", "Space in a file system by state.", MOUNTPOINT, FILESYSTEM_TYPE, FILESYSTEM_STATE
)
SYSTEM_FILESYSTEM_INODES = _updown(
    "system.filesystem.inodes.usage",
    "{inode}",
    "Inodes of a file system by state.",
    MOUNTPOINT,
    FILESYSTEM_TYPE,
    INODE_STATE,
)
HOST_FILESYSTEM_READONLY = _gauge(
    "torchobs.host.filesystem.readonly",
    "",
    "1 if the file system is read-only, as after a disk error.",
    MOUNTPOINT,
    FILESYSTEM_TYPE,
)
SYSTEM_NETWORK_IO = _counter("system.network.io", "By", "Bytes received and transmitted.", NETWORK_INTERFACE, NETWORK_DIRECTION)
SYSTEM_NETWORK_ERRORS = _counter(
    "system.network.errors", "{error}", "Errors of receiving and transmitting.", NETWORK_INTERFACE, NETWORK_DIRECTION
)
SYSTEM_NETWORK_DROPPED = _counter(
    "system.network.packet.dropped", "{packet}", "Packets dropped although they had no error.", NETWORK_INTERFACE,
    NETWORK_DIRECTION,
)  # fmt: skip

# --- torchobs itself ----------------------------------------------------------------------------------------------------------
OVERHEAD = _counter(
    "torchobs.overhead", "s", "Time that torchobs itself took in the training thread.", PROBE, integer=False, quiet=0.0
)
PROBE_ERRORS = _counter(
    "torchobs.probe.errors", "{error}", "Exceptions raised inside a probe; the first disables it.", PROBE, quiet=0.0
)
PROBE_DISABLED = _gauge("torchobs.probe.disabled", "", "1 if the probe is disabled.", PROBE, quiet=0.0)
FLIGHT_DROPPED = _counter(
    "torchobs.flight.dropped",
    "{item}",
    "Items that did not fit the flight file.",
    Attribute("what", "what was dropped", ("series", "event", "record")),
    quiet=0.0,
)
BUILD_INFO = _gauge(
    "torchobs.build.info",
    "",
    "Constant 1; its labels are the exporter's versions.",
    Attribute("version", "torchobs version"),
    Attribute("python", "Python version"),
)
EXPORTER_FILES = _gauge(
    "torchobs.exporter.files",
    "{file}",
    "Flight files in the directory, by status.",
    Attribute("status", "outcome of reading", ("served", "superseded", "expired", "bad")),
)
EXPORTER_READ_ERRORS = _counter(
    "torchobs.exporter.read_errors",
    "{error}",
    "Flight files that could not be read, by reason.",
    Attribute("reason", "why", ("header", "io", "kind", "memory", "timeout")),
)
EXPORTER_SCAN_DURATION = _gauge("torchobs.exporter.scan.duration", "s", "Duration of the last scan of all flight files.")
EXPORTER_CONFIG_OK = _gauge(
    "torchobs.exporter.config_ok", "", "0 while part of the configuration is invalid or cannot be applied."
)
EXPORTER_DUPLICATES = _counter(
    "torchobs.exporter.duplicate_ranks", "{rank}", "Times two living processes claimed one rank of one run."
)
EXPORTER_SERIES_DROPPED = _counter(
    "torchobs.exporter.series_dropped",
    "{series}",
    "Series not served, by reason.",
    Attribute("reason", "why", ("limit", "total_limit", "conflict", "drop_list")),
)
EXPORTER_CONNECTIONS_DROPPED = _counter(
    "torchobs.exporter.connections_dropped",
    "{connection}",
    "Connections closed or not accepted: too slow, too many at once, an endless body, no TLS or no valid certificate, or the"
    " kernel had no descriptor or memory for one (which then waits).",
    Attribute("reason", "why", ("slow", "crowd", "flood", "tls", "accept")),
)
EXPORTER_WRITE_ERRORS = _counter(
    "torchobs.exporter.write_errors",
    "{error}",
    "Writes that failed, as on a full disk.",
    Attribute("what", "what was to be written", ("log", "file_sd", "announcement", "control")),
)
EXPORTER_HOST_DURATION = _gauge(
    "torchobs.exporter.host.duration", "s", "Duration of the last collection of the machine's metrics."
)
EXPORTER_HOST_ERRORS = _counter(
    "torchobs.exporter.host.errors", "{error}", "Times that a collector of the machine's metrics failed.", HOST_COLLECTOR
)
EXPORTER_HOST_STUCK = _gauge(
    "torchobs.exporter.host.stuck",
    "",
    "1 while a collector has not returned for seconds, 0 otherwise: a network file system with a dead server.",
    HOST_COLLECTOR,
    MOUNTPOINT,
)
_SIGNAL = Attribute("signal", "what is pushed over OTLP: data points or spans", ("metrics", "traces"))
OTLP_RECORDED = _counter(
    "torchobs.exporter.otlp.recorded",
    "{item}",
    "Data points or spans to be pushed: the sum of sent, dropped and queued.",
    _SIGNAL,
)
OTLP_SENT = _counter("torchobs.exporter.otlp.sent", "{item}", "Data points or spans that the receiver accepted.", _SIGNAL)
OTLP_DROPPED = _counter(
    "torchobs.exporter.otlp.dropped",
    "{item}",
    "Data points or spans dropped: the queue was full, the receiver refused the request or rejected a part of it, or the"
    " exporter ended.",
    _SIGNAL,
    Attribute("reason", "why", ("overflow", "refused", "rejected", "shutdown")),
)
OTLP_QUEUED = _gauge("torchobs.exporter.otlp.queued", "{item}", "Data points or spans that wait to be sent.", _SIGNAL)
OTLP_FAILURES = _counter(
    "torchobs.exporter.otlp.failures", "{request}", "Requests that failed and were, or will be, retried.", _SIGNAL
)
OTLP_UNREAD = _counter(
    "torchobs.exporter.otlp.unread",
    "By",
    "Spans and events overwritten in a rank's ring before the push had read them: the rank wrote more of them within a second"
    " than the ring holds.",
)

# --- events -------------------------------------------------------------------------------------------------------------------
EVENT_RUN_START = Event("torchobs.run.start", "torchobs.init() has finished.", Severity.INFO)
EVENT_RUN_END = Event("torchobs.run.end", "The rank finished normally.", Severity.INFO, (EXIT_REASON,))
EVENT_TRAINER = Event(
    "torchobs.trainer",
    "A framework's trainer started. Its other attributes are its settings with a number or a single word as value.",
    Severity.INFO,
    (Attribute("framework", "lightning, transformers or accelerate"), Attribute("version", "the framework's")),
)
EVENT_EXCEPTION = Event(
    "torchobs.exception",
    "An uncaught exception. In the main thread it ends the rank; in another thread, a notebook's cell or a test it does not.",
    Severity.ERROR,
    (
        Attribute("exception.type", "its class"),
        Attribute("location", "file:line where it was raised"),
        Attribute("caller", "innermost file:line of the user's own code, if different"),
        Attribute("cause.type", "class of the first exception of the chain, if it is a chain"),
        Attribute("cause.location", "file:line where that exception was raised"),
        Attribute("cause.caller", "innermost file:line of the user's own code in it, if different"),
        Attribute("origin", "the worker or other process that raised it, if not the rank's own; location is there then"),
        Attribute("reraised", "file:line of the user's own code in the rank where it was raised again"),
        Attribute("cause.origin", "origin of the first exception of the chain"),
        Attribute("cause.reraised", "reraised of the first exception of the chain"),
        Attribute("thread", "the thread's name, if it is not the main one"),
    ),
)
EVENT_DISTRIBUTED = Event(
    "torchobs.distributed",
    "How the training is spread over ranks was recognised, or changed.",
    Severity.INFO,
    (
        Attribute("backend", "of the default process group"),
        Attribute("world_size", "its ranks"),
        Attribute("parallelism", "what was recognised"),
        Attribute("mesh", "dimensions of the device mesh"),
    ),
)
EVENT_GPU_LOST = Event(
    "torchobs.gpu.lost",
    "A GPU no longer responds.",
    Severity.ERROR,
    (GPU_ID, Attribute("reason", "what its library says: lost, reset_required, silent")),
)
EVENT_GPU_XID = Event(
    "torchobs.gpu.xid",
    "The driver reported an error of a GPU (an XID).",
    Severity.ERROR,
    (GPU_ID, Attribute("xid", "number in NVIDIA's list of XIDs"), Attribute("meaning", "its meaning, if known")),
)
EVENT_ANOMALY = Event(
    "torchobs.anomaly",
    "A step was judged anomalous.",
    Severity.WARNING,
    (
        ANOMALY_KIND,
        Attribute("value", "observed value"),
        Attribute("baseline", "usual value"),
        Attribute(
            "left_out", "number of earlier ones of the kind without an event: of many in a row, one in ten minutes has one"
        ),
    ),
)
EVENT_SCHEDULER_MISUSED = Event(
    "torchobs.scheduler.misused",
    "A learning-rate scheduler is used wrongly: stepped before the optimizer, never, or for one that does not step.",
    Severity.WARNING,
    (SCHEDULER_MISUSE_KIND, Attribute("scheduler", "its class")),
)
EVENT_AMP_SCALE_COLLAPSED = Event(
    "torchobs.amp.scale_collapsed",
    "A loss scale has fallen below 1: the gradients are not finite at any scale.",
    Severity.WARNING,
    (SCALER, Attribute("scale", "the loss scale")),
)
EVENT_AMP_UNSCALED = Event(
    "torchobs.amp.unscaled",
    "The run trains in float16 autocast without a GradScaler: small gradients become zero.",
    Severity.WARNING,
    (Attribute("steps", "steps done so far"),),
)
EVENT_AMP_CLIPPED_SCALED = Event(
    "torchobs.amp.clipped_scaled",
    "Gradients were clipped by norm before the loss scaler divided them by its scale: to the limit over the scale.",
    Severity.WARNING,
    (Attribute("limit", "the threshold that was given"), Attribute("scale", "the loss scale")),
)
EVENT_DEVICE_UNREAD = Event(
    "torchobs.device.unread",
    "Losses and gradient norms on this kind of device are not recorded: reading them would block the training.",
    Severity.WARNING,
    (Attribute("device_type", "torch's name of the kind of device"),),
)
EVENT_MEMORY_GROWTH = Event(
    "torchobs.memory.growth",
    "Memory grows steadily with the steps, and would reach its limit within a day.",
    Severity.WARNING,
    (SPACE, Attribute("per_step", "bytes a step"), Attribute("time_to_limit", "seconds until then")),
)
EVENT_OUT_OF_MEMORY = Event(
    "torchobs.memory.out_of_memory",
    "The device allocator ran out of memory; recorded before the exception is raised. Sizes in bytes.",
    Severity.ERROR,
    (
        DEVICE,
        Attribute("requested", "requested size"),
        Attribute("limit", "memory that this process may use"),
        Attribute("free", "free memory of the device"),
        Attribute("allocated", "in use by tensors"),
        Attribute("reserved", "held by the allocator"),
        Attribute("active", "in blocks that are in use"),
        Attribute("inactive_split", "in inactive split blocks"),
        Attribute("allocations", "blocks in use"),
        Attribute("alloc_retries", "allocations tried again so far"),
        Attribute("ooms", "such errors so far, without this one"),
        Attribute("largest", "where most of it was allocated (file:line, size, blocks), if torch records its history"),
    ),
)
EVENT_SHARED_MEMORY_FULL = Event(
    "torchobs.memory.shared_full",
    "Shared memory (/dev/shm), through which DataLoader workers and NCCL pass data, is nearly full.",
    Severity.WARNING,
    (Attribute("used", "bytes in use"), Attribute("size", "bytes in all")),
)
EVENT_NONFINITE_GRADIENT = Event(
    "torchobs.grad.nonfinite",
    "Gradients were not finite: the first time, and then at most once a minute.",
    Severity.WARNING,
    (
        Attribute("layers", "in which layers, the first eight in the model's order"),
        Attribute("layers_affected", "in how many"),
        Attribute("elements", "how many elements, where they were counted"),
        Attribute("kinds", "nan, inf or both"),
    ),
)
EVENT_UNMOVED_LAYERS = Event(
    "torchobs.grad.unmoved",
    "Layers learn nothing: the gradient vanishes before it reaches them, or the units before a layer are dead.",
    Severity.WARNING,
    (
        Attribute("layers", "which, the first eight in the model's order"),
        Attribute("layers_affected", "how many"),
        Attribute("layers_measured", "of how many"),
        Attribute("cause", "why", ("vanishing", "dead_units")),
        Attribute("at", "of the layers without gradient the one nearest to the loss, or the first with only zeros as input"),
    ),
)
EVENT_PROBE_DISABLED = Event(
    "torchobs.probe.disabled",
    "A probe raised and was switched off.",
    Severity.WARNING,
    (PROBE, Attribute("exception.type", "its class"), Attribute("location", "file:line where it was raised")),
)
EVENT_MODEL = Event(
    "torchobs.model",
    "A model was passed to torchobs.watch().",
    Severity.INFO,
    (
        Attribute("name", "its class"),
        Attribute("parameters", "elements in its parameters"),
        Attribute("trainable", "elements that are trained"),
    ),
)
EVENT_SCALARS = Event(
    "torchobs.scalars",
    "Points of the curves of scalars given to torchobs.log(), for the page, top, inspect and the API.",
    Severity.INFO,
    (
        Attribute("names", "names of the scalars"),
        Attribute("steps", "step after which each was logged"),
        Attribute("values", "values logged"),
    ),
)
EVENT_MODEL_CHANGE = Event(
    "torchobs.model_change",
    "Training continues with parameters never trained before (the next fold, the next trial); baselines are reset.",
    Severity.INFO,
    (Attribute("changes", "how many there were"), Attribute("steps_before", "steps done before it")),
)
EVENT_CHILDREN = Event(
    "torchobs.children",
    "A process without a step has started others by multiprocessing; they become ranks only by joining a process group.",
    Severity.INFO,
    (Attribute("count", "how many there were at the same time"),),
)
EVENT_OTHER_THREAD = Event(
    "torchobs.other_thread",
    "A second thread steps optimizers at the same time as the recorded one; its steps are not counted.",
    Severity.WARNING,
    (Attribute("thread", "its name"),),
)
EVENT_WORKER_DIED = Event(
    "torchobs.data.worker_died",
    "A worker process of a data loader was ended by a signal or an error.",
    Severity.ERROR,
    (
        Attribute("pid", "its process id"),
        Attribute("code", "its exit code, 0 for a signal"),
        Attribute("signal", "the signal's name, e.g. SIGKILL: the out-of-memory killer's"),
    ),
)
EVENT_STARVED = Event(
    "torchobs.data.starved",
    "Training has begun to wait for data for a fifth of its time or more.",
    Severity.WARNING,
    (Attribute("share", "of the training time of the last minute, or the last ten steps"),),
)
EVENT_UNPINNED = Event(
    "torchobs.data.unpinned",
    "The first batch found in pageable memory: `pin_memory=True` lets copies to the device overlap with computation.",
    Severity.INFO,
    (Attribute("size", "bytes of it in pageable memory"),),
)
EVENT_CHECKPOINT_FAILED = Event(
    "torchobs.checkpoint.failed",
    "A save raised an exception, for lack of space or another reason.",
    Severity.ERROR,
    (
        Attribute("format", "what was saving", ("torch", "safetensors", "distributed")),
        Attribute("exception.type", "the exception's class"),
    ),
)
EVENT_RECOMPILE = Event(
    "torchobs.compile.recompile",
    "A function was compiled again.",
    Severity.INFO,
    (COMPILE_LOCATION, COMPILE_GUARD, Attribute("expression", "the guard that failed, without values")),
)
EVENT_RECOMPILE_STORM = Event(
    "torchobs.compile.recompile_storm",
    "A function is compiled again and again; at most once a minute for each.",
    Severity.WARNING,
    (
        COMPILE_LOCATION,
        COMPILE_GUARD,
        Attribute("expression", "the guard that failed last, without values"),
        Attribute("recompiles", "how often it failed within ten minutes"),
    ),
)
EVENT_COMPILE_FAILED = Event(
    "torchobs.compile.failure",
    "torch.compile gave up on a function.",
    Severity.WARNING,
    (COMPILE_LOCATION, COMPILE_FAILURE, Attribute("exception.type", "class of the compiler's exception")),
)
EVENT_GRAPH_BREAK = Event(
    "torchobs.compile.graph_break",
    "A graph break; recorded once per location.",
    Severity.INFO,
    (Attribute("location", "file:line"), COMPILE_BREAK, Attribute("message", "the reason's first line, without values")),
)
EVIDENCE = Attribute("evidence", "id of the file in the exporter's API")
EVENT_STACKS = Event(
    "torchobs.stacks",
    "The stacks of all threads were written, on request or because the GIL was held for seconds.",
    Severity.INFO,
    (
        Attribute("cause", "why", ("asked", "stuck")),
        EVIDENCE,
        Attribute("silent_s", "for a stuck rank: seconds for which no other thread could run"),
    ),
)
LACK = Attribute("detail", "the system's error message, or the space needed")
EVENT_STACKS_FAILED = Event(
    "torchobs.stacks_failed",
    "Stacks could not be written, or not completely.",
    Severity.WARNING,
    (
        Attribute("cause", "why they were to be written", ("asked", "stuck")),
        Attribute("reason", "why they were not written", ("no_room", "not_permitted", "error")),
        LACK,
        EVIDENCE,
    ),
)
EVENT_PROFILE_START = Event(
    "torchobs.profile.start",
    "A requested profile has begun.",
    Severity.INFO,
    (Attribute("steps", "number of steps to profile"), EVIDENCE),
)
EVENT_PROFILE_END = Event(
    "torchobs.profile.end",
    "The profiler's trace was written.",
    Severity.INFO,
    (
        Attribute("reason", "why it ended", ("complete", "time", "memory", "interrupted")),
        Attribute("steps", "number of steps profiled"),
        Attribute("size", "bytes of the trace, compressed"),
        EVIDENCE,
    ),
)
EVENT_PROFILE_FAILED = Event(
    "torchobs.profile.failed",
    "A requested profile has no trace.",
    Severity.WARNING,
    (
        Attribute(
            "reason",
            "why",
            ("profiler_in_use", "no_step", "too_large", "no_room", "not_permitted", "temporary_directory", "error"),
        ),
        LACK,
        Attribute("exception.type", "class of the exception, for an error"),
        EVIDENCE,
    ),
)

# --- spans --------------------------------------------------------------------------------------------------------------------
SPAN_RUN = Span("torchobs.run", "From init() to the rank's end; the launcher's TRACEPARENT is its parent.")
SPAN_PHASE = Span(
    "torchobs.phase",
    "A region opened by torchobs.phase(), when it lasts 100 ms or longer.",
    (Attribute("phase", "the name given"),),
)
SPAN_EPOCH = Span(
    "torchobs.epoch",
    "A pass over the training loader, until the next one begins or the run ends.",
    (Attribute("epoch", "its number, from 1"), Attribute("steps", "steps that ended in it")),
)
SPAN_EVALUATION = Span(
    "torchobs.evaluation",
    "An evaluation: between eval() and train(), or while batches are fetched with gradients disabled. All of 100 ms "
    "or longer, and some shorter ones.",
)
SPAN_CHECKPOINT = Span(
    "torchobs.checkpoint",
    "A save; an asynchronous one until it is complete. All of 100 ms or longer, and some shorter ones.",
    (
        Attribute("format", "what saved", ("torch", "safetensors", "distributed")),
        Attribute("size", "bytes this rank wrote"),
        Attribute("blocked_s", "for an asynchronous one: seconds for which training waited"),
    ),
)
SPAN_RESTORE = Span(
    "torchobs.restore",
    "torch.load or torch.distributed.checkpoint.load in the training thread, when it takes 100 ms or longer.",
    (Attribute("format", "what loaded", ("torch", "distributed")),),
)
SPAN_STEP = Span(
    "torchobs.step",
    "A training step, from the end of the last one: one every ten seconds, and some slow and anomalous ones. If a step is not "
    "one fetch, backward and optimizer in sequence, its phases are sums, in attributes (`forward_s` ...).",
    (
        Attribute("step", "its number"),
        Attribute("reason", "why it was recorded: user means that the application began a span in it",
                  ("sampled", "slow", "anomalous", "user")),
        Attribute("duration_s", "as in torchobs.step.duration; absent for the first step, whose start is unknown"),
        Attribute("loss", "its loss"),
        Attribute("grad_norm", "its gradient norm"),
        Attribute("skipped", "true if the loss scaler skipped it"),
        Attribute("ended", "false for one that the run's end interrupted"),
    ),
)  # fmt: skip
SPAN_STEP_PHASE = Span("torchobs.step_phase", "A part of a step whose span is recorded.", (PHASE,))
SPAN_COMPILE = Span(
    "torchobs.compile",
    "A compilation: of a function, or of a graph's backward.",
    (
        Attribute("function", "its name"),
        COMPILE_LOCATION,
        Attribute("cause", "first, recompile or backward"),
        Attribute("cached", "whether Inductor's code came from its cache; absent without a lookup"),
    ),
)


METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
EVENTS: tuple[Event, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Event))
SPANS: tuple[Span, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Span))
BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}
