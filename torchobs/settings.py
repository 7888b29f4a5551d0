"""Every setting of torchobs, described once, and the only reader of ``os.environ``.

An argument beats the environment, which beats the default. A value that is not allowed is ignored: the next source
decides, and a :class:`SettingsProblem` says so for the session to log. Command-line programs ask for ``strict`` and get
a :class:`SettingsError` instead. A setting's variables stand in the order in which they are asked; an empty one counts
as unset, as OpenTelemetry has it.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_type_hints

from torchobs import values
from torchobs.values import Address, Attributes, Kind, Level, LogLevel, PartlyUsableError

__all__ = ["PROBES", "Setting", "Settings", "SettingsError", "SettingsProblem", "environment", "listing", "resolve"]

PROBES = (
    "step", "phases", "data", "loaders", "epochs", "checkpoint", "loss", "gradients", "optimizer", "schedulers", "amp",
    "gpu", "exits", "memory", "cgroup", "distributed", "device_memory", "compile",
)  # fmt: skip
"""The probes that can be switched off, by name; spelled here because this module loads without torch. New ones come at the end:
a command switches a probe by its place (``flight.control``)."""

EXPORTER_ADDRESS = Address("127.0.0.1", 10960)
"""Where a node-mode exporter listens: on loopback, on the port that Prometheus' list of defaults has free."""

_PREFIX = "TORCHOBS_"
_EXPORTERS = "TORCHOBS_EXPORTER_"
_LONGEST_SHOWN = 120
# Kubernetes describes a Service whose name begins with "torchobs" to every container of its namespace, unasked.
_SERVICE_LINK = r"TORCHOBS_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"


@dataclass(frozen=True, slots=True)
class SettingsProblem:
    """What was ignored: the variable or argument, its value (``None`` where it tells nothing), and why."""

    name: str
    value: str | None
    reason: str

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.name} {self.reason}"
        shown = repr(self.value)
        return f"{self.name}={shown if len(shown) <= _LONGEST_SHOWN else shown[:_LONGEST_SHOWN] + '…'}: {self.reason}"


class SettingsError(ValueError):
    """Raised for a program that asked for strict settings; the message has one line for each of ``problems``."""

    def __init__(self, problems: tuple[SettingsProblem, ...]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


class Setting(NamedTuple):
    """What a person has to know of one setting, in words; ``variables`` in the order in which they are asked."""

    name: str
    variables: tuple[str, ...]
    default: str
    allowed: str
    brief: str


class _Spec(NamedTuple):
    """The rest of a field of :class:`Settings`; ``unset`` tells in words what its default leads to."""

    kind: Kind
    variables: tuple[str, ...]
    brief: str
    unset: str = ""
    also: tuple[tuple[str, Kind], ...] = ()
    """Further variables, whose text means something else."""

    @property
    def sources(self) -> tuple[tuple[str, Kind], ...]:
        return (*((variable, self.kind) for variable in self.variables), *self.also)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one process. ``None`` means that another part of torchobs finds out, as :func:`listing` tells."""

    enabled: Annotated[
        bool,
        _Spec(
            values.BOOLEAN,
            ("TORCHOBS_ENABLED",),
            "Whether `init()` does anything. `OTEL_SDK_DISABLED=true` switches it off, too.",
            also=(("OTEL_SDK_DISABLED", values.SDK_DISABLED),),
        ),
    ] = True
    level: Annotated[Level, _Spec(values.LEVEL, ("TORCHOBS_LEVEL",), "How much is watched from the first step on.")] = "basic"
    flight_dir: Annotated[
        Path | None,
        _Spec(values.PATH, ("TORCHOBS_DIR",), "Directory of the flight files.", "the best that the machine offers"),
    ] = None
    control_dir: Annotated[
        Path | None,
        _Spec(
            values.PATH,
            ("TORCHOBS_CONTROL_DIR",),
            "Directory in which the exporter leaves its commands.",
            "beside the flight files",
        ),
    ] = None
    file_size: Annotated[
        int,
        _Spec(values.size(256 * 1024, 2 * 1024**2), ("TORCHOBS_FILE_SIZE",), "Size of a rank's flight file.", "1MiB"),
    ] = 1024**2
    exporter: Annotated[
        bool,
        _Spec(values.BOOLEAN, ("TORCHOBS_EXPORTER",), "Whether `init()` starts this node's exporter (not in Kubernetes)."),
    ] = False
    exporter_address: Annotated[
        Address | None,
        _Spec(
            values.ADDRESS,
            ("TORCHOBS_EXPORTER_ADDRESS",),
            "Where that exporter listens, and nowhere else.",
            f"{EXPORTER_ADDRESS}, or the next free port",
        ),
    ] = None
    summary: Annotated[
        bool,
        _Spec(
            values.BOOLEAN,
            ("TORCHOBS_SUMMARY",),
            "Whether `torchobs run` says on a terminal where the live page is, and at the end what became of the run.",
        ),
    ] = True
    job_name: Annotated[
        str | None,
        _Spec(
            values.TEXT,
            ("TORCHOBS_JOB_NAME", "OTEL_SERVICE_NAME"),
            "Label `job_name` of every series.",
            "the scheduler's name of the job, else the script's",
        ),
    ] = None
    run_id: Annotated[
        str | None,
        _Spec(
            values.TEXT,
            ("TORCHOBS_RUN_ID",),
            "Label `run_id`: the same on every rank of a run and after each of its restarts.",
            "the scheduler's or the launcher's",
        ),
    ] = None
    rank: Annotated[
        int | None,
        _Spec(values.integer(0), ("TORCHOBS_RANK",), "This process's rank.", "the launcher's, else 0"),
    ] = None
    local_rank: Annotated[
        int | None,
        _Spec(values.integer(0), ("TORCHOBS_LOCAL_RANK",), "Its rank on its node.", "the launcher's, else 0"),
    ] = None
    world_size: Annotated[
        int | None,
        _Spec(values.integer(1), ("TORCHOBS_WORLD_SIZE",), "How many ranks the run has.", "the launcher's, else 1"),
    ] = None
    restart: Annotated[
        int | None,
        _Spec(values.integer(0), ("TORCHOBS_RESTART",), "How often the run was restarted.", "the launcher's, else 0"),
    ] = None
    kubernetes_job_name: Annotated[
        str | None,
        _Spec(
            values.TEXT,
            ("TORCHOBS_K8S_JOB_NAME",),
            "Name of the Job, JobSet or TrainJob, from the downward API.",
            "unknown",
        ),
    ] = None
    kubernetes_job_uid: Annotated[
        str | None,
        _Spec(values.TEXT, ("TORCHOBS_K8S_JOB_UID",), "Its UID, from the downward API: the run's id.", "unknown"),
    ] = None
    resource_attributes: Annotated[
        Attributes, _Spec(values.ATTRIBUTES, ("OTEL_RESOURCE_ATTRIBUTES",), "What else describes this process.")
    ] = ()
    traceparent: Annotated[
        str | None,
        _Spec(
            values.TRACEPARENT,
            ("TRACEPARENT",),
            "The span, in W3C's notation, of which the run is a part.",
            "the run starts a trace",
        ),
    ] = None
    tracestate: Annotated[
        str | None, _Spec(values.TEXT, ("TRACESTATE",), "What tracing systems add to that span.", "nothing")
    ] = None
    total_steps: Annotated[
        int | None,
        _Spec(
            values.integer(1),
            ("TORCHOBS_TOTAL_STEPS",),
            "Steps that the run will take.",
            "what `torchobs.log(total_steps=...)` says, else unknown",
        ),
    ] = None
    trace_steps: Annotated[
        int | Literal["auto"],
        _Spec(
            values.INTERVAL,
            ("TORCHOBS_TRACE_STEPS",),
            "Every how many steps one is recorded as a span (at most one a second); `auto` takes one in ten seconds. "
            "Slow and anomalous ones are in any case.",
        ),
    ] = "auto"
    grad_interval: Annotated[
        int | Literal["auto"],
        _Spec(
            values.INTERVAL,
            ("TORCHOBS_GRAD_INTERVAL",),
            "Every how many steps the gradient norm is computed; `auto` keeps it within the overhead budget.",
        ),
    ] = "auto"
    layers: Annotated[
        int,
        _Spec(
            values.integer(0, 64),
            ("TORCHOBS_LAYERS",),
            "How many layers have series of their own, the rest is one; from level `advanced` on four times as many.",
        ),
    ] = 16
    overhead_budget: Annotated[
        float,
        _Spec(
            values.fraction(0, 0.2),
            ("TORCHOBS_OVERHEAD_BUDGET",),
            "The part of the training's time that torchobs may take.",
        ),
    ] = 0.005
    disable_probes: Annotated[
        frozenset[str], _Spec(values.names(PROBES), ("TORCHOBS_DISABLE_PROBES",), "Probes that are not installed.")
    ] = frozenset()
    watchdog: Annotated[
        bool,
        _Spec(
            values.BOOLEAN,
            ("TORCHOBS_WATCHDOG",),
            "Whether a rank that holds Python's lock for seconds writes its stacks down, by a timer and a real-time signal.",
        ),
    ] = True
    log_level: Annotated[LogLevel, _Spec(values.LOG_LEVEL, ("TORCHOBS_LOG_LEVEL",), "Level of the logger `torchobs`.")] = (
        "WARNING"
    )
    set_global_providers: Annotated[
        bool,
        _Spec(
            values.BOOLEAN,
            ("TORCHOBS_OTEL_PROVIDERS",),
            "Whether OpenTelemetry's global providers become torchobs', if the application has set none.",
        ),
    ] = True


_SPECS: Mapping[str, _Spec] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(Settings, include_extras=True).items()
}
_DEFAULTS = Settings()


def environment() -> Mapping[str, str]:
    """Return what ``os.environ`` holds now: for :func:`resolve` and ``identity.discover``, which see the same then."""
    return dict(os.environ)


def resolve(
    overrides: Mapping[str, object], environ: Mapping[str, str] | None = None, *, strict: bool = False
) -> tuple[Settings, tuple[SettingsProblem, ...]]:
    """Return the settings in force, and what was ignored on the way to them.

    Args:
        overrides: arguments by the names of the fields, as values or as text; ``None`` means not given.
        environ: the environment, by default the process's own.
        strict: raise instead of ignoring.

    Raises:
        SettingsError: ``strict``, and there was something to ignore.
        TypeError: an override names no setting.
    """
    if unexpected := overrides.keys() - _SPECS.keys():
        word = min(unexpected)
        raise TypeError(f"{word!r} is no setting{values.closest(word, _SPECS)}")
    environ = environment() if environ is None else environ
    problems = [*_unknown_variables(environ)]
    chosen = {name: _choose(name, overrides.get(name), environ, problems) for name in _SPECS}
    if strict and problems:
        raise SettingsError(tuple(problems))
    return Settings(**chosen), tuple(problems)  # type: ignore[arg-type]  # each value is of its own field's kind


def is_service_link(variable: str) -> bool:
    """Tell whether a variable may be one by which Kubernetes describes a Service."""
    return re.fullmatch(_SERVICE_LINK, variable) is not None


def listing() -> tuple[Setting, ...]:
    """Return every setting in words, for help texts and for the check of the documentation."""
    return tuple(_listed(name, spec) for name, spec in _SPECS.items())


def _listed(name: str, spec: _Spec) -> Setting:
    variables = tuple(variable for variable, _ in spec.sources)
    return Setting(name, variables, spec.unset or _words(getattr(_DEFAULTS, name)), spec.kind.allowed, spec.brief)


def _words(default: object) -> str:
    return values.as_text(default) or "none"


def _choose(name: str, argument: object, environ: Mapping[str, str], problems: list[SettingsProblem]) -> object:
    for source, kind, given in _sources(name, argument, environ):
        text: str | None = None
        try:
            text = values.as_text(given).strip()
            return kind.parse(text)
        except PartlyUsableError as error:
            problems.append(SettingsProblem(source, text, f"{error}; allowed is {kind.allowed}"))
            return error.usable
        except (TypeError, ValueError):
            reason = f"allowed is {kind.allowed}" if text is not None else f"cannot be such a {type(given).__name__}"
            problems.append(SettingsProblem(source, text, reason))
    return getattr(_DEFAULTS, name)


def _sources(name: str, argument: object, environ: Mapping[str, str]) -> Iterator[tuple[str, Kind, object]]:
    spec = _SPECS[name]
    if argument is not None:
        yield f"argument {name}", spec.kind, argument
    for variable, kind in spec.sources:
        if text := environ.get(variable, "").strip():
            yield variable, kind, text


def _unknown_variables(environ: Mapping[str, str]) -> Iterator[SettingsProblem]:
    known = [variable for spec in _SPECS.values() for variable in spec.variables if variable.startswith(_PREFIX)]
    for variable in sorted(environ.keys() - set(known)):
        # Its value is not repeated: whoever misspelled the name may have put a secret there.
        # What begins like the exporter's options is for the exporter to check (`torchobs exporter --help` lists them).
        ours = variable.startswith(_PREFIX) and not variable.startswith(_EXPORTERS)
        if ours and not is_service_link(variable):
            yield SettingsProblem(variable, None, f"is no setting{values.closest(variable, known, _PREFIX)}")
