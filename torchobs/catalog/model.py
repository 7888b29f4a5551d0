"""What a metric, an event and a span are; their attributes, and how names and units are spelled in Prometheus.

Dimensionless gauges that are no ratio have an empty unit, because Prometheus appends ``_ratio`` to a gauge with unit ``1``.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """Kind of an instrument; the values are stored in the flight file."""

    COUNTER = 1
    UPDOWN = 2
    GAUGE = 3
    HISTOGRAM = 4


def cumulative(kind: Kind) -> bool:
    """Return whether a value only grows; such values are still valid after their process has ended."""
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


def counter(name: str, unit: str, *attributes: Attribute, quiet: float | None = None, shared: bool = False) -> Metric:
    """Return a counter; times and energy are measured, everything else is counted in whole numbers."""
    integer = unit not in {"s", "J"}
    return Metric(name, Kind.COUNTER, unit, "", attributes, integer=integer, quiet=quiet, shared=shared)


def gauge(
    name: str, unit: str, *attributes: Attribute, survives: bool = False, quiet: float | None = None, shared: bool = False
) -> Metric:
    """Return a gauge."""
    return Metric(name, Kind.GAUGE, unit, "", attributes, survives=survives, quiet=quiet, shared=shared)


def updown(name: str, unit: str, *attributes: Attribute) -> Metric:
    """Return a sum that also falls."""
    return Metric(name, Kind.UPDOWN, unit, "", attributes)


def histogram(name: str, unit: str, bounds: tuple[float, ...]) -> Metric:
    """Return a histogram with these upper bounds."""
    return Metric(name, Kind.HISTOGRAM, unit, "", bounds=bounds)


def named(*names: str) -> tuple[Attribute, ...]:
    """Return attributes that need no description beside their names."""
    return tuple(Attribute(name, "") for name in names)


def info(name: str, brief: str, *attributes: Attribute) -> Event:
    """Return an event that is information."""
    return Event(name, brief, Severity.INFO, attributes)


def warning(name: str, brief: str, *attributes: Attribute) -> Event:
    """Return an event that is a warning."""
    return Event(name, brief, Severity.WARNING, attributes)


def error(name: str, brief: str, *attributes: Attribute) -> Event:
    """Return an event that is an error."""
    return Event(name, brief, Severity.ERROR, attributes)


def span(name: str, brief: str, *attributes: Attribute) -> Span:
    """Return a span."""
    return Span(name, brief, attributes)


# --- attributes ---------------------------------------------------------------------------------------------------------------
PHASES = ("data", "forward", "backward", "optimizer", "other", "between")
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
LATE_PHASES = ("data", "optimizer", "other", "between")
LATE_PHASE = Attribute("phase", "part of a step in which a rank may be late", LATE_PHASES)
STALL_PHASES = ("data", "forward", "backward", "optimizer", "other", "evaluation", "checkpoint", "compile", "idle")
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
    "what failed; an XID by its most likely cause in NVIDIA's catalog",
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
GROUP = Attribute("group", "index of the parameter group, the first eight")
COLLECTIVE_OPERATIONS = (
    "none", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all", "barrier",
    "send", "recv", "coalesced", "other",
)  # fmt: skip
COLLECTIVE_TIMEOUTS = ("collective", "monitored_barrier", "rendezvous")
PROCESS_GROUP = Attribute("group", "process group, the first eight")
PROCESS_GROUP_BACKEND = Attribute("backend", "the backend that records it", ("gloo", "nccl", "other"))
COLLECTIVE_OPERATION = Attribute("operation", "what waits longest; none: nothing does", COLLECTIVE_OPERATIONS)
SCHEDULER_MISUSE_KIND = Attribute("kind", "kind of misuse", SCHEDULER_MISUSES)
SCALER = Attribute("scaler", "index of the GradScaler in use, by its first update", ("0", "1", "2", "3"))
OPTIMIZER = Attribute("optimizer", "index of the optimizer in use, by its first step under a loss scaler", ("0", "1", "2", "3"))
SCALAR = Attribute("name", "the name given to torchobs.log(), the first 64")
LAYER = Attribute("layer", "module with the parameters; of the largest, others are 'other'")
OUTPUT_LAYER = Attribute("layer", "module without children, at most 64 of the model")
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
SYSTEM_DEVICE = Attribute("system.device", "e.g. nvme0n1; 64 at most")
DISK_DIRECTION = Attribute("disk.io.direction", "read or write", ("read", "write"))
MOUNTPOINT = Attribute("system.filesystem.mountpoint", "where it is mounted")
FILESYSTEM_TYPE = Attribute("system.filesystem.type", "its type, e.g. xfs")
FILESYSTEM_STATE = Attribute("system.filesystem.state", "reserved: free, for root only", ("used", "free", "reserved"))
INODE_STATE = Attribute("state", "whether the inode is in use", ("used", "free"))
NETWORK_INTERFACE = Attribute("network.interface.name", "e.g. eth0; 64 at most")
NETWORK_DIRECTION = Attribute("network.io.direction", "seen from this machine", ("receive", "transmit"))
