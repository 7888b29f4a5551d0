"""What the push can be told: by options of the exporter, and by OpenTelemetry's own variables.

Whatever is not allowed is left out and told: the exporter goes on without it. What a header holds is never repeated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

from torchobs.config import option_types
from torchobs.config.option_types import ValueKind
from torchobs.exporter.config import Option, duration_s
from torchobs.exporter.otlp.counters import SIGNALS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

PROTOCOLS = ("http/protobuf", "grpc")
_TEMPORALITIES = ("cumulative", "delta", "lowmemory")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\x20-\x7e\t]*")


@dataclass(frozen=True, slots=True)
class PushTarget:
    """Where one signal goes, and how."""

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
    """What is pushed. ``None`` for a signal that is not."""

    metrics: PushTarget | None = None
    traces: PushTarget | None = None
    interval_s: float = 60.0
    """between two pushes of all metrics"""
    span_delay_s: float = 5.0
    """how long a span that has ended may wait in its rank's file"""
    delta: bool = False
    queue_bytes: int = 8 * 1024**2
    """of each signal"""

    def targets(self) -> Iterator[tuple[str, PushTarget]]:
        """Yield the signals that are pushed, and where to."""
        for signal, target in zip(SIGNALS, (self.metrics, self.traces), strict=True):
            if target is not None:
                yield signal, target


class _Value(NamedTuple):
    """One option and OpenTelemetry's variable of the same meaning, which may have another unit."""

    field: str
    metavar: str
    brief: str
    kind: ValueKind
    variable: str
    """of all signals; with the signal's name in it where ``each``"""
    variable_kind: ValueKind
    each: bool = False
    secret: bool = False
    several: bool = False

    @property
    def flag(self) -> str:
        return f"--otlp.{self.field.replace('_', '-')}"


def _one_of(*words: str) -> ValueKind:
    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(text)
        return text.lower()

    return ValueKind(option_types.either(words), parse)


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.username or parts.fragment or parts.port == 0:
        raise ValueError(text)
    if not _HEADER_VALUE.fullmatch(text) or " " in text:
        raise ValueError(text)
    return text


def _headers(text: str) -> tuple[tuple[str, str], ...]:
    found = []
    for item in filter(None, map(str.strip, text.split(","))):
        name, equals, value = item.partition("=")
        pair = unquote(name.strip()), unquote(value.strip())
        if not equals or not _HEADER_NAME.fullmatch(pair[0]) or not _HEADER_VALUE.fullmatch(pair[1]):
            raise ValueError("a header")
        found.append(pair)
    return tuple(found)


def _milliseconds(text: str) -> float:
    return _positive(float(option_types.integer(1).parse(text)) / 1000)  # type: ignore[arg-type]  # that kind is of integers


def _positive(seconds: float) -> float:
    if seconds <= 0:
        raise ValueError(seconds)
    return seconds


_URL = ValueKind("a URL such as http://collector:4318, without user and password", _url)
_HEADERS = ValueKind("name=value,name=value with percent-encoded values", _headers)
_SECONDS = ValueKind("a duration such as 10s or 1m", lambda text: _positive(duration_s(text)))
_MILLISECONDS = ValueKind("milliseconds, at least 1", _milliseconds)
_PATH = ValueKind("a path", lambda text: str(option_types.PATH.parse(text)))
_COMPRESSION, _PROTOCOL, _TEMPORALITY = _one_of("none", "gzip"), _one_of(*PROTOCOLS), _one_of(*_TEMPORALITIES)
_EXPORTER = ValueKind("otlp or none", lambda text: "otlp" in {word.strip() for word in text.lower().split(",")})

_VALUES = (
    _Value(
        "endpoint", "URL", "Where to push metrics and spans; v1/metrics and v1/traces are added. [default: nowhere]",
        _URL, "OTEL_EXPORTER_OTLP_ENDPOINT", _URL,
    ),
    _Value(
        "metrics_endpoint", "URL", "Where to push metrics, as it is. [default: --otlp.endpoint]",
        _URL, "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", _URL,
    ),
    _Value(
        "traces_endpoint", "URL", "Where to push spans, as it is. [default: --otlp.endpoint]",
        _URL, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", _URL,
    ),
    _Value(
        "protocol", "[http/protobuf|grpc]", "grpc needs the extra otlp-grpc. [default: http/protobuf]",
        _PROTOCOL, "OTEL_EXPORTER_OTLP_PROTOCOL", _PROTOCOL, each=True,
    ),
    _Value(
        "headers", "NAME=VALUE,…", "Headers of every request. Everybody on the machine can read an option: for secrets, "
        "prefer the variable.",
        _HEADERS, "OTEL_EXPORTER_OTLP_HEADERS", _HEADERS, each=True, secret=True,
    ),
    _Value(
        "compression", "[none|gzip]", "How requests are compressed. [default: none]",
        _COMPRESSION, "OTEL_EXPORTER_OTLP_COMPRESSION", _COMPRESSION, each=True,
    ),
    _Value(
        "timeout", "DURATION", "How long a request may take. [default: 10s]",
        _SECONDS, "OTEL_EXPORTER_OTLP_TIMEOUT", _MILLISECONDS, each=True,
    ),
    _Value(
        "certificate", "FILE", "Certificates to trust. [default: the system's]",
        _PATH, "OTEL_EXPORTER_OTLP_CERTIFICATE", _PATH, each=True,
    ),
    _Value(
        "client_certificate", "FILE", "The exporter's own certificate.",
        _PATH, "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", _PATH, each=True,
    ),
    _Value(
        "client_key", "FILE", "The key of that certificate.",
        _PATH, "OTEL_EXPORTER_OTLP_CLIENT_KEY", _PATH, each=True,
    ),
    _Value(
        "metrics", "[otlp|none]", "none: push no metrics. [default: otlp]",
        _EXPORTER, "OTEL_METRICS_EXPORTER", _EXPORTER,
    ),
    _Value(
        "traces", "[otlp|none]", "none: push no spans. [default: otlp]",
        _EXPORTER, "OTEL_TRACES_EXPORTER", _EXPORTER,
    ),
    _Value(
        "interval", "DURATION", "Between two pushes of all metrics; new ranks and ends are pushed at once. [default: 1m]",
        _SECONDS, "OTEL_METRIC_EXPORT_INTERVAL", _MILLISECONDS,
    ),
    _Value(
        "span_delay", "DURATION", "How long an ended span may wait before it is pushed. [default: 5s]",
        _SECONDS, "OTEL_BSP_SCHEDULE_DELAY", _MILLISECONDS,
    ),
    _Value(
        "temporality", "[cumulative|delta]", "What counters and histograms count from. [default: cumulative]",
        _TEMPORALITY, "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", _TEMPORALITY,
    ),
)  # fmt: skip
_BY_FIELD = {value.field: value for value in _VALUES}
OPTIONS = tuple(Option(f"otlp_{one.field}", one.flag, one.metavar, one.kind, one.brief) for one in _VALUES)


def parse(given: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> tuple[PushConfig | None, tuple[str, ...]]:
    """Return what is to be pushed, ``None`` for nothing, and what of the configuration cannot be honoured.

    ``given`` are the options as text, by field. What is said for one signal beats what is said for all, and an option its
    variable.
    """
    asked = EnvResolver(given, environ)
    targets: dict[str, Any] = {signal: asked.target(signal) for signal in SIGNALS}
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or not any(targets.values()):
        return None, tuple(dict.fromkeys(asked.problems))
    found = {"interval_s": asked.value("interval"), "span_delay_s": asked.value("span_delay")}
    chosen: dict[str, Any] = {name: value for name, value in found.items() if value is not None}
    delta = asked.value("temporality") in {"delta", "lowmemory"}
    return PushConfig(**targets, delta=delta, **chosen), tuple(dict.fromkeys(asked.problems))


class EnvResolver:
    """Looks a value up, and remembers what was wrong with the sources that it asked."""

    def __init__(self, given: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> None:
        self._given, self._environ = given, environ
        self.problems: list[str] = []

    def target(self, signal: str) -> PushTarget | None:
        """Return where a signal goes; ``None`` if it is not to be pushed."""
        url, base = self.value(f"{signal}_endpoint"), self.value("endpoint")
        protocol = self.value("protocol", signal) or PROTOCOLS[0]
        if self.value(signal) is False or not (url or base):
            return None
        if not url:
            url = base if protocol == "grpc" else _join(base, f"v1/{signal}")
        names = ("headers", "certificate", "client_certificate", "client_key")
        rest = {name: value for name in names if (value := self.value(name, signal)) is not None}
        if protocol == "grpc" and find_spec("grpc") is None:
            self.problems.append("the protocol grpc needs another package: pip install 'torchobs[otlp-grpc]'")
            return None
        timeout_s, gzip = self.value("timeout", signal) or 10.0, self.value("compression", signal) == "gzip"
        return PushTarget(url, protocol, timeout_s=timeout_s, gzip=gzip, **rest)

    def value(self, field: str, signal: str = "") -> Any:
        """Return a value, of the signal if it has its own; ``None`` where nobody said anything that is allowed."""
        one = _BY_FIELD[field]
        for source, kind, text in self._sources(one, signal):
            try:
                return kind.parse(text)
            except ValueError:
                shown = "" if one.secret or "@" in text else f" {text!r}"
                self.problems.append(f"{source}{shown}: allowed is {kind.allowed}")
        return None

    def _sources(self, one: _Value, signal: str) -> Iterator[tuple[str, ValueKind, str]]:
        variables = [one.variable]
        if one.each and signal:
            variables.insert(0, one.variable.replace("_OTLP_", f"_OTLP_{signal.upper()}_"))
        texts = [(one.flag, one.kind, text) for text in self._given.get(f"otlp_{one.field}", ())]
        texts[:0] = [(name, one.variable_kind, self._environ.get(name, "")) for name in variables[:-1]]
        texts += [(variables[-1], one.variable_kind, self._environ.get(variables[-1], ""))]
        return ((source, kind, text.strip()) for source, kind, text in texts if text.strip())


def _join(base: str, path: str) -> str:
    """Return a base URL with the signal's path behind its own."""
    parts = urlsplit(base)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{path}"))
