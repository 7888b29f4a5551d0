"""Prometheus' text formats, byte for byte as prometheus-client writes them, five times as fast: labels are escaped once.

prometheus-client is the tests' reference, and renders its own process metrics. Two formats: OpenMetrics and the classic text
format 0.0.4, each with one of the escaping schemes that Prometheus 3 negotiates. Our names and labels consist of legacy
characters only, so that names are never quoted.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import openmetrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import (
    ALLOWUTF8,
    DOTS,
    UNDERSCORES,
    VALUES,
    escape_label_name,
    escape_metric_name,
)
from prometheus_client.utils import floatToGoString

from torchobs.exporter.http.content_negotiation import wishes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client.registry import Collector

    from torchobs.exporter.http.content_negotiation import AcceptItem

_SECOND = 1_000_000_000
PLAIN_BELOW = 1e6
"""From this value on Go writes an exponent."""
_PIECE = 64 * 1024
"""Characters encoded at a time: they stay in the processor's cache until they are compressed."""
END = "# EOF\n"
"""The last line of a page in OpenMetrics."""


_ESCAPINGS = {ALLOWUTF8, UNDERSCORES, DOTS, VALUES}
_PLAIN, _OPENMETRICS = "text/plain", "application/openmetrics-text"
_VERSIONS = {
    _OPENMETRICS: {"": _OPENMETRICS, "1.0.0": f"{_OPENMETRICS};version=1.0.0"},
    _PLAIN: {"": _PLAIN, "0.0.4": _PLAIN, "1.0.0": f"{_PLAIN};version=1.0.0"},
    "text/*": {"": _PLAIN},
    "*/*": {"": _PLAIN},
}
"""The ``Accept`` header for prometheus-client, by media type and version"""


class Style(NamedTuple):
    """Format and escaping scheme of a page."""

    openmetrics: bool
    escaping: str = UNDERSCORES


class Format(NamedTuple):
    """The negotiated format. ``foreign``: prometheus-client's encoder for it."""

    style: Style
    content_type: str
    foreign: Callable[[Collector], bytes]


@lru_cache(64)  # a scraper sends the same header every time, and parsing takes as long as a hundred lines
def negotiate(accept: str) -> Format:
    """Choose the supported format with the greatest weight; without one, as for browsers, the classic text format.

    Only that format is passed on to prometheus-client, which ignores weights and accepts versions that it does not write.
    """
    foreign, content_type = choose_encoder(next((known for one in wishes(accept) if (known := _known(one))), ""))
    given = foreign.keywords if isinstance(foreign, partial) else {}
    function = foreign.func if isinstance(foreign, partial) else foreign
    is_openmetrics = function is openmetrics.exposition.generate_latest
    return Format(Style(is_openmetrics, given.get("escaping", UNDERSCORES)), content_type, foreign)


def _known(wish: AcceptItem) -> str:
    """Return the ``Accept`` element for prometheus-client; empty if the format is not supported or has the weight 0."""
    versions = _VERSIONS.get(wish.what, {})
    version, escaping = wish.parameters.get("version", ""), wish.parameters.get("escaping", "")
    if wish.weight <= 0 or version not in versions:
        return ""
    return f"{versions[version]};escaping={escaping if escaping in _ESCAPINGS else UNDERSCORES}"


_label_name: Callable[[str, str], str] = lru_cache(1024)(escape_label_name)  # few distinct names, 7 µs each
_metric_name: Callable[[str, str], str] = lru_cache(1024)(escape_metric_name)


def header(style: Style, name: str, kind: str, unit: str, brief: str) -> str:
    """Return a family's header, without the last line break. ``name``: OpenMetrics', a counter's without ``_total``."""
    if style.openmetrics:
        escaped = _metric_name(name, style.escaping)
        lines = f"# HELP {escaped} {_text(brief)}\n# TYPE {escaped} {kind}"
        return f"{lines}\n# UNIT {escaped} {unit}" if unit else lines
    escaped = _metric_name(f"{name}_total" if kind == "counter" else name, style.escaping)
    documentation = brief.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {escaped} {documentation}\n# TYPE {escaped} {kind}"


def prefix(style: Style, name: str, labels: Mapping[str, str]) -> str:
    """Return a sample's line up to its value."""
    pairs = ",".join([_pair(style.escaping, label, value) for label, value in sorted(labels.items())])
    return f"{_metric_name(name, style.escaping)}{{{pairs}}} " if pairs else f"{_metric_name(name, style.escaping)} "


@lru_cache(2048)  # all series of a rank share three labels, and each layer has several metrics
def _pair(escaping: str, label: str, value: str) -> str:
    return f'{_label_name(label, escaping)}="{_text(value)}"'


def number(value: float) -> str:
    """Return a finite value as Go formats it."""
    return repr(float(value)) if value < PLAIN_BELOW else _go(value)


def exemplar(labels: Mapping[str, str], value: float, at_ns: int) -> str:
    """Return an OpenMetrics exemplar, the text after a bucket's or a counter's value.

    ``at_ns``: time of the observation, Unix ns; a float would lose the last two digits.
    """
    pairs = ",".join(f'{label}="{_text(text)}"' for label, text in sorted(labels.items()))
    return f" # {{{pairs}}} {_go(value)} {at_ns // _SECOND}.{at_ns % _SECOND:09d}"


def pieces(style: Style, foreign: bytes, families: Iterable[str]) -> Iterator[bytes]:
    """Yield the page in pieces: prometheus-client's output, followed by our families."""
    yield foreign.removesuffix(END.encode()) if style.openmetrics else foreign
    waiting, size = list[str](), 0
    for text in families:
        waiting.append(text)
        size += len(text)
        if size >= _PIECE:
            yield "".join(waiting).encode()
            waiting, size = [], 0
    yield "".join([*waiting, END if style.openmetrics else ""]).encode()


def page(style: Style, foreign: bytes, families: Iterable[str]) -> bytes:
    """Return the page: prometheus-client's output, followed by our families."""
    return b"".join(pieces(style, foreign, families))


def _go(value: float) -> str:
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]  # it has no types
    return text


def _text(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
