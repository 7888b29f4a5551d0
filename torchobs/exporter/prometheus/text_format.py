"""Prometheus' text formats, byte for byte as prometheus-client writes them, five times as fast.

prometheus-client is the tests' reference, and renders its own process metrics. Two formats: OpenMetrics and the classic text
format 0.0.4, each with one of the escaping schemes that Prometheus 3 negotiates. Our names and labels consist of legacy
characters only, so that names are never quoted.

Labels are escaped once, and many numbers formatted at a time, for they take most of a page's time: ``repr`` takes 0.8 µs for a
float of 17 digits, msgspec 0.08 µs. Both write the shortest digits that round-trip, and the same text where neither writes an
exponent: no difference in 2 million floats, including powers of two, their neighbours and 32-bit floats.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import msgspec
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

from torchobs.catalog import Kind
from torchobs.exporter.content_negotiation import accept_items
from torchobs.ranks.labels import text as without_surrogates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from prometheus_client.registry import Collector

    from torchobs.exporter.content_negotiation import AcceptItem
    from torchobs.exporter.prometheus.name_registry import Family

PLAIN_FROM, PLAIN_BELOW = 1e-4, 1e6
"""Numbers that are written without an exponent: Python writes one below, Go from there on."""
SMALL_FROM, LARGE_BELOW = 1e-20, 1e16
"""Numbers beyond these are too rare for a fast path."""
END = "# EOF\n"
"""The last line of a page in OpenMetrics."""
_PIECE = 64 * 1024
"""Characters encoded at a time: they stay in the processor's cache until they are compressed."""
_SECOND = 1_000_000_000
_TYPES = {Kind.COUNTER: "counter", Kind.GAUGE: "gauge", Kind.UPDOWN: "gauge", Kind.HISTOGRAM: "histogram"}
_UNITS = {"s": "seconds", "By": "bytes"}

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
    foreign, content_type = choose_encoder(next((known for one in accept_items(accept) if (known := _known(one))), ""))
    escaping = getattr(foreign, "keywords", {}).get("escaping", UNDERSCORES)
    return Format(Style(content_type.startswith(_OPENMETRICS), escaping), content_type, foreign)


def _known(item: AcceptItem) -> str:
    """Return the ``Accept`` element for prometheus-client; empty if the format is not supported or has the weight 0."""
    versions = _VERSIONS.get(item.name, {})
    version, escaping = item.parameters.get("version", ""), item.parameters.get("escaping", "")
    if item.weight <= 0 or version not in versions:
        return ""
    return f"{versions[version]};escaping={escaping if escaping in _ESCAPINGS else UNDERSCORES}"


_label_name: Callable[[str, str], str] = lru_cache(1024)(escape_label_name)  # few distinct names, 7 µs each
_metric_name: Callable[[str, str], str] = lru_cache(1024)(escape_metric_name)


class Heading(NamedTuple):
    """A family's header lines, each but the first preceded by its line break."""

    family: str
    text: str
    created: str
    """header of the ``_created`` samples, which are a family of their own in the classic format"""


@lru_cache(8192)  # ranks have the same families
def heading(style: Style, family: Family, brief: str) -> Heading:
    """Return a family's header."""
    unit = _UNITS.get(family.unit, "")
    unit = unit if family.name.endswith(f"_{unit}") else ""
    brief = without_surrogates(brief)
    header = _header(style, family.name, _TYPES[family.kind], unit, brief)
    return Heading(family.name, header, _header(style, f"{family.name}_created", "gauge", "", brief))


def _header(style: Style, name: str, kind: str, unit: str, brief: str) -> str:
    """Return header lines. ``name``: OpenMetrics', a counter's without ``_total``."""
    if style.openmetrics:
        escaped = _metric_name(name, style.escaping)
        lines = f"# HELP {escaped} {_text(brief)}\n# TYPE {escaped} {kind}"
        return f"{lines}\n# UNIT {escaped} {unit}" if unit else lines
    escaped = _metric_name(f"{name}_total" if kind == "counter" else name, style.escaping)
    documentation = brief.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {escaped} {documentation}\n# TYPE {escaped} {kind}"


def prefix(style: Style, name: str, labels: Mapping[str, str]) -> str:
    """Return a sample's line up to its number, preceded by its line break."""
    pairs = ",".join([_pair(style.escaping, label, value) for label, value in sorted(labels.items())])
    return f"\n{_metric_name(name, style.escaping)}{{{pairs}}} " if pairs else f"\n{_metric_name(name, style.escaping)} "


@lru_cache(2048)  # all series of a rank share three labels, and each layer has several metrics
def _pair(escaping: str, label: str, value: str) -> str:
    return f'{_label_name(label, escaping)}="{_text(value)}"'


def exemplar(labels: Mapping[str, str], value: float, at_ns: int) -> str:
    """Return an OpenMetrics exemplar, the text after a bucket's or a counter's value.

    ``at_ns``: time of the observation, Unix ns; a float would lose the last two digits.
    """
    pairs = ",".join(f'{label}="{_text(text)}"' for label, text in sorted(labels.items()))
    return f" # {{{pairs}}} {_go(value)} {at_ns // _SECOND}.{at_ns % _SECOND:09d}"


def _text(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def number(value: float) -> str:
    """Return a finite value as Go formats it."""
    return repr(float(value)) if value < PLAIN_BELOW else _go(value)


def _go(value: float) -> str:
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]  # it has no types
    return text


_encode = msgspec.json.Encoder().encode


def numbers(values: Sequence[float]) -> list[str]:
    """Return finite floats as :func:`number` formats each. No integers: they would have no decimal point."""
    if not values:
        return []
    encoded = _encode(values)
    texts = encoded[1:-1].decode().split(",")
    # searching the text takes a tenth of comparing the values: a number below 1e-4 has an exponent or four zeros behind the
    # point, and non-negative numbers are all below 1e6 if their sum is
    if b"e" in encoded or b"-" in encoded or b"0.0000" in encoded or not sum(values) < PLAIN_BELOW:
        _correct(texts, values)
    return texts


def _correct(texts: list[str], values: Sequence[float]) -> None:
    """Format those numbers again that msgspec formats in another way."""
    for index, value in enumerate(values):
        if PLAIN_FROM <= value < PLAIN_BELOW or not value:
            continue
        if SMALL_FROM < value < PLAIN_FROM:
            texts[index] = _small(texts[index])
        elif PLAIN_BELOW <= value < LARGE_BELOW:
            texts[index] = _large(texts[index])
        else:
            texts[index] = number(value)


def _large(text: str) -> str:
    """Return a number from 1e6 on as Go formats it; msgspec writes 1500000.0 for 1.5e+06."""
    whole, _, rest = text.partition(".")
    mantissa = f"{whole[0]}.{whole[1:]}{rest}".rstrip("0.")
    return f"{mantissa}e+{len(whole) - 1:02}"


def _small(text: str) -> str:
    """Return a number below 1e-4 as Python formats it; msgspec writes 0.00005 and 5.1e-6 for 5e-05 and 5.1e-06."""
    mantissa, _, exponent = text.partition("e-")
    if exponent:
        return f"{mantissa}e-{exponent:0>2}"
    digits = mantissa[2:].lstrip("0")
    rest = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{digits[0]}{rest}e-{len(mantissa) - 1 - len(digits):02}"


def pieces(style: Style, foreign: bytes, families: Iterable[str]) -> Iterator[bytes]:
    """Yield the page in pieces: prometheus-client's output, followed by the texts of our families."""
    yield foreign.removesuffix(END.encode()) if style.openmetrics else foreign
    waiting, size = list[str](), 0
    for text in families:
        waiting.append(text)
        size += len(text)
        if size >= _PIECE:
            yield "".join(waiting).encode()
            waiting, size = [], 0
    yield "".join([*waiting, END if style.openmetrics else ""]).encode()
