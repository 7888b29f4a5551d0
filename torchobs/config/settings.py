"""All settings of torchobs, declared once, and the only reader of ``os.environ``.

An argument beats the environment, which beats the default. An invalid value is ignored: the next source decides, and a
:class:`SettingsProblem` is returned for the session to log. A setting's variables are listed in order of precedence; an
empty one counts as unset, as in OpenTelemetry.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchobs.config import options as kinds
from torchobs.config.options import (
    EXPORTER_PREFIX,
    Address,
    Attributes,
    Level,
    LogLevel,
    Option,
    SettingsProblem,
    unknown_variables,
)

__all__ = ["OPTIONS", "PROBES", "Settings", "SettingsProblem", "environment", "named", "resolve"]

PROBES = (
    "step", "phases", "data", "loaders", "epochs", "checkpoint", "loss", "gradients", "optimizer", "schedulers", "amp",
    "gpu", "exits", "memory", "cgroup", "distributed", "device_memory", "compile", "nonfinite", "resume",
    "leak", "activations", "device_time", "flops", "collectives",
)  # fmt: skip
"""Names of the probes that can be disabled; listed here because this module loads without torch. Append new ones: a command
refers to a probe by its index (:mod:`torchobs.flight.control`)."""

EXPORTER_ADDRESS = Address("127.0.0.1", 10960)
"""Default address of a node's exporter: loopback, on a port that is free in Prometheus' list of default ports.

9464 is the OpenTelemetry SDK's and would collide in a pod; 9100-9999 is allocated to other exporters."""

_PREFIX = "TORCHOBS_"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one process. ``None``: determined by another part of torchobs, as :data:`OPTIONS` says."""

    enabled: bool = True
    level: Level = "basic"
    flight_dir: Path | None = None
    control_dir: Path | None = None
    file_size: int = 1024**2
    exporter: bool = False
    exporter_address: Address | None = None
    summary: bool = True
    job_name: str | None = None
    run_id: str | None = None
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    restart: int | None = None
    kubernetes_job_name: str | None = None
    kubernetes_job_uid: str | None = None
    resource_attributes: Attributes = ()
    traceparent: str | None = None
    tracestate: str | None = None
    total_steps: int | None = None
    trace_steps: int | Literal["auto"] = "auto"
    grad_interval: int | Literal["auto"] = "auto"
    layers: int = 16
    overhead_budget: float = 0.005
    infer_throughput: bool = True
    disable_probes: frozenset[str] = frozenset()
    raise_on: frozenset[str] = frozenset()
    native: bool = True
    watchdog: bool = True
    run_details: bool = True
    tag: str | None = None
    keep_runs: int = 200
    keep_dir: Path | None = None
    log_level: LogLevel = "WARNING"
    set_global_providers: bool = True


OPTIONS = (
    Option(
        "enabled", kinds.BOOLEAN, "Whether torchobs records anything. `OTEL_SDK_DISABLED=true` turns it off as well.",
        "true", ("TORCHOBS_ENABLED",), also=(("OTEL_SDK_DISABLED", kinds.SDK_DISABLED),),
    ),
    Option("level", kinds.LEVEL, "Debug level: how much is recorded, from the first step on.", "basic", ("TORCHOBS_LEVEL",)),
    Option(
        "flight_dir", kinds.PATH, "Directory of the flight files.",
        "chosen by torchobs, in memory if possible", ("TORCHOBS_DIR",),
    ),
    Option(
        "control_dir", kinds.PATH, "Directory of the files by which the exporter sends commands to ranks.",
        "beside the flight files", ("TORCHOBS_CONTROL_DIR",),
    ),
    Option("file_size", kinds.size(256 * 1024, 2 * 1024**2), "Size of a rank's flight file.", "1MiB", ("TORCHOBS_FILE_SIZE",)),
    Option(
        "exporter", kinds.BOOLEAN, "Whether `init()` starts an exporter on this node (never in Kubernetes).",
        "false", ("TORCHOBS_EXPORTER",),
    ),
    Option(
        "exporter_address", kinds.ADDRESS, "Address on which that exporter listens.",
        "127.0.0.1:10960, or the next free port", ("TORCHOBS_EXPORTER_ADDRESS",),
    ),
    Option(
        "summary", kinds.BOOLEAN,
        "Whether `torchobs run` prints the live page's address first and a summary of the run last, on a terminal, and "
        "`init()` shows a line of status in a notebook.",
        "true", ("TORCHOBS_SUMMARY",),
    ),
    Option(
        "job_name", kinds.TEXT, "Name of the job: the label `job_name` of every series.",
        "the scheduler's name of the job, else the script's", ("TORCHOBS_JOB_NAME", "OTEL_SERVICE_NAME"),
    ),
    Option(
        "run_id", kinds.TEXT, "Identifier of the run, the label `run_id`: the same on all its ranks and after each restart.",
        "the scheduler's or the launcher's", ("TORCHOBS_RUN_ID",),
    ),
    Option("rank", kinds.integer(0), "Rank of this process.", "the launcher's, else 0", ("TORCHOBS_RANK",)),
    Option(
        "local_rank", kinds.integer(0), "Rank of this process on its node.",
        "the launcher's, else 0", ("TORCHOBS_LOCAL_RANK",),
    ),
    Option("world_size", kinds.integer(1), "Number of ranks of the run.", "the launcher's, else 1", ("TORCHOBS_WORLD_SIZE",)),
    Option("restart", kinds.integer(0), "Number of restarts of the run.", "the launcher's, else 0", ("TORCHOBS_RESTART",)),
    Option(
        "kubernetes_job_name", kinds.TEXT, "Name of the Job, JobSet or TrainJob, from the downward API.",
        "unknown", ("TORCHOBS_K8S_JOB_NAME",),
    ),
    Option(
        "kubernetes_job_uid", kinds.TEXT, "UID of that Job, from the downward API: the run's id.",
        "unknown", ("TORCHOBS_K8S_JOB_UID",),
    ),
    Option(
        "resource_attributes", kinds.ATTRIBUTES, "Further attributes of this process.", "none", ("OTEL_RESOURCE_ATTRIBUTES",),
    ),
    Option(
        "traceparent", kinds.TRACEPARENT, "Parent span of the run, in the notation of W3C Trace Context.",
        "none: the run starts a trace", ("TRACEPARENT",),
    ),
    Option("tracestate", kinds.TEXT, "Trace state of that parent span, in the same notation.", "none", ("TRACESTATE",)),
    Option(
        "total_steps", kinds.integer(1), "Planned number of steps of the run.",
        "the value given to `torchobs.log(total_steps=...)`, else unknown", ("TORCHOBS_TOTAL_STEPS",),
    ),
    Option(
        "trace_steps", kinds.INTERVAL, "Record every N-th step as a span, or, so that it is at most one per second, every "
        "2N-th, 4N-th and so on; `auto`: the power of two that gives one in ten seconds. The same steps on all ranks. Slow and "
        "anomalous steps, and steps with events, are recorded in any case.", "auto", ("TORCHOBS_TRACE_STEPS",),
    ),
    Option(
        "grad_interval", kinds.INTERVAL, "Compute the gradient norm every N steps; "
        "`auto` chooses N so that it stays within the overhead budget.", "auto", ("TORCHOBS_GRAD_INTERVAL",),
    ),
    Option(
        "layers", kinds.integer(0, 64), "Number of layers with series of their own; the others are combined into one. "
        "Four times as many from level `advanced` on.", "16", ("TORCHOBS_LAYERS",),
    ),
    Option(
        "overhead_budget", kinds.fraction(0, 0.2), "Share of the training time that torchobs may use.",
        "0.005", ("TORCHOBS_OVERHEAD_BUDGET",),
    ),
    Option(
        "infer_throughput", kinds.BOOLEAN, "Whether samples and tokens are counted by the shapes of a batch that is looked at "
        "every ten seconds, as long as the script gives none to `torchobs.log()`.", "true", ("TORCHOBS_INFER_THROUGHPUT",),
    ),
    Option("disable_probes", kinds.names(PROBES), "Probes not to install.", "none", ("TORCHOBS_DISABLE_PROBES",)),
    Option(
        "raise_on", kinds.names(("nonfinite",)), "Faults that end the training: `nonfinite` raises `torchobs.NonFiniteError` "
        "before the optimizer steps. All gradients are then examined in every step, which waits for the device.",
        "none", ("TORCHOBS_RAISE_ON",),
    ),
    Option(
        "native", kinds.BOOLEAN, "Whether a step is recorded by the compiled part of torchobs, where that is installed, or by "
        "the same in Python.", "true", ("TORCHOBS_NATIVE",),
    ),
    Option(
        "watchdog", kinds.BOOLEAN, "Whether stacks are written to a file: of a rank that holds the GIL for seconds, by a timer "
        "and a real-time signal, and of a rank with a step that takes much longer than usual.",
        "true", ("TORCHOBS_WATCHDOG",),
    ),
    Option(
        "run_details", kinds.BOOLEAN, "Whether the command line, the git commit, versions, device names and the seed of the "
        "run are kept in the flight file, for `torchobs inspect`, `report` and `compare` alone, and the first lines of "
        "messages of exceptions, which alerts show, too; secrets are removed.",
        "true", ("TORCHOBS_RUN_DETAILS",),
    ),
    Option("tag", kinds.TEXT, "A word to find the run by, in `torchobs runs`.", "none", ("TORCHOBS_TAG",)),
    Option(
        "keep_runs", kinds.integer(0), "How many runs are kept beyond the machine's next start, the newest ones, in 200 MiB at "
        "most; 0: this run is not kept.", "200", ("TORCHOBS_KEEP_RUNS",),
    ),
    Option(
        "keep_dir", kinds.ABSOLUTE_PATH, "Directory of the kept runs.",
        "torchobs/runs in $XDG_STATE_HOME, else in ~/.local/state; in a pod none", ("TORCHOBS_KEEP_DIR",),
    ),
    Option("log_level", kinds.LOG_LEVEL, "Level of the logger `torchobs`.", "WARNING", ("TORCHOBS_LOG_LEVEL",)),
    Option(
        "set_global_providers", kinds.BOOLEAN, "Whether torchobs becomes OpenTelemetry's global meter and tracer provider, "
        "if the application has set none.", "true", ("TORCHOBS_OTEL_PROVIDERS",),
    ),
)  # fmt: skip
"""One option for every field of :class:`Settings`, which defines its type and default."""


NOTIFY = Option(
    "notify", kinds.TARGET,
    "Where a message goes when a run fails, hangs, has NaN or other trouble, or ends after ten minutes: the URL of a webhook "
    "(Slack, Mattermost, Discord's /slack), ntfy:URL, or a command that reads JSON. A secret: prefer the variable.",
    "nowhere", ("TORCHOBS_NOTIFY",), flag="--notify", metavar="URL", hidden_if="",
)  # fmt: skip
"""No setting of ``init()``: the exporter finds it in the environment in which a rank was started."""


def environment() -> Mapping[str, str]:
    """Return a copy of ``os.environ``, so that :func:`resolve` and ``identity.discover`` read the same values."""
    return dict(os.environ)


def resolve(
    overrides: Mapping[str, object], environ: Mapping[str, str] | None = None
) -> tuple[Settings, tuple[SettingsProblem, ...]]:
    """Return the effective settings, and the values that were ignored. Raises ``TypeError`` for an override of no setting.

    ``overrides``: by field name, as values or as text; ``None``: unset. ``environ``: by default the process's own.
    """
    if unexpected := overrides.keys() - {option.name for option in OPTIONS}:
        word = min(unexpected)
        raise TypeError(f"{word!r} is an unknown setting{kinds.closest(word, [option.name for option in OPTIONS])}")
    environ = environment() if environ is None else environ
    problems = [*_unknown_variables(environ)]
    arguments = {name: [value] for name, value in overrides.items() if value is not None}
    chosen = kinds.read(OPTIONS, arguments, environ, problems)
    kinds.read([NOTIFY], {}, environ, problems)  # of the exporter, but a problem belongs in the training's log
    return Settings(**chosen), tuple(problems)  # type: ignore[arg-type]  # each value is of its own field's kind


def named(name: str) -> Option:
    """Return the option of this field, for a command that has it as a flag."""
    return next(option for option in OPTIONS if option.name == name)


def _unknown_variables(environ: Mapping[str, str]) -> Iterator[SettingsProblem]:
    # The exporter checks variables with its own prefix (`torchobs exporter --help` lists them).
    checked = {name: "" for name in environ if not name.startswith(EXPORTER_PREFIX)}
    names = [name for option in (*OPTIONS, NOTIFY) for name in option.every_variable]
    return unknown_variables(checked, _PREFIX, names, what="setting")
