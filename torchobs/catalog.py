"""Every metric, event and span of torchobs, described once; names follow OpenTelemetry, units UCUM.

Everything else is derived by import: the flight file's series, the exporter's page, the dashboards, the alert rules and
``docs/metrics.md``. A dashboard that names an unknown metric is an ``AttributeError``.

Dimensionless gauges that are no ratio have the empty unit, because a gauge with unit ``1`` becomes ``_ratio`` in Prometheus.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

__all__ = ["Attribute", "Event", "Kind", "Metric", "Severity", "Span", "cumulative", "prometheus_label", "prometheus_name"]


class Kind(Enum):
    """What an instrument is; the values are the ones stored in the flight file."""

    COUNTER = 1
    UPDOWN = 2
    GAUGE = 3
    HISTOGRAM = 4


def cumulative(kind: Kind) -> bool:
    """Return True if a value only grows, so that it means something after its process has gone."""
    return kind is Kind.COUNTER or kind is Kind.HISTOGRAM  # a set would take a hash in Python, for each of 10^6 series


class Severity(Enum):
    """OpenTelemetry severity numbers of the events that torchobs emits."""

    INFO = 9
    WARNING = 13
    ERROR = 17


@dataclass(frozen=True, slots=True)
class Attribute:
    """A metric's label: its name, what it means, and its closed set of values (empty: open, but capped by its probe)."""

    name: str
    brief: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Metric:
    """One instrument. ``survives``: a dead rank keeps showing its last value for the grace (counters always do).

    ``quiet``: a value at which its series are not yet on the exporter's page; they are from the first other one on. ``shared``:
    it is a fact of the container or the machine, the same for all ranks in it, and so has no rank.
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
    """A dated fact in the event ring, exported as a span event and shown by the page and by ``inspect``."""

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


# Powers of two and of four: exact boundaries of base-2 exponential and of Prometheus native histograms, so that both
# conversions lose nothing. Norms from 2e-4 to 4096 are told apart: each bound is a series per rank, and one beyond them is an
# anomaly, of which the gauge and the event say how large it was.
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

    Source: the rules of ``prometheus/otlptranslator``; a test compares with a running Prometheus 3. A name of which nothing is
    left, which Prometheus refuses, is ``_``, so that a page stays a page.
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

    Names that the endpoint refuses (nothing but underscores is left) or drops (``__name__``, which on a page would rename the
    series) get the ``key`` that it puts before a single underscore.
    """
    label = _NOT_LABEL.sub("_", name)
    if label[:1].isdigit():
        return f"key_{label}"
    reserved = not label.strip("_") or label == "__name__" or (label.startswith("_") and not label.startswith("__"))
    return f"key{label}" if reserved else label


def _unit_suffixes(unit: str, words: list[str]) -> list[str]:
    """The words that a unit adds to a name's: ``By/s`` is ``bytes``, ``per_second``, each unless the name has it already."""
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
"""The one state of goodput that is no part of the steps, and so not the fold's."""
ANOMALY_KINDS = ("nonfinite_loss", "nonfinite_gradient", "gradient_explosion", "loss_spike", "gradient_vanishing")
SCHEDULER_MISUSES = ("before_optimizer", "never_stepped", "idle_optimizer")
COMPILE_STAGES = ("dynamo", "aot", "inductor", "kernels")
COMPILE_GUARDS = ("shape", "tensor", "global_state", "type", "value", "other")
RANK_STATES = ("alive", "unresponsive", "hung", "finished", "failed", "lost")
SAVE_RESULTS = ("saved", "failed")
EXIT_REASONS = ("finished", "exception", "exit_code", "interrupted", "lost", "out_of_memory")

ANOMALY_SEVERITY = {
    "nonfinite_loss": Severity.ERROR,
    "nonfinite_gradient": Severity.WARNING,
    "gradient_explosion": Severity.WARNING,
    "loss_spike": Severity.WARNING,
    "gradient_vanishing": Severity.WARNING,
}
"""A function of the kind, so that it needs no label: a non-finite gradient may be the loss scaler at work."""

PHASE = Attribute("phase", "part of a training step", PHASES)
OWN_PHASES = ("data", "forward", "optimizer", "other")
OWN_PHASE = Attribute("phase", "part of a step; within backward a rank may wait for the slowest", OWN_PHASES)
GOODPUT_STATE = Attribute("state", "what the wall time went into", (*GOODPUT_STATES, STARTUP))
ANOMALY_KIND = Attribute("kind", "what went wrong", ANOMALY_KINDS)
RANK_STATE = Attribute("state", "the rank's state; one is 1, the others 0", RANK_STATES)
EXIT_REASON = Attribute("reason", "how the rank ended", EXIT_REASONS)
GPU_ID = Attribute("hw.id", "UUID of the GPU, or of the MIG instance")
HW_TYPE = Attribute("hw.type", "kind of component", ("gpu",))
HW_STATE = Attribute("hw.state", "one is 1, the others 0", ("ok", "degraded", "failed"))
HW_ERROR = Attribute("error.type", "what failed", ("ecc_corrected", "ecc_uncorrected", "xid", "nvlink", "pcie_replay"))
HW_SENSOR = Attribute("hw.sensor_location", "where it is measured", ("gpu", "memory"))
GPU_TASK = Attribute("hw.gpu.task", "kind of work", ("general",))
GPU_THROTTLE = Attribute("reason", "what held the clocks down", ("power", "thermal"))
IO_DIRECTION = Attribute("network.io.direction", "seen from the GPU", ("receive", "transmit"))
DDP_PART = Attribute(
    "part",
    "forward, backward (to the last gradient), communication (from the first all-reduce to the last), and how much of that"
    " computation hid",
    ("forward", "backward", "communication", "overlap"),
)
GROUP = Attribute("group", "index of the optimizer's parameter group, the first eight")
SCHEDULER_MISUSE_KIND = Attribute("kind", "what was done wrong", SCHEDULER_MISUSES)
SCALER = Attribute("scaler", "index of the GradScaler in use, by its first update", ("0", "1", "2", "3"))
OPTIMIZER = Attribute("optimizer", "index of the optimizer in use, by its first step under a loss scaler", ("0", "1", "2", "3"))
SCALAR = Attribute("name", "the name given to torchobs.log(), the first 64")
LAYER = Attribute(
    "layer", "module that has the parameters, by its path; the largest and the last anomalous ones, the rest is 'other'"
)
DEVICE = Attribute("device", "torch device, e.g. cuda:0")
SPACE = Attribute("space", "memory that grows", ("host", "device"))
LIMIT = Attribute("limit", "whose limit", ("cgroup", "machine"))
RESOURCE = Attribute("resource", "what tasks waited for", ("cpu", "memory", "io"))
WAITING = Attribute("waiting", "how many of them", ("some", "full"))
COMPILE_STAGE = Attribute("stage", "what torch.compile did meanwhile", COMPILE_STAGES)
COMPILE_CAUSE = Attribute("cause", "why it was compiled", ("first", "recompile"))
COMPILE_GUARD = Attribute("guard", "kind of the guard that failed", COMPILE_GUARDS)
COMPILE_FAILURE = Attribute("reason", "why nothing was compiled", ("unsupported", "recompile_limit", "error"))
COMPILE_BREAK = Attribute("reason", "class of the reason", ("data_dependent", "call", "other"))
COMPILE_LOCATION = Attribute("location", "file:line of the function's first line")
COMPILE_CACHE = Attribute("cache", "Inductor's cache of graphs, or AOTAutograd's above it", ("fx_graph", "autograd"))
CACHE_RESULT = Attribute("result", "outcome of the lookup", ("hit", "miss", "bypass"))
SAVE_RESULT = Attribute("result", "how the save ended", SAVE_RESULTS)
WORKER_STATE = Attribute("state", "configured, or alive of these", ("configured", "alive"))
PROBE = Attribute("probe", "the probe's name")

HOST_COLLECTORS = ("cpu", "memory", "disk", "filesystem", "network")
CPU_MODES = ("user", "nice", "system", "idle", "iowait", "interrupt", "steal")
THREAD_STATES = ("runnable", "blocked")
MEMORY_STATES = ("used", "free", "buffers", "cached")
UNWRITTEN_STATES = ("dirty", "writeback")
PAGING_STATES = ("used", "free")
FILESYSTEM_STATES = ("used", "free", "reserved")
INODE_STATES = ("used", "free")
HOST_COLLECTOR = Attribute("collector", "what was to be collected", HOST_COLLECTORS)
CPU_MODE = Attribute("cpu.mode", "what the processors did", CPU_MODES)
THREAD_STATE = Attribute("state", "runnable: running or waiting for a processor; blocked: for a disk", THREAD_STATES)
MEMORY_STATE = Attribute("system.memory.state", "what it is used for; they add up to the total", MEMORY_STATES)
UNWRITTEN_STATE = Attribute("state", "dirty: to be written; writeback: being written", UNWRITTEN_STATES)
PAGING_STATE = Attribute("system.paging.state", "whether it is in use", PAGING_STATES)
SYSTEM_DEVICE = Attribute("system.device", "physical disk, e.g. nvme0n1; 64 at most")
DISK_DIRECTION = Attribute("disk.io.direction", "read or write", ("read", "write"))
MOUNTPOINT = Attribute("system.filesystem.mountpoint", "where it is mounted")
FILESYSTEM_TYPE = Attribute("system.filesystem.type", "its type, e.g. xfs")
FILESYSTEM_STATE = Attribute("system.filesystem.state", "reserved: free, for root only", FILESYSTEM_STATES)
INODE_STATE = Attribute("state", "whether there is a file", INODE_STATES)
NETWORK_INTERFACE = Attribute("network.interface.name", "physical interface, or a container's own, e.g. eth0; 64 at most")
NETWORK_DIRECTION = Attribute("network.io.direction", "seen from this machine", ("receive", "transmit"))

# --- progress -----------------------------------------------------------------------------------------------------------------
STEPS = _counter("torchobs.steps", "{step}", "Training steps completed, those that a loss scaler skipped included.")
STEP_DURATION = _histogram(
    "torchobs.step.duration",
    "s",
    "Time from one step's end to the next one's; evaluation, checkpoints and compilation excluded.",
    SECONDS_BOUNDS,
)
STEP_PHASE_TIME = _counter("torchobs.step.phase.time", "s", "Time spent in each phase of the steps.", PHASE, integer=False)
LAST_STEP_TIMESTAMP = _gauge("torchobs.last_step.timestamp", "s", "Unix time at which the last step ended.", survives=True)
MODEL_CHANGES = _counter(
    "torchobs.model_changes",
    "{change}",
    "Times that training went on with parameters never trained before: the next fold or trial, whose baselines begin anew.",
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
    "Weight decay of the first parameter group, and of the next three as far as theirs differ.",
    GROUP,
    survives=True,
)
OPTIMIZER_MOMENTUM = _gauge(
    "torchobs.optimizer.momentum",
    "",
    "Momentum, or Adam's beta1, of the first parameter group, and of the next three as far as theirs differ.",
    GROUP,
    survives=True,
)
OPTIMIZER_BETA2 = _gauge(
    "torchobs.optimizer.beta2",
    "",
    "Adam's beta2 of the first parameter group, and of the next three as far as theirs differ.",
    GROUP,
    survives=True,
)
SCHEDULER_STEPS = _counter(
    "torchobs.scheduler.steps", "{step}", "Times that the run stepped a learning-rate scheduler; a chain of them counts once."
)
SCHEDULER_MISUSE = _counter(
    "torchobs.scheduler.misuses",
    "{scheduler}",
    "Learning-rate schedulers used wrongly, by how.",
    SCHEDULER_MISUSE_KIND,
    quiet=0.0,
)
SAMPLES = _counter("torchobs.samples", "{sample}", "Samples given to torchobs.log().", quiet=0.0)
TOKENS = _counter("torchobs.tokens", "{token}", "Tokens given to torchobs.log().", quiet=0.0)
STEPS_PLANNED = _gauge("torchobs.steps.planned", "{step}", "Steps the run will take, where it told us.", survives=True)
EPOCHS = _counter("torchobs.epochs", "{epoch}", "Passes over the training loader begun on this rank since its start.")
GOODPUT_TIME = _counter(
    "torchobs.goodput.time",
    "s",
    "Wall time by what it went into, which adds up to the rank's life. productive: training without waiting for data; startup: "
    "before the first step; idle: after the last one, or nothing of a step was seen for three times the longest one (at least "
    "10 s).",
    GOODPUT_STATE,
    integer=False,
    quiet=0.0,
)
SCALAR_VALUE = _gauge("torchobs.scalar", "", "Last value of each extra number given to torchobs.log().", SCALAR, survives=True)

# --- gradients ----------------------------------------------------------------------------------------------------------------
GRAD_NORM = _gauge(
    "torchobs.grad.norm",
    "",
    "L2 norm of all gradients before the optimizer's step, unscaled, before clipping; as the optimizer found them where"
    " compiled code has clipped them. Finite values only.",
    survives=True,
)
GRAD_NORM_DISTRIBUTION = _histogram(
    "torchobs.grad.norm_distribution", "", "Distribution of the total gradient norm over the steps measured.", NORM_BOUNDS
)
GRAD_INTERVAL = _gauge("torchobs.grad.interval", "{step}", "Every how many steps the gradient norm is measured at present.")
GRAD_NORM_RANKS = _gauge(
    "torchobs.grad.norm_ranks",
    "{rank}",
    "Ranks whose gradient norms add up, squared, to the whole's: 1 where each has all, more where it is sharded.",
    survives=True,
    quiet=1.0,
)
GRAD_LAYER_NORM = _gauge(
    "torchobs.grad.layer.norm", "", "L2 norm of a layer's gradient, of this rank's part where parameters are sharded.", LAYER
)
GRAD_LAYERS_FOLDED = _gauge(
    "torchobs.grad.layers_folded", "{layer}", "Layers without series of their own: they are 'other'.", quiet=0.0
)
GRAD_UNMOVED_LAYERS = _gauge(
    "torchobs.grad.unmoved_layers",
    "{layer}",
    "Layers that have learned nothing for a while: gradients too small to move a weight, or nothing but zeros coming in.",
    survives=True,
    quiet=0.0,
)
GRAD_ZERO = _gauge(
    "torchobs.grad.zero", "1", "Share of the parameters' gradients whose every element is exactly zero.", quiet=0.0
)
PARAM_LAYER_NORM = _gauge(
    "torchobs.param.layer.norm", "", "L2 norm of a layer's weights (of their first 8 million). From level advanced on.", LAYER
)
UPDATE_LAYER_RATIO = _gauge(
    "torchobs.update.layer.ratio",
    "1",
    "Norm of what one step changes of a layer's weights over the norm of these. From level advanced on.",
    LAYER,
)
GRAD_NONFINITE_ELEMENTS = _counter(
    "torchobs.grad.nonfinite_elements",
    "{element}",
    "Gradient elements that were NaN or infinite in measured steps; on a GPU counted in layers that were so lately.",
    quiet=0.0,
)
GRAD_NONFINITE_STEPS = _counter(
    "torchobs.grad.nonfinite_steps", "{step}", "Measured steps whose gradient norm was NaN or infinite."
)
GRAD_CLIPPED_STEPS = _counter(
    "torchobs.grad.clipped_steps",
    "{step}",
    "Steps whose gradient was clipped; whether clipping by value had an effect is known of measured steps only; what"
    " compiled code clips is not seen.",
    quiet=0.0,
)
GRAD_CLIP_MAX_NORM = _gauge("torchobs.grad.clip.max_norm", "", "Norm to which gradients are clipped, where they are.")
GRAD_CLIP_MAX_VALUE = _gauge("torchobs.grad.clip.max_value", "", "Size to which gradient elements are clipped, where they are.")

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
    "Loss scale of each enabled GradScaler; on a device it is read ten times a second at most.",
    SCALER,
)
AMP_GROWTH_TRACKER = _gauge(
    "torchobs.amp.growth_tracker", "{step}", "Steps without overflow since the loss scale last changed.", SCALER
)
AMP_SKIP_STREAK = _gauge(
    "torchobs.amp.skip_streak",
    "{step}",
    "Steps that a loss scaler skipped in a row, up to now; of several optimizers, the one that waits longest.",
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
    "1 for each data type that autocast was seen to compute in. With bfloat16 alone there is no loss scaler, and no scale.",
    Attribute("device_type", "torch.autocast's device type, e.g. cuda"),
    Attribute("dtype", "data type, e.g. bfloat16; eight pairs at most"),
)

# --- data ---------------------------------------------------------------------------------------------------------------------
DATA_WORKER_START_TIME = _counter(
    "torchobs.data.worker_start.time",
    "s",
    "Time spent in starting the worker processes of data loaders; a part of the phase data.",
    integer=False,
    quiet=0.0,
)
DATA_WORKERS = _gauge(
    "torchobs.data.workers", "{process}", "Worker processes of the data loaders being iterated.", WORKER_STATE
)
DATA_WORKERS_DIED = _counter(
    "torchobs.data.workers_died",
    "{process}",
    "Worker processes of data loaders that a signal or an error ended.",
    quiet=0.0,
)
DATA_BATCHES_READY = _gauge(
    "torchobs.data.batches_ready",
    "{batch}",
    "Batches that the workers have finished and training has not taken; 0 means that it waits for them.",
)
DATA_STARVED = _gauge(
    "torchobs.data.starved",
    "",
    "1 while training waits for data for a fifth of its time or more, judged over a minute and ten steps.",
)
DATA_UNPINNED_BATCHES = _counter(
    "torchobs.data.unpinned_batches",
    "{batch}",
    "Batches in pageable memory while training on a CUDA device, of one looked at every ten seconds: see `pin_memory`.",
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
    "torchobs.compile.compilations", "{compilation}", "Functions, and the rest of them behind a graph break, compiled.",
    COMPILE_CAUSE, quiet=0.0,
)  # fmt: skip
COMPILE_RECOMPILES = _counter(
    "torchobs.compile.recompiles",
    "{compilation}",
    "Compilations because of a guard that failed, by its kind.",
    COMPILE_GUARD,
    quiet=0.0,
)
COMPILE_FAILURES = _counter(
    "torchobs.compile.failures",
    "{compilation}",
    "Compilations that failed: what was to be compiled runs uncompiled, or raises (fullgraph=True).",
    COMPILE_FAILURE,
    quiet=0.0,
)
COMPILE_GRAPH_BREAKS = _counter(
    "torchobs.compile.graph_breaks",
    "{break}",
    "Places at which a graph had to end, counted in each compilation that meets them.",
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
COMPILE_IN_PROGRESS = _gauge("torchobs.compile.in_progress", "", "1 while torch.compile is at work in any thread.")

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
    "Highest allocated device memory seen by torchobs, whatever resets the allocator's own peaks.",
    DEVICE,
)
MEMORY_DEVICE_LIMIT = _gauge(
    "torchobs.memory.device.limit",
    "By",
    "Device memory that this process may take: the device's, or its fraction of it.",
    DEVICE,
)
MEMORY_ALLOC_RETRIES = _counter(
    "torchobs.memory.alloc_retries",
    "{retry}",
    "Device allocations that flushed the allocator's cache to be tried again.",
    DEVICE,
    quiet=0.0,
)
MEMORY_OOMS = _counter("torchobs.memory.ooms", "{error}", "Out-of-memory errors of the device allocator.", DEVICE, quiet=0.0)
MEMORY_HOST_RSS = _gauge("torchobs.memory.host.rss", "By", "Resident set of the rank's process.")
MEMORY_HOST_PSS = _gauge(
    "torchobs.memory.host.pss", "By", "Proportional set of the rank's process: shared pages by their share. From advanced on."
)
MEMORY_HOST_CHILDREN_RSS = _gauge(
    "torchobs.memory.host.children_rss",
    "By",
    "Resident sets of the process's children (DataLoader workers), summed: a page that they share counts in each.",
    quiet=0.0,
)
MEMORY_HOST_AVAILABLE = _gauge("torchobs.memory.host.available", "By", "The machine's available memory.", shared=True)
MEMORY_HOST_UTILIZATION = _gauge(
    "torchobs.memory.host.utilization",
    "1",
    "Share of the limit, swap included, that is taken and cannot be given back: at 1 the kernel kills.",
    LIMIT,
    shared=True,
)
MEMORY_SHARED_SIZE = _gauge("torchobs.memory.shared.size", "By", "Size of /dev/shm.", shared=True)
MEMORY_SHARED_USED = _gauge("torchobs.memory.shared.used", "By", "Bytes in use in /dev/shm.", shared=True)
MEMORY_GROWTH_PER_STEP = _gauge(
    "torchobs.memory.growth_per_step", "By", "Trend of the memory in use, per step; after four minutes.", SPACE
)
MEMORY_TIME_TO_LIMIT = _gauge(
    "torchobs.memory.time_to_limit",
    "s",
    "Time until memory that grows steadily with the steps reaches its limit; absent where none does.",
    SPACE,
)

# --- the container ------------------------------------------------------------------------------------------------------------
CGROUP_MEMORY_WORKING_SET = _gauge(
    "torchobs.cgroup.memory.working_set",
    "By",
    "Memory of the rank's cgroup without inactive file pages, as the kubelet counts it; of the tightest, where they nest.",
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
    "Processes of that cgroup that the kernel killed for memory.",
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
    "Quota periods in which it was stopped until the next one.",
    shared=True,
)
CGROUP_CPU_THROTTLED_TIME = _counter(
    "torchobs.cgroup.cpu.throttled_time",
    "s",
    "Time for which its threads were stopped so, summed.",
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
    "Checkpoints by torch.save, safetensors and torch.distributed.checkpoint; what is saved between two steps is one, in "
    "memory only from 64 KiB on. Each save that raised is a failed one. Not seen: `from torch import save` before `init()`.",
    SAVE_RESULT,
    quiet=0.0,
)
CHECKPOINT_TIMESTAMP = _gauge(
    "torchobs.checkpoint.timestamp", "s", "Unix time at which the last checkpoint was complete.", survives=True
)
CHECKPOINT_DURATION = _gauge(
    "torchobs.checkpoint.duration",
    "s",
    "Time the last checkpoint took, until it was complete; what training waited is the goodput state checkpoint.",
    survives=True,
)
CHECKPOINT_SIZE = _gauge("torchobs.checkpoint.size", "By", "Bytes that this rank wrote for the last checkpoint.", survives=True)

# --- distributed training -----------------------------------------------------------------------------------------------------
DISTRIBUTED_WORLD_SIZE = _gauge("torchobs.distributed.world_size", "{rank}", "Ranks in the default process group.")
DISTRIBUTED_INFO = _gauge(
    "torchobs.distributed.info",
    "",
    "Constant 1; its labels say how the training is spread over ranks.",
    Attribute("backend", "of the default process group, e.g. nccl"),
    Attribute("parallelism", "what was recognised: ddp, fsdp1, fsdp2, hsdp, tensor; joined by +"),
    Attribute("mesh", "dimensions of the device mesh, e.g. dp=4,tp=2"),
    survives=True,
)
DDP_TIME = _gauge(
    "torchobs.ddp.time",
    "s",
    "Time in the iteration that DistributedDataParallel timed last: each of its first ten, then one in a hundred.",
    DDP_PART,
)
DDP_BUCKETS = _gauge("torchobs.ddp.buckets", "{bucket}", "Gradient buckets, each of which is one all-reduce.")
DDP_BUCKET_SIZE = _gauge("torchobs.ddp.bucket.size", "By", "Size of the largest gradient bucket.")
DDP_UNUSED_SIZE = _gauge(
    "torchobs.ddp.unused.size", "By", "Parameters that had no part in the iteration timed last, with find_unused_parameters."
)
DDP_INFO = _gauge(
    "torchobs.ddp.info",
    "",
    "Constant 1; its labels are how DistributedDataParallel was set up.",
    Attribute("find_unused_parameters", "whether it searches the graph for them in every iteration", ("true", "false")),
    Attribute("static_graph", "whether it was promised that the graph stays the same", ("true", "false")),
    Attribute("gradient_as_bucket_view", "whether gradients live in the buckets", ("true", "false")),
    Attribute("comm_hook", "the communication hook's name, if there is one"),
    survives=True,
)

# --- hardware: OpenTelemetry's names, and what they lack as torchobs.gpu.* ----------------------------------------------------
HW_GPU_UTILIZATION = _gauge(
    "hw.gpu.utilization", "1", "Share of the last moments in which a kernel ran, as the driver averages it.", GPU_ID, GPU_TASK
)
GPU_MEMORY_BUSY = _gauge(
    "torchobs.gpu.memory.busy", "1", "Share of the last moments in which the GPU's memory was read or written.", GPU_ID
)
HW_GPU_MEMORY_USAGE = _updown("hw.gpu.memory.usage", "By", "GPU memory in use by all processes.", GPU_ID)
HW_GPU_MEMORY_LIMIT = _updown("hw.gpu.memory.limit", "By", "GPU memory there is.", GPU_ID)
HW_POWER = _gauge("hw.power", "W", "Power drawn at present.", GPU_ID, HW_TYPE)
HW_ENERGY = _counter("hw.energy", "J", "Energy taken since the rank began to look.", GPU_ID, HW_TYPE, integer=False)
GPU_POWER_LIMIT = _gauge("torchobs.gpu.power.limit", "W", "Power that the GPU may draw.", GPU_ID)
HW_TEMPERATURE = _gauge("hw.temperature", "Cel", "Temperature.", GPU_ID, HW_SENSOR)
GPU_CLOCK_FREQUENCY = _gauge("torchobs.gpu.clock.frequency", "Hz", "Clock of the streaming multiprocessors.", GPU_ID)
GPU_CLOCK_LIMIT = _gauge("torchobs.gpu.clock.limit", "Hz", "Highest clock that the multiprocessors can have.", GPU_ID)
GPU_THROTTLE_TIME = _counter(
    "torchobs.gpu.throttle.time",
    "s",
    "Time in which the clocks were held down: as the driver counts it, else judged by a look every ten seconds.",
    GPU_ID,
    GPU_THROTTLE,
    integer=False,
    quiet=0.0,
)
HW_ERRORS = _counter(
    "hw.errors", "{error}", "Errors of the GPU since the rank began to look.", GPU_ID, HW_TYPE, HW_ERROR, quiet=0.0
)
GPU_NVLINK_IO = _counter("torchobs.gpu.nvlink.io", "By", "Payload sent and received over NVLink.", GPU_ID, IO_DIRECTION)
GPU_NVLINK_LINKS = _gauge("torchobs.gpu.nvlink.links", "{link}", "NVLinks that are up.", GPU_ID)
HW_STATUS = _updown(
    "hw.status",
    "1",
    "State of the GPU. Failed: lost, or a memory row that cannot be replaced; degraded: it asks for a reset, or met an ECC"
    " error that it could not correct.",
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
RANK_BEHIND = _gauge("torchobs.rank.behind", "{step}", "Steps by which the furthest rank of the run on this machine is ahead.")
RUN_LOCAL_RANKS = _gauge("torchobs.run.local_ranks", "{rank}", "Ranks of the run that live on this machine.")
RUN_MISSING_RANKS = _gauge(
    "torchobs.run.missing_ranks", "{rank}", "Ranks that the launcher started on this machine and of which nothing is known."
)
RUN_STEP_SPREAD = _gauge("torchobs.run.step_spread", "{step}", "Steps between the first and the last rank on this machine.")
RUN_GRAD_NORM = _gauge(
    "torchobs.run.grad_norm", "", "L2 norm of the whole gradient, put together from all ranks, where all are on this machine."
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
SYSTEM_CPU_TIME = _counter(
    "system.cpu.time", "s", "Time of all processors together, by what they did.", CPU_MODE, integer=False
)
SYSTEM_CPU_LOAD = _gauge(
    "system.cpu.load_average.1m", "{thread}", "Threads that ran, or waited to run or for a disk, averaged over a minute."
)
HOST_CPUS = _gauge("torchobs.host.cpus", "{cpu}", "Logical processors that are online.")
HOST_THREADS = _gauge("torchobs.host.threads", "{thread}", "Threads that run, or wait to run or for a disk.", THREAD_STATE)
SYSTEM_MEMORY_LIMIT = _updown("system.memory.limit", "By", "The machine's memory.")
SYSTEM_MEMORY_USAGE = _updown("system.memory.usage", "By", "The machine's memory by what it is used for.", MEMORY_STATE)
SYSTEM_MEMORY_AVAILABLE = _updown(
    "system.memory.linux.available", "By", "The kernel's estimate of what could be had without swapping."
)
SYSTEM_MEMORY_SHARED = _updown(
    "system.memory.linux.shared", "By", "Shared memory, files in a tmpfs included; it is among what is cached."
)
HOST_MEMORY_UNWRITTEN = _gauge(
    "torchobs.host.memory.unwritten", "By", "File pages that a disk has not got yet, of checkpoints for instance.",
    UNWRITTEN_STATE,
)  # fmt: skip
HOST_OOM_KILLS = _counter(
    "torchobs.host.memory.oom_kills", "{process}", "Processes that the kernel killed for memory, in any cgroup."
)
SYSTEM_PAGING_USAGE = _updown("system.paging.usage", "By", "The machine's swap space.", PAGING_STATE)
SYSTEM_DISK_IO = _counter("system.disk.io", "By", "Bytes read from and written to disks.", SYSTEM_DEVICE, DISK_DIRECTION)
SYSTEM_DISK_OPERATIONS = _counter(
    "system.disk.operations", "{operation}", "Reads and writes that disks completed.", SYSTEM_DEVICE, DISK_DIRECTION
)
SYSTEM_DISK_IO_TIME = _counter(
    "system.disk.io_time", "s", "Time in which a disk had something to do.", SYSTEM_DEVICE, integer=False
)
SYSTEM_DISK_OPERATION_TIME = _counter(
    "system.disk.operation_time", "s", "Time that a disk's reads and writes took, summed.", SYSTEM_DEVICE, DISK_DIRECTION,
    integer=False,
)  # fmt: skip
SYSTEM_FILESYSTEM_LIMIT = _updown("system.filesystem.limit", "By", "Size of a file system.", MOUNTPOINT, FILESYSTEM_TYPE)
SYSTEM_FILESYSTEM_USAGE = _updown(
    "system.filesystem.usage", "By", "Room in a file system by state.", MOUNTPOINT, FILESYSTEM_TYPE, FILESYSTEM_STATE
)
SYSTEM_FILESYSTEM_INODES = _updown(
    "system.filesystem.inodes.usage",
    "{inode}",
    "Files in a file system, and how many more there could be.",
    MOUNTPOINT,
    FILESYSTEM_TYPE,
    INODE_STATE,
)
HOST_FILESYSTEM_READONLY = _gauge(
    "torchobs.host.filesystem.readonly",
    "",
    "1 if nothing can be written there, as after an error of the disk.",
    MOUNTPOINT,
    FILESYSTEM_TYPE,
)
SYSTEM_NETWORK_IO = _counter("system.network.io", "By", "Bytes received and transmitted.", NETWORK_INTERFACE, NETWORK_DIRECTION)
SYSTEM_NETWORK_ERRORS = _counter(
    "system.network.errors", "{error}", "Errors of receiving and transmitting.", NETWORK_INTERFACE, NETWORK_DIRECTION
)
SYSTEM_NETWORK_DROPPED = _counter(
    "system.network.packet.dropped", "{packet}", "Packets dropped though they had no error.", NETWORK_INTERFACE,
    NETWORK_DIRECTION,
)  # fmt: skip

# --- torchobs itself ----------------------------------------------------------------------------------------------------------
OVERHEAD = _counter(
    "torchobs.overhead", "s", "Time that torchobs itself took in the training thread.", PROBE, integer=False, quiet=0.0
)
PROBE_ERRORS = _counter(
    "torchobs.probe.errors", "{error}", "Exceptions raised inside a probe; the first disables it.", PROBE, quiet=0.0
)
PROBE_DISABLED = _gauge("torchobs.probe.disabled", "", "1 if the probe is not at work.", PROBE, quiet=0.0)
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
    "Flight files in the directory, by what became of them.",
    Attribute("status", "outcome of reading", ("served", "superseded", "expired", "bad")),
)
EXPORTER_READ_ERRORS = _counter(
    "torchobs.exporter.read_errors",
    "{error}",
    "Flight files that could not be read, by reason.",
    Attribute("reason", "why", ("header", "io", "kind", "memory", "timeout")),
)
EXPORTER_SCAN_DURATION = _gauge("torchobs.exporter.scan.duration", "s", "Time the last reading of all flight files took.")
EXPORTER_CONFIG_OK = _gauge("torchobs.exporter.config_ok", "", "0 while a part of the configuration cannot be honoured.")
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
    "Connections that were closed or not taken: too slow, too many at once, a body without end, no TLS or no right"
    " certificate, or the kernel had no descriptor or memory for one (which waits).",
    Attribute("reason", "why", ("slow", "crowd", "flood", "tls", "accept")),
)
EXPORTER_WRITE_ERRORS = _counter(
    "torchobs.exporter.write_errors",
    "{error}",
    "Writes that failed, as on a full disk.",
    Attribute("what", "what was to be written", ("log", "file_sd", "announcement", "control")),
)
EXPORTER_HOST_DURATION = _gauge("torchobs.exporter.host.duration", "s", "Time the last look at the machine took.")
EXPORTER_HOST_ERRORS = _counter(
    "torchobs.exporter.host.errors", "{error}", "Times that a collector of the machine's numbers failed.", HOST_COLLECTOR
)
EXPORTER_HOST_STUCK = _gauge(
    "torchobs.exporter.host.stuck",
    "",
    "1 while a question has been without an answer for seconds, 0 otherwise: a network file system whose server is gone.",
    HOST_COLLECTOR,
    MOUNTPOINT,
)
_SIGNAL = Attribute("signal", "what is pushed over OTLP: data points or spans", ("metrics", "traces"))
OTLP_RECORDED = _counter(
    "torchobs.exporter.otlp.recorded", "{item}", "Data points or spans to be pushed: those sent, dropped and queued.", _SIGNAL
)
OTLP_SENT = _counter("torchobs.exporter.otlp.sent", "{item}", "Data points or spans that the receiver took.", _SIGNAL)
OTLP_DROPPED = _counter(
    "torchobs.exporter.otlp.dropped",
    "{item}",
    "Data points or spans given up: the queue was full, the receiver refused the request, or rejected a part of it, or the"
    " exporter ended.",
    _SIGNAL,
    Attribute("reason", "why", ("overflow", "refused", "rejected", "shutdown")),
)
OTLP_QUEUED = _gauge("torchobs.exporter.otlp.queued", "{item}", "Data points or spans that wait to be sent.", _SIGNAL)
OTLP_FAILURES = _counter(
    "torchobs.exporter.otlp.failures", "{request}", "Requests that failed and were, or will be, sent again.", _SIGNAL
)
OTLP_UNREAD = _counter(
    "torchobs.exporter.otlp.unread",
    "By",
    "Spans and events that a rank wrote over in its ring before the push had read them: it wrote more of them from one look to"
    " the next, a second later, than the ring holds.",
)

# --- events -------------------------------------------------------------------------------------------------------------------
EVENT_RUN_START = Event("torchobs.run.start", "torchobs.init() has finished.", Severity.INFO)
EVENT_RUN_END = Event("torchobs.run.end", "The rank ended in order.", Severity.INFO, (EXIT_REASON,))
EVENT_TRAINER = Event(
    "torchobs.trainer",
    "A framework's trainer began. Its other attributes are those of its settings that are numbers or single words.",
    Severity.INFO,
    (Attribute("framework", "lightning, transformers or accelerate"), Attribute("version", "the framework's")),
)
EVENT_EXCEPTION = Event(
    "torchobs.exception",
    "An exception nobody caught: the rank's end in its main thread, and not in another one, a notebook's cell or a test.",
    Severity.ERROR,
    (
        Attribute("exception.type", "its class"),
        Attribute("location", "file:line where it was raised"),
        Attribute("caller", "innermost file:line of the user's own code, where that is another"),
        Attribute("cause.type", "class of the first exception of the chain, if it is a chain"),
        Attribute("cause.location", "file:line where that was raised"),
        Attribute("cause.caller", "innermost file:line of the user's own code in it, where that is another"),
        Attribute("origin", "which worker or other process raised it, if that was not the rank's own: location is there then"),
        Attribute("reraised", "file:line of the user's own code in the rank that it came to"),
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
    "A GPU does not answer any more.",
    Severity.ERROR,
    (GPU_ID, Attribute("reason", "what its library says: lost, reset_required, silent")),
)
EVENT_GPU_XID = Event(
    "torchobs.gpu.xid",
    "The driver reported an error of a GPU (an XID).",
    Severity.ERROR,
    (GPU_ID, Attribute("xid", "its number in NVIDIA's list"), Attribute("meaning", "what that is, if known")),
)
EVENT_ANOMALY = Event(
    "torchobs.anomaly",
    "A step was judged anomalous.",
    Severity.WARNING,
    (
        ANOMALY_KIND,
        Attribute("value", "what was seen"),
        Attribute("baseline", "what was usual"),
        Attribute("left_out", "how many of the kind before it have no event: of many on end, one in ten minutes has"),
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
    "Losses and gradient norms of this kind of device are not recorded: reading them would hold up the training.",
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
    "The device allocator had no memory left; written before the exception is raised. Sizes in bytes.",
    Severity.ERROR,
    (
        DEVICE,
        Attribute("requested", "what was asked for"),
        Attribute("limit", "what this process may take"),
        Attribute("free", "what the device has free"),
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
    "Shared memory (/dev/shm) is nearly full, over which DataLoader workers and NCCL hand on their data.",
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
    "Layers learn nothing: the gradient vanishes on its way to them, or the units before a layer are dead.",
    Severity.WARNING,
    (
        Attribute("layers", "which, the first eight in the model's order"),
        Attribute("layers_affected", "how many"),
        Attribute("layers_measured", "of how many"),
        Attribute("cause", "why", ("vanishing", "dead_units")),
        Attribute("at", "of the layers whose gradient is lost the one nearest to the loss, or the first that only zeros reach"),
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
    "A model was handed to torchobs.watch().",
    Severity.INFO,
    (
        Attribute("name", "its class"),
        Attribute("parameters", "elements in its parameters"),
        Attribute("trainable", "of which trained"),
    ),
)
EVENT_SCALARS = Event(
    "torchobs.scalars",
    "Points of the curves of what torchobs.log() is given by name, for the page, top, inspect and the API.",
    Severity.INFO,
    (
        Attribute("names", "of the scalars"),
        Attribute("steps", "after which each was logged"),
        Attribute("values", "what was logged"),
    ),
)
EVENT_MODEL_CHANGE = Event(
    "torchobs.model_change",
    "Training goes on with parameters never trained before (the next fold, the next trial), and baselines begin anew.",
    Severity.INFO,
    (Attribute("changes", "how many there were"), Attribute("steps_before", "steps done before it")),
)
EVENT_CHILDREN = Event(
    "torchobs.children",
    "A process without a step has started others by multiprocessing, which are ranks only once they join a process group.",
    Severity.INFO,
    (Attribute("count", "how many there were at the same time"),),
)
EVENT_OTHER_THREAD = Event(
    "torchobs.other_thread",
    "Another thread than the one that is recorded steps optimizers at the same time; its steps are not counted.",
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
    "Training has come to wait for data for a fifth of its time or more.",
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
    "A save raised, for want of room or otherwise.",
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
    "torch.compile gave a function up.",
    Severity.WARNING,
    (COMPILE_LOCATION, COMPILE_FAILURE, Attribute("exception.type", "class of the compiler's exception")),
)
EVENT_GRAPH_BREAK = Event(
    "torchobs.compile.graph_break",
    "A graph had to end; once for each place.",
    Severity.INFO,
    (Attribute("location", "file:line"), COMPILE_BREAK, Attribute("message", "the reason's first line, without values")),
)
EVIDENCE = Attribute("evidence", "the id by which the exporter's API has the file")
EVENT_STACKS = Event(
    "torchobs.stacks",
    "The stacks of all threads were written down, because somebody asked, or Python's lock was held for seconds.",
    Severity.INFO,
    (
        Attribute("cause", "why", ("asked", "stuck")),
        EVIDENCE,
        Attribute("silent_s", "of a rank that was stuck: seconds for which no other thread could run"),
    ),
)
LACK = Attribute("detail", "what the system said, or how much room was wanted")
EVENT_STACKS_FAILED = Event(
    "torchobs.stacks_failed",
    "Stacks could not be written down, or not all of them.",
    Severity.WARNING,
    (
        Attribute("cause", "why they were to be", ("asked", "stuck")),
        Attribute("reason", "why they are not", ("no_room", "not_permitted", "error")),
        LACK,
        EVIDENCE,
    ),
)
EVENT_PROFILE_START = Event(
    "torchobs.profile.start",
    "The profiler that somebody asked for has begun.",
    Severity.INFO,
    (Attribute("steps", "how many it shall see"), EVIDENCE),
)
EVENT_PROFILE_END = Event(
    "torchobs.profile.end",
    "The profiler's trace is written.",
    Severity.INFO,
    (
        Attribute("reason", "why it ended", ("complete", "time", "memory", "interrupted")),
        Attribute("steps", "how many it saw"),
        Attribute("size", "bytes of the trace, compressed"),
        EVIDENCE,
    ),
)
EVENT_PROFILE_FAILED = Event(
    "torchobs.profile.failed",
    "There is no trace for a profile that somebody asked for.",
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
    "An evaluation: between eval() and train(), or while batches are fetched with gradients disabled. From 100 ms on all of "
    "them, of the shorter ones a few.",
)
SPAN_CHECKPOINT = Span(
    "torchobs.checkpoint",
    "A save; an asynchronous one until it is complete. All of 100 ms or longer, and of the shorter ones a few.",
    (
        Attribute("format", "what saved", ("torch", "safetensors", "distributed")),
        Attribute("size", "bytes this rank wrote"),
        Attribute("blocked_s", "of an asynchronous one: seconds for which training waited"),
    ),
)
SPAN_RESTORE = Span(
    "torchobs.restore",
    "torch.load or torch.distributed.checkpoint.load in the training thread, when it takes 100 ms or longer.",
    (Attribute("format", "what loaded", ("torch", "distributed")),),
)
SPAN_STEP = Span(
    "torchobs.step",
    "A training step, from the last one's end: one in ten seconds, of the slow and the anomalous ones a few. Where a step is "
    "not one fetch, backward and optimizer in turn, its phases are sums and stand in attributes (`forward_s` ...).",
    (
        Attribute("step", "its number"),
        Attribute("reason", "why it was recorded: user means that the application began a span in it",
                  ("sampled", "slow", "anomalous", "user")),
        Attribute("duration_s", "as torchobs.step.duration counts it; the first step, whose begin is unknown, has none"),
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
        Attribute("cached", "whether Inductor's code came from its cache; absent where it was not asked"),
    ),
)


METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
EVENTS: tuple[Event, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Event))
SPANS: tuple[Span, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Span))
BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}
