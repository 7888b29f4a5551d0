"""Configuration of the push: options of the exporter and OpenTelemetry's environment variables.

An invalid value is ignored and reported as a problem; the exporter runs without it. A header's value, which may be a secret, is
never part of a message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit, urlunsplit

from torchobs.config import option_types
from torchobs.config.option_types import ValueKind
from torchobs.config.options import Option, SettingsProblem, values_of, with_exporter_variable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SIGNALS = ("metrics", "traces", "logs")
PROTOCOLS = ("http/protobuf", "grpc")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\x20-\x7e\t]*")


@dataclass(frozen=True, slots=True)
class PushTarget:
    """Endpoint and transport settings of one signal."""

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
    span_events: bool = True
    """events are also sent as span events of the run's span"""
    delta: bool = False
    queue_bytes: int = 8 * 1024**2
    """of each signal"""

    def targets(self) -> Iterator[tuple[str, PushTarget]]:
        """Yield the name and the target of each signal that is pushed."""
        for signal, target in zip(SIGNALS, (self.metrics, self.traces, self.logs), strict=True):
            if target is not None:
                yield signal, target


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


def _milliseconds(text: str) -> float:
    return _positive(float(option_types.integer(1).parse(text)) / 1000)  # type: ignore[arg-type]  # an integer kind returns int


def _positive(seconds: float) -> float:
    if seconds <= 0:
        raise ValueError(seconds)
    return seconds


_URL = ValueKind("a URL such as http://collector:4318, without user and password", _url)
_HEADERS = ValueKind("name=value,name=value with percent-encoded values", _headers)
_SECONDS = ValueKind("a duration such as 10s or 1m", lambda text: _positive(option_types.duration_s(text)))
_MILLISECONDS = ValueKind("milliseconds, at least 1", _milliseconds)
_PATH = ValueKind("a path", lambda text: str(option_types.PATH.parse(text)))
_COMPRESSION, _PROTOCOL = option_types.one_of("none", "gzip"), option_types.one_of(*PROTOCOLS)
_TEMPORALITY = option_types.one_of("cumulative", "delta", "lowmemory")
_EXPORTER = ValueKind(
    "otlp or none", lambda text: "otlp" in {word.strip() for word in text.lower().split(",")}, ("otlp", "none")
)


_DETAILS: dict[ValueKind, dict[str, str]] = {
    _URL: {"metavar": "URL", "hidden_if": "@"},
    _HEADERS: {"metavar": "NAME=VALUE,…", "hidden_if": ""},
    _SECONDS: {"metavar": "DURATION"},
    _PATH: {"metavar": "FILE"},
}


def _option(name: str, kind: ValueKind, brief: str, default: str, variable: str = "") -> Option:
    """Return an option with OpenTelemetry's variable for it: by default ``OTEL_EXPORTER_OTLP_NAME``; in ms if a duration."""
    variable = variable or f"OTEL_EXPORTER_OTLP_{name.upper()}"
    also = ((variable, _MILLISECONDS if kind is _SECONDS else kind),)
    details: dict[str, Any] = _DETAILS.get(kind, {})
    flag = f"--otlp.{name.replace('_', '-')}"
    return with_exporter_variable(Option(f"otlp_{name}", kind, brief, default, also=also, flag=flag, **details))


_HEADERS_BRIEF = "Headers of every request. Everybody on the machine can read an option: for secrets, prefer the variable."
_TEMPORALITY_VARIABLE = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"

OPTIONS = (
    _option("endpoint", _URL, "Where to push everything; v1/metrics, v1/traces and v1/logs are added.", "nowhere"),
    _option("metrics_endpoint", _URL, "Where to push metrics, as it is.", "--otlp.endpoint"),
    _option("traces_endpoint", _URL, "Where to push spans, as it is.", "--otlp.endpoint"),
    _option("logs_endpoint", _URL, "Where to push events, as log records, as it is.", "--otlp.endpoint"),
    _option("protocol", _PROTOCOL, "grpc needs the extra otlp-grpc.", "http/protobuf"),
    _option("headers", _HEADERS, _HEADERS_BRIEF, "none"),
    _option("compression", _COMPRESSION, "How requests are compressed.", "none"),
    _option("timeout", _SECONDS, "How long a receiver may be silent.", "10s"),
    _option("certificate", _PATH, "Certificates to trust.", "the system's"),
    _option("client_certificate", _PATH, "The exporter's own certificate.", "none"),
    _option("client_key", _PATH, "The key of that certificate.", "none"),
    _option("metrics", _EXPORTER, "none: push no metrics.", "otlp", "OTEL_METRICS_EXPORTER"),
    _option("traces", _EXPORTER, "none: push no spans.", "otlp", "OTEL_TRACES_EXPORTER"),
    _option("logs", _EXPORTER, "none: push no log records.", "otlp", "OTEL_LOGS_EXPORTER"),
    with_exporter_variable(
        Option(
            "otlp_span_events",
            option_types.BOOLEAN,
            "Whether events are also sent with the run's span.",
            "yes",
            flag="--otlp.span-events",
        )
    ),
    _option(
        "interval",
        _SECONDS,
        "Between two pushes of all metrics; new ranks and ends are pushed at once.",
        "1m",
        "OTEL_METRIC_EXPORT_INTERVAL",
    ),
    _option("span_delay", _SECONDS, "How long an ended span may wait before it is pushed.", "5s", "OTEL_BSP_SCHEDULE_DELAY"),
    _option("temporality", _TEMPORALITY, "What counters and histograms count from.", "cumulative", _TEMPORALITY_VARIABLE),
)
_BY_NAME = {option.name: option for option in OPTIONS}
_OF_EACH_SIGNAL = frozenset(
    {"protocol", "headers", "compression", "timeout", "certificate", "client_certificate", "client_key"}
)
"""Options that can be set for one signal, by a variable with the signal's name in it."""


def parse(given: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> tuple[PushConfig | None, tuple[str, ...]]:
    """Return the push configuration (``None``: nothing is pushed) and the problems found.

    ``given``: the options' texts by field. A setting for one signal overrides that for all signals, and an option overrides
    its environment variable.
    """
    resolver = _Resolver(given, environ)
    targets: dict[str, Any] = {signal: resolver.target(signal) for signal in SIGNALS}
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or not any(targets.values()):
        return None, resolver.problems
    fields = {"interval_s": "interval", "span_delay_s": "span_delay", "span_events": "span_events"}
    chosen = {field: value for field, name in fields.items() if (value := resolver.value(name)) is not None}
    delta = resolver.value("temporality") in {"delta", "lowmemory"}
    return PushConfig(**targets, delta=delta, **chosen), resolver.problems


class _Resolver:
    """Resolves options from the command line and the environment, and collects problems."""

    def __init__(self, given: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> None:
        self._given, self._environ = given, environ
        self._problems: list[SettingsProblem] = []
        self._lacking = ""

    @property
    def problems(self) -> tuple[str, ...]:
        """All problems, without duplicates: settings for all signals are resolved once per signal."""
        return tuple(dict.fromkeys([*map(str, self._problems), *filter(None, [self._lacking])]))

    def target(self, signal: str) -> PushTarget | None:
        """Return a signal's target; ``None`` if the signal is not pushed."""
        url, base = self.value(f"{signal}_endpoint"), self.value("endpoint")
        protocol = self.value("protocol", signal) or PROTOCOLS[0]
        if self.value(signal) is False or not (url or base):
            return None
        if not url:
            url = base if protocol == "grpc" else _join(base, f"v1/{signal}")
        names = ("headers", "certificate", "client_certificate", "client_key")
        rest = {name: value for name in names if (value := self.value(name, signal)) is not None}
        if protocol == "grpc" and find_spec("grpc") is None:
            self._lacking = "the protocol grpc needs another package: pip install 'torchobs[otlp-grpc]'"
            return None
        timeout_s, gzip = self.value("timeout", signal) or 10.0, self.value("compression", signal) == "gzip"
        return PushTarget(url, protocol, timeout_s=timeout_s, gzip=gzip, **rest)

    def value(self, name: str, signal: str = "") -> Any:
        """Return an option's value, the signal's own if it has one; ``None`` if no source has a valid value."""
        option = _BY_NAME[f"otlp_{name}"]
        own = None
        if signal and name in _OF_EACH_SIGNAL:
            ((variable, kind),) = option.also
            own = variable.replace("_OTLP_", f"_OTLP_{signal.upper()}_"), kind
        found = values_of(option, self._given.get(option.name, ()), self._environ, self._problems, own)
        return found[-1] if found else None


def _join(base: str, path: str) -> str:
    """Return a base URL with the signal's path appended."""
    parts = urlsplit(base)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{path}"))
