"""Metrics of the toolboxes (guard, tune, debug) and of torchobs itself: exporter, push, probes."""

from __future__ import annotations

from torchobs.catalog.model import HOST_COLLECTOR, PROBE, SPACE, Attribute, counter, gauge

# --- torchobs.guard -----------------------------------------------------------------------------------------------------------
GUARD_SEVERITY = Attribute("severity", "how bad it is, see guard.Severity", ("info", "warning", "error"))
GUARD_VIOLATIONS = counter(
    "torchobs.guard.violations",
    "{violation}",
    Attribute("what", "what a tensor is not", ("type", "shape", "dtype", "device", "finite", "min", "max", "norm")),
    Attribute("category", "what it is about", ("contract",)),
    GUARD_SEVERITY,
    quiet=0.0,
).described("Tensors that broke their contract.")
GUARD_SANITIZED = counter(
    "torchobs.guard.sanitized",
    "{element}",
    Attribute("policy", "what was done", ("refuse", "clamp", "nan_to_num")),
    Attribute("category", "what it is about", ("numerics",)),
    GUARD_SEVERITY,
    quiet=0.0,
).described("Output elements refused or replaced by guard.sanitize_outputs.")
GUARD_RECOVERIES = counter(
    "torchobs.guard.recoveries",
    "{time}",
    Attribute("category", "what it is about", ("memory", "numerics", "data", "io", "contract", "resources", "file", "other")),
    Attribute("action", "what was done", ("split", "skip", "restore", "retry", "raise", "return", "record")),
    GUARD_SEVERITY,
    quiet=0.0,
).described("Errors that guard.Recovery and guard.safe_inference dealt with or gave up on, and those of guard.record.")
GUARD_EXCEEDED = counter(
    "torchobs.guard.exceeded",
    "{time}",
    Attribute("resource", "what is used up", ("cpu", "memory", "gpu_memory", "disk")),
    Attribute("category", "what it is about", ("resources",)),
    GUARD_SEVERITY,
    quiet=0.0,
).described("Times that a resource got above its threshold of guard.resources.")
GUARD_FINDINGS = counter(
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
TUNE_PLANS = counter("torchobs.tune.plans", "{plan}", TUNE_ACTION, quiet=0.0).described(
    "Plans of torchobs.tune by what became of them."
)
TUNE_SPEEDUP = gauge(
    "torchobs.tune.speedup",
    "{ratio}",
    Attribute("mode", "mode of tune.optimize()", ("none", "amp", "compile", "memory_efficient", "full", "inference")),
    survives=True,
).described("Speed-up of each mode over the first, by the last tune.benchmark().")

# --- torchobs.debug -----------------------------------------------------------------------------------------------------------
DEBUG_OPERATION = Attribute("operation", "the first 16 names, others are 'other'")
STEP_ANOMALIES = ("gradient_explosion", "gradient_vanishing", "loss_anomaly")
STEP_ANOMALY = Attribute("kind", "what was found in the step", STEP_ANOMALIES)
DEBUG_OPERATIONS = counter("torchobs.debug.operations", "{operation}", DEBUG_OPERATION).described(
    "Operations enclosed by debug.context() or debug.operation(); from the first one on."
)
DEBUG_OPERATION_TIME = counter("torchobs.debug.operation.time", "s", DEBUG_OPERATION).described("Time that operations took.")
DEBUG_OPERATION_LONGEST = gauge("torchobs.debug.operation.longest", "s", DEBUG_OPERATION, survives=True).described(
    "Time that the longest operation took."
)
DEBUG_OPERATION_MEMORY = gauge("torchobs.debug.operation.memory", "By", DEBUG_OPERATION, SPACE, survives=True).described(
    "Most memory of the process, or its devices, during an operation."
)
DEBUG_OPERATION_ANOMALIES = counter("torchobs.debug.operation.anomalies", "{operation}", DEBUG_OPERATION).described(
    "Operations with non-finite values, or in which torch's anomaly mode raised."
)
DEBUG_STEPS = counter("torchobs.debug.steps", "{step}").described(
    "Steps checked by debug.monitor_step() or debug.training_step()."
)
DEBUG_ANOMALY_STEPS = counter("torchobs.debug.anomaly_steps", "{step}").described("Checked steps with an anomaly.")
DEBUG_STEP_ANOMALIES = counter("torchobs.debug.step_anomalies", "{step}", STEP_ANOMALY).described("Anomalies of checked steps.")

# --- torchobs itself ----------------------------------------------------------------------------------------------------------
OVERHEAD = counter("torchobs.overhead", "s", PROBE, quiet=0.0).described("Time that torchobs took in the training thread.")
PROBE_ERRORS = counter("torchobs.probe.errors", "{error}", PROBE, quiet=0.0).described(
    "Exceptions inside a probe; the first disables it."
)
PROBE_DISABLED = gauge("torchobs.probe.disabled", "", PROBE, quiet=0.0).described("1 if the probe is disabled.")
FLIGHT_DROPPED = counter(
    "torchobs.flight.dropped", "{item}", Attribute("what", "what was dropped", ("series", "event", "record")), quiet=0.0
).described("Items that did not fit the flight file.")
BUILD_INFO = gauge(
    "torchobs.build.info", "", Attribute("version", "torchobs version"), Attribute("python", "Python version")
).described("Constant 1; its labels are the exporter's versions.")
EXPORTER_FILES = gauge(
    "torchobs.exporter.files",
    "{file}",
    Attribute(
        "status",
        "outcome of reading; left_out: beyond the 4,096 that are read, living ranks' first",
        ("served", "superseded", "expired", "bad", "left_out"),
    ),
).described("Flight files in the directory, by status.")
EXPORTER_READ_ERRORS = counter(
    "torchobs.exporter.read_errors", "{error}", Attribute("reason", "why", ("header", "io", "kind", "memory", "timeout"))
).described("Flight files that could not be read, by reason.")
EXPORTER_SCAN_DURATION = gauge("torchobs.exporter.scan.duration", "s").described(
    "Duration of the last scan of all flight files."
)
EXPORTER_SCRAPES = counter("torchobs.exporter.scrapes", "{scrape}").described(
    "Scrapes of the metrics page, this one not counted."
)
EXPORTER_SCRAPE_TIME = counter("torchobs.exporter.scrape.time", "s").described(
    "Time that scrapes took, to the page's last byte."
)
EXPORTER_CONFIG_OK = gauge("torchobs.exporter.config_ok", "").described(
    "0 while part of the configuration is invalid or cannot be applied."
)
EXPORTER_DUPLICATES = counter("torchobs.exporter.duplicate_ranks", "{rank}").described(
    "Times two living processes claimed one rank of one run."
)
EXPORTER_SERIES_DROPPED = counter(
    "torchobs.exporter.series_dropped", "{series}", Attribute("reason", "why", ("total_limit", "conflict", "drop_list"))
).described("Series not served, by reason.")
EXPORTER_WRITE_ERRORS = counter(
    "torchobs.exporter.write_errors",
    "{error}",
    Attribute("what", "what was to be written", ("log", "file_sd", "announcement", "control")),
).described("Writes that failed, as on a full disk.")
EXPORTER_HOST_DURATION = gauge("torchobs.exporter.host.duration", "s").described(
    "Duration of the last collection of the machine's metrics."
)
EXPORTER_HOST_ERRORS = counter("torchobs.exporter.host.errors", "{error}", HOST_COLLECTOR).described(
    "Failures of a collector of the machine's metrics."
)
_SIGNAL = Attribute("signal", "what is pushed over OTLP: data points, spans or log records", ("metrics", "traces", "logs"))
OTLP_SENT = counter("torchobs.exporter.otlp.sent", "{item}", _SIGNAL).described(
    "Data points, spans or log records that the receiver accepted."
)
OTLP_DROPPED = counter(
    "torchobs.exporter.otlp.dropped",
    "{item}",
    _SIGNAL,
    Attribute("reason", "why", ("overflow", "refused", "rejected", "shutdown")),
).described("Data points, spans or log records dropped, by reason.")
OTLP_QUEUED = gauge("torchobs.exporter.otlp.queued", "{item}", _SIGNAL).described(
    "Data points, spans or log records that wait to be sent."
)
OTLP_FAILURES = counter("torchobs.exporter.otlp.failures", "{request}", _SIGNAL).described(
    "Requests that failed and are retried."
)
