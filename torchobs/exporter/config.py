"""Configuration of the exporter and of its OTLP push: tables of options for the command line, the environment and the tests.

An invalid value is ignored and reported as a problem; the exporter runs without it. A header of the push may be a secret, and
is never part of a message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args
from urllib.parse import unquote, urlsplit, urlunsplit

from torchobs.catalog import HOST_COLLECTORS
from torchobs.config import options, settings
from torchobs.config import options as kinds
from torchobs.config.options import (
    EXPORTER_PREFIX,
    Address,
    Option,
    SettingsProblem,
    ValueKind,
    values_of,
    with_exporter_variable,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

Mode = Literal["sidecar", "node"]

_PROTECTION = re.compile(rf"--web\.config\.file|{EXPORTER_PREFIX}WEB_CONFIG")
"""Matches messages about a misspelt flag or variable that may have been meant to set the web configuration."""

_ADDRESS = re.compile(r"listen|address|bind|--mode|EXPORTER_MODE|:\d+'", re.IGNORECASE)
"""Matches messages about a misspelt flag or variable that may have been meant to say where to listen."""

_TELEMETRY_PATH = re.compile(r"/[A-Za-z0-9._~/-]*[A-Za-z0-9._~-]", re.ASCII)
_NAME_OR_PREFIX = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?", re.ASCII)
_RESERVED_PATHS = ("/-/healthy", "/-/ready")
_RESERVED = ("/api/", "/live/")

SIGNALS = ("metrics", "traces", "logs")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\x20-\x7e\t]*")


_UNIX = "unix:"


class UnixAddress(NamedTuple):
    """The path of a Unix socket."""

    path: str

    def __str__(self) -> str:
        return f"{_UNIX}{self.path}"


@dataclass(frozen=True, slots=True)
class PushTarget:
    """Endpoint and transport settings of one signal of the push."""

    url: str
    protocol: str = "http/protobuf"
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    timeout_s: float = 10.0
    gzip: bool = False
    certificate: str | None = None
    client_certificate: str | None = None
    client_key: str | None = None


@dataclass(frozen=True, slots=True)
class PushConfig:
    """Configuration of the push. A signal's target is ``None`` if it is not pushed."""

    metrics: PushTarget | None = None
    traces: PushTarget | None = None
    logs: PushTarget | None = None
    interval_s: float = 60.0
    """between two pushes of all metrics"""
    span_delay_s: float = 5.0
    """longest time between a span's end and its reading from the rank's file"""
    queue_bytes: int = 8 * 1024**2
    """of each signal"""

    def targets(self) -> Iterator[tuple[str, PushTarget]]:
        """Yield the name and the target of each signal that is pushed."""
        for signal, target in zip(SIGNALS, (self.metrics, self.traces, self.logs), strict=True):
            if target is not None:
                yield signal, target


@dataclass(frozen=True, slots=True)
class ExporterConfig:
    """An exporter's configuration. Times in seconds."""

    flight_dir: str | None = None
    """None: the default directory of this user's, or this pod's, trainers"""
    listen: tuple[Address | UnixAddress, ...] = ()
    telemetry_path: str = "/metrics"
    web_config_file: str | None = None
    """None: no authentication and no TLS; if the file cannot be read, all requests but health are refused"""
    mode: Mode = "sidecar"
    grace_s: float = 300.0
    """how long a dead rank stays on the metrics page"""
    drain_timeout_s: float = 90.0
    """how long SIGTERM waits for the last scrapes"""
    hang_timeout_s: float | None = None
    """None: learned from each rank's own steps"""
    allow_foreign_owner: bool = False
    series_limit_total: int | None = None
    """lines of all ranks; None: derived from the memory limit"""
    memory_limit: int | None = None
    """bytes; None: the memory cgroup's limit"""
    file_sd: str | None = None
    """file to write for Prometheus' ``file_sd_configs``"""
    drop_metrics: tuple[str, ...] = ()
    """names of samples not to serve, or prefixes followed by ``*``"""
    api_socket: str | None = None
    """None: in the flight directory with ``mode`` node, no socket in a sidecar"""
    api_token_file: str | None = None
    control_dir: str | None = None
    """None: the trainers' default"""
    pod_uid: str | None = None
    """a scrape that asks for the page of another pod is refused"""
    runtime_dir: str | None = None
    """``$XDG_RUNTIME_DIR``"""
    collect_host: tuple[str, ...] = ()
    """a subset of ``catalog.HOST_COLLECTORS``; empty: no metrics of the machine"""
    host_paths: tuple[str, ...] = ()
    """directories; their file systems are reported besides that of the flight files"""
    procfs: str = "/proc"
    sysfs: str = "/sys"
    log_level: str = "info"
    log_format: str = "logfmt"
    notify: str | None = field(default=None, repr=False)
    """where messages go if a run's own environment does not say"""
    push: PushConfig | None = None
    """None: no OTLP push"""
    problems: tuple[str, ...] = ()
    """parts of the configuration that are invalid and were ignored"""

    @property
    def addresses(self) -> tuple[Address | UnixAddress, ...]:
        """Addresses to listen on: by default all interfaces in a sidecar, loopback on a node."""
        if self.listen:
            return self.listen
        return (settings.EXPORTER_ADDRESS if self.mode == "node" else settings.EXPORTER_ADDRESS._replace(host=""),)


def address_of(text: str) -> Address:
    """Return the address for ``host:port``; an empty host means all interfaces. Raises ``ValueError``."""
    return cast("Address", kinds.ADDRESS.parse(text))


def _listen_address(text: str) -> Address | UnixAddress:
    if not text.startswith(_UNIX):
        return address_of(text)
    path = text.removeprefix(_UNIX)
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise ValueError(text)
    return UnixAddress(path)


def _name_or_prefix(text: str) -> str:
    if not _NAME_OR_PREFIX.fullmatch(text):
        raise ValueError(text)
    return text


def _telemetry_path(text: str) -> str:
    if not _TELEMETRY_PATH.fullmatch(text) or text in _RESERVED_PATHS or text.startswith(_RESERVED):
        raise ValueError(text)
    return text


def _collectors(text: str) -> tuple[str, ...]:
    word = text.lower()
    if word in {_ALL, "none"}:
        return HOST_COLLECTORS if word == _ALL else ()
    named = {name.strip() for name in word.split(",")} - {""}
    if not named or not named <= set(HOST_COLLECTORS):
        raise ValueError(text)
    return tuple(name for name in HOST_COLLECTORS if name in named)


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname or "@" in parts.netloc or parts.fragment or parts.port == 0:
        raise ValueError(text)
    if not _HEADER_VALUE.fullmatch(text) or " " in text:
        raise ValueError(text)
    return text


def _headers(text: str) -> tuple[tuple[str, str], ...]:
    pairs = []
    for item in filter(None, map(str.strip, text.split(","))):
        name, equals, value = item.partition("=")
        pair = unquote(name.strip()), unquote(value.strip())
        if not equals or not _HEADER_NAME.fullmatch(pair[0]) or not _HEADER_VALUE.fullmatch(pair[1]):
            raise ValueError("a header")
        pairs.append(pair)
    return tuple(pairs)


def _seconds(text: str) -> float:
    if (seconds := kinds.duration_s(text)) <= 0:
        raise ValueError(text)
    return seconds


_ALL = "all"
_COLLECTORS = ValueKind(f"all, none, or a comma-separated list of {', '.join(HOST_COLLECTORS)}", _collectors)
_PATH = ValueKind("a path", lambda text: str(kinds.PATH.parse(text)))

OPTIONS = tuple(map(with_exporter_variable, (
    Option(
        "flight_dir", _PATH, "Directory of the flight files.",
        "where trainers of this user, or of this pod, put them", ("TORCHOBS_DIR",), flag="--flight-dir", metavar="DIR",
    ),
    Option(
        "listen", ValueKind(f"{kinds.ADDRESS.allowed}, or unix:/path", _listen_address),
        "HOST:PORT or unix:/PATH to listen on.",
        ":10960, with --mode node 127.0.0.1:10960", flag="--web.listen-address", metavar="ADDRESS", several=True,
    ),
    Option(
        "telemetry_path", ValueKind("a path that begins with / and has an end", _telemetry_path), "Path of the metrics.",
        "/metrics", flag="--web.telemetry-path", metavar="PATH",
    ),
    Option(
        "web_config_file", _PATH,
        "TLS, client certificates and passwords, in the format of Prometheus' exporters; read again when it changes.",
        "", flag="--web.config.file", metavar="FILE",
    ),
    Option(
        "file_sd", _PATH, "Write this exporter's address there for Prometheus' file_sd_configs; %h is the machine's name.",
        "", flag="--web.file-sd", metavar="FILE",
    ),
    Option(
        "grace_s", kinds.DURATION, "How long a dead rank keeps its counters, its last loss and the way it ended on the page.",
        "5m", flag="--grace", metavar="DURATION",
    ),
    Option(
        "drain_timeout_s", kinds.DURATION,
        "How long SIGTERM waits for every scraper to fetch the final state; a second one ends at once.",
        "90s", flag="--drain-timeout", metavar="DURATION",
    ),
    Option(
        "hang_timeout_s",
        ValueKind("auto, or a duration such as 10m", lambda text: None if text == "auto" else kinds.duration_s(text)),
        "How long a rank may take for a step before it is hung.",
        "auto, 20 times its usual step, at least 1m", flag="--hang-timeout", metavar="DURATION",
    ),
    Option(
        "mode", kinds.one_of(*get_args(Mode)),
        "sidecar: never leaves by itself, waits for a port that is taken. node: takes the next one.", "sidecar", flag="--mode",
    ),
    Option(
        "allow_foreign_owner", kinds.BOOLEAN,
        "Let an exporter that runs as root read the directory and the files of another user.",
        "false", flag="--allow-foreign-owner", metavar="true|false", bare="true",
    ),
    Option(
        "series_limit_total", kinds.integer(1), "Most series of all ranks together, each bucket of a histogram being one.",
        "as many as there is memory for, 1000000 at most", flag="--series-limit-total", metavar="NUMBER",
    ),
    Option(
        "memory_limit", kinds.MEMORY, "Memory to get by with: --series-limit-total follows from it.",
        "the container's limit", flag="--memory-limit", metavar="SIZE",
    ),
    Option(
        "drop_metrics",
        ValueKind(
            "a metric's name on the page, or the beginning of one and a * (torchobs_grad_layer_*); regular expressions are for "
            "metric_relabel_configs of the scraper",
            _name_or_prefix,
        ),
        "Metric of the ranks not to serve, by the name it has on the page, or by its beginning and a *.",
        "", flag="--drop-metrics", metavar="NAME", several=True,
    ),
    Option(
        "api_socket", ValueKind("a path, or off", lambda text: str(kinds.PATH.parse(text))),
        "Unix socket for the API, over which commands are taken; its mode is 0660.",
        "exporter.sock beside the flight files with --mode node, else off", flag="--api.socket", metavar="PATH",
    ),
    Option(
        "api_token_file", _PATH, "File with a bearer token: whoever sends it may command, also from other machines.",
        "none", flag="--api.token-file", metavar="FILE",
    ),
    Option(
        "control_dir", _PATH, "Directory for commands to the ranks, where they look for them.",
        "that of the pod, or control beside the flight files", ("TORCHOBS_CONTROL_DIR",), flag="--control.dir", metavar="DIR",
    ),
    Option(
        "pod_uid", kinds.TEXT,
        "UID of the pod that this exporter is in: a scrape with ?pod=UID of another gets status 421, not this one's page.",
        "none", ("POD_UID",), flag="--pod.uid", metavar="UID",
    ),
    Option(
        "collect_host", _COLLECTORS,
        f"Collect the machine's numbers, too, where there is no node_exporter: all, or some of {', '.join(HOST_COLLECTORS)}.",
        "none", flag="--collect.host", metavar="LIST", bare=_ALL,
    ),
    Option(
        "host_paths", _PATH,
        "Directory of checkpoints; its file system is reported. That of the flight files is "
        "reported anyway.", "", flag="--collect.host.path", metavar="DIR", several=True,
    ),
    Option("procfs", _PATH, "Where the machine's /proc is mounted.", "/proc", flag="--path.procfs", metavar="DIR"),
    Option("sysfs", _PATH, "Where the machine's /sys is mounted.", "/sys", flag="--path.sysfs", metavar="DIR"),
    settings.NOTIFY,
    Option("log_level", kinds.one_of("debug", "info", "warn", "error"), "The least severe lines.", "info", flag="--log.level"),
    Option("log_format", kinds.one_of("logfmt", "json"), "How to write them.", "logfmt", flag="--log.format"),
)))  # fmt: skip

_URL = ValueKind("a URL such as http://collector:4318, without user and password", _url)
_HEADERS = ValueKind("name=value,name=value with percent-encoded values", _headers)
_SECONDS = ValueKind("a duration such as 10s or 1m", _seconds)
_MILLISECONDS = ValueKind("milliseconds, at least 1", lambda text: cast("int", kinds.integer(1).parse(text)) / 1000)
_PROTOCOL, _WORD = kinds.one_of("http/protobuf", "grpc"), kinds.one_of("none", "gzip")
_COMPRESSION = ValueKind("none or gzip", lambda text: _WORD.parse(text) == "gzip", ("none", "gzip"))
_EXPORTER = ValueKind(
    "otlp or none", lambda text: "otlp" in {word.strip() for word in text.lower().split(",")}, ("otlp", "none")
)
_DETAILS: dict[ValueKind, dict[str, str]] = {
    _URL: {"metavar": "URL", "hidden_if": "@"},
    _HEADERS: {"metavar": "NAME=VALUE,…", "hidden_if": ""},
    _SECONDS: {"metavar": "DURATION"},
    _PATH: {"metavar": "FILE"},
}


def _push_option(name: str, kind: ValueKind, brief: str, default: str, variable: str | None = None) -> Option:
    """Return an option with OpenTelemetry's variable for it: by default ``OTEL_EXPORTER_OTLP_NAME``; in ms if a duration."""
    variable = f"OTEL_EXPORTER_OTLP_{name.upper()}" if variable is None else variable
    also = ((variable, _MILLISECONDS if kind is _SECONDS else kind),) if variable else ()
    details: dict[str, Any] = _DETAILS.get(kind, {})
    flag = f"--otlp.{name.replace('_', '-')}"
    return with_exporter_variable(Option(f"otlp_{name}", kind, brief, default, also=also, flag=flag, **details))


_HEADERS_BRIEF = "Headers of every request. Everybody on the machine can read an option: for secrets, prefer the variable."
_INTERVAL_BRIEF = "Between two pushes of all metrics; new ranks and ends are pushed at once."

PUSH_OPTIONS = (
    _push_option("endpoint", _URL, "Where to push everything; v1/metrics, v1/traces and v1/logs are added.", "nowhere"),
    _push_option("metrics_endpoint", _URL, "Where to push metrics, as it is.", "--otlp.endpoint"),
    _push_option("traces_endpoint", _URL, "Where to push spans, as it is.", "--otlp.endpoint"),
    _push_option("logs_endpoint", _URL, "Where to push events, as log records, as it is.", "--otlp.endpoint"),
    _push_option("protocol", _PROTOCOL, "grpc needs the extra otlp-grpc.", "http/protobuf"),
    _push_option("headers", _HEADERS, _HEADERS_BRIEF, "none"),
    _push_option("compression", _COMPRESSION, "How requests are compressed.", "none"),
    _push_option("timeout", _SECONDS, "How long a receiver may be silent.", "10s"),
    _push_option("certificate", _PATH, "Certificates to trust.", "the system's"),
    _push_option("client_certificate", _PATH, "The exporter's own certificate.", "none"),
    _push_option("client_key", _PATH, "The key of that certificate.", "none"),
    _push_option("metrics", _EXPORTER, "none: push no metrics.", "otlp", "OTEL_METRICS_EXPORTER"),
    _push_option("traces", _EXPORTER, "none: push no spans.", "otlp", "OTEL_TRACES_EXPORTER"),
    _push_option("logs", _EXPORTER, "none: push no log records.", "otlp", "OTEL_LOGS_EXPORTER"),
    _push_option("interval", _SECONDS, _INTERVAL_BRIEF, "1m", "OTEL_METRIC_EXPORT_INTERVAL"),
    _push_option(
        "span_delay", _SECONDS, "How long an ended span may wait before it is pushed.", "5s", "OTEL_BSP_SCHEDULE_DELAY"
    ),
)
EVERY_OPTION = (*OPTIONS, *PUSH_OPTIONS)
_PUSH_BY_NAME = {option.name.removeprefix("otlp_"): option for option in PUSH_OPTIONS}
_TARGET_FIELDS = {
    "protocol": "protocol", "headers": "headers", "timeout_s": "timeout", "gzip": "compression",
    "certificate": "certificate", "client_certificate": "client_certificate", "client_key": "client_key",
}  # fmt: skip
"""Options that can be set for one signal, by a variable with the signal's name in it."""
_PUSH_FIELDS = {"interval_s": "interval", "span_delay_s": "span_delay"}


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a problem for each variable with the exporter's prefix that belongs to no option and no setting."""
    names = [name for option in EVERY_OPTION for name in option.variables]
    others = [name for setting in settings.OPTIONS for name in setting.variables]
    return [
        str(problem) for problem in options.unknown_variables(environ, EXPORTER_PREFIX, names, what="option", others=others)
    ]


def parse(texts: Mapping[str, Sequence[str]], environ: Mapping[str, str], mistakes: Sequence[str] = ()) -> ExporterConfig:
    """Return the configuration for the command line's values (``texts``: by option name) and the environment.

    An invalid value is ignored and listed in ``problems`` instead of raised: a sidecar that exits keeps the pod's training from
    starting. If it may have said where to listen, that is loopback only. ``mistakes``: other errors of the command line, to be
    listed as well.
    """
    complaints = [*mistakes, *unknown_variables(environ)]
    problems: list[SettingsProblem] = []
    chosen = options.read(OPTIONS, texts, environ, problems)
    ignored = {problem.name for problem in problems}
    unread = {option.name for option in OPTIONS if ignored & {option.flag, *option.every_variable}}
    if "web_config_file" in unread or any(map(_PROTECTION.search, complaints)):
        chosen.setdefault("web_config_file", "")  # refuse all requests: the page was meant to be protected
    is_hidden = bool(unread & {"listen", "mode"}) or any(map(_ADDRESS.search, complaints))
    if is_hidden and "listen" not in chosen and chosen.get("mode") != "node":
        chosen["listen"] = (settings.EXPORTER_ADDRESS,)
    push, push_problems = parse_push(texts, environ)
    reasons = dict.fromkeys([*complaints, *map(str, problems), *push_problems])
    return ExporterConfig(**chosen, push=push, runtime_dir=environ.get("XDG_RUNTIME_DIR"), problems=tuple(reasons))  # type: ignore[arg-type]  # each option's kind has its field's type


def parse_push(texts: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> tuple[PushConfig | None, tuple[str, ...]]:
    """Return the push configuration (``None``: nothing is pushed) and the problems found.

    ``texts``: those of the options by field. A setting for one signal overrides that for all signals, and an option overrides
    its environment variable.
    """
    problems: list[SettingsProblem] = []

    def value(name: str, signal: str = "") -> Any:
        """Return an option's value, the signal's own if it has one; ``None`` if no source has a valid value."""
        option = _PUSH_BY_NAME[name]
        variables = [(variable.replace("_OTLP_", f"_OTLP_{signal.upper()}_"), kind) for variable, kind in option.also if signal]
        return next(reversed(values_of(option, texts.get(option.name, ()), environ, problems, *variables)), None)

    def chosen(fields: Mapping[str, str], signal: str = "") -> dict[str, Any]:
        return {field: setting for field, name in fields.items() if (setting := value(name, signal)) is not None}

    def target(signal: str) -> PushTarget | None:
        url, base = value(f"{signal}_endpoint"), value("endpoint")
        if value(signal) is False or not (url or base):
            return None
        push_to = PushTarget(url or base, **chosen(_TARGET_FIELDS, signal))
        if push_to.protocol == "grpc" and find_spec("grpc") is None:
            lacking = "needs another package: pip install 'torchobs[otlp-grpc]'"
            problems.append(SettingsProblem("the protocol grpc", None, lacking))
            return None
        return push_to if url or push_to.protocol == "grpc" else replace(push_to, url=_join(base, f"v1/{signal}"))

    targets: dict[str, Any] = {signal: target(signal) for signal in SIGNALS}
    is_disabled = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    push = PushConfig(**targets, **chosen(_PUSH_FIELDS)) if any(targets.values()) and not is_disabled else None
    return push, tuple(dict.fromkeys(map(str, problems)))  # settings for all signals are resolved once per signal


def _join(base: str, path: str) -> str:
    """Return a base URL with the signal's path appended."""
    parts = urlsplit(base)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{path}"))
