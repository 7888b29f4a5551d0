"""The page's text, byte for byte as prometheus-client writes it, and five times as fast: a line's labels are escaped once.

prometheus-client is the oracle of the tests, and writes what is not ours (its own process metrics). Two formats: OpenMetrics
and the classic text format 0.0.4, each with one of the schemes for escaping names that Prometheus 3 negotiates. Our names and
labels are made of legacy characters alone, so that a name is never quoted.
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
"""From here on Go writes an exponent."""
_PIECE = 64 * 1024
"""Characters that are encoded at a time: they stay in the processor's cache until they are compressed."""
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
"""By media type and version, what prometheus-client is told"""


class Style(NamedTuple):
    """How a page is written."""

    openmetrics: bool
    escaping: str = UNDERSCORES


class Format(NamedTuple):
    """What was negotiated. ``foreign`` is prometheus-client's own encoder for it."""

    style: Style
    content_type: str
    foreign: Callable[[Collector], bytes]


@lru_cache(64)  # a scraper says the same every time, and it takes as long as a hundred lines
def negotiate(accept: str) -> Format:
    """Choose the dearest of the formats that we have; who names none gets the plain one, as every browser does.

    prometheus-client is given nothing but that one: it knows no weights, and takes any version for one that it writes.
    """
    foreign, content_type = choose_encoder(next((known for one in wishes(accept) if (known := _known(one))), ""))
    given = foreign.keywords if isinstance(foreign, partial) else {}
    function = foreign.func if isinstance(foreign, partial) else foreign
    is_openmetrics = function is openmetrics.exposition.generate_latest
    return Format(Style(is_openmetrics, given.get("escaping", UNDERSCORES)), content_type, foreign)


def _known(wish: AcceptItem) -> str:
    """Return a format of ours as prometheus-client knows it; empty for one that we do not have, or that is refused."""
    versions = _VERSIONS.get(wish.what, {})
    version, escaping = wish.parameters.get("version", ""), wish.parameters.get("escaping", "")
    if wish.weight <= 0 or version not in versions:
        return ""
    return f"{versions[version]};escaping={escaping if escaping in _ESCAPINGS else UNDERSCORES}"


_label_name: Callable[[str, str], str] = lru_cache(1024)(escape_label_name)  # there are few, and each takes 7 µs
_metric_name: Callable[[str, str], str] = lru_cache(1024)(escape_metric_name)


def header(style: Style, name: str, kind: str, unit: str, brief: str) -> str:
    """Return a family's first lines, the last without its end. ``name``: OpenMetrics', a counter's without ``_total``."""
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


@lru_cache(2048)  # every series of a rank has three that are the same, and every layer has several metrics
def _pair(escaping: str, label: str, value: str) -> str:
    return f'{_label_name(label, escaping)}="{_text(value)}"'


def number(value: float) -> str:
    """Return a finite value as Go writes it."""
    return repr(float(value)) if value < PLAIN_BELOW else _go(value)


def exemplar(labels: Mapping[str, str], value: float, at_ns: int) -> str:
    """Return what follows a bucket's or a counter's value in OpenMetrics: where one of its observations came from.

    ``at_ns``: when it was made, Unix ns; a float would lose the last two digits.
    """
    pairs = ",".join(f'{label}="{_text(text)}"' for label, text in sorted(labels.items()))
    return f" # {{{pairs}}} {_go(value)} {at_ns // _SECOND}.{at_ns % _SECOND:09d}"


def pieces(style: Style, foreign: bytes, families: Iterable[str]) -> Iterator[bytes]:
    """Yield the page: what prometheus-client wrote, and our families behind it, some of them at a time."""
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
    """Join what prometheus-client wrote with our families."""
    return b"".join(pieces(style, foreign, families))


def _go(value: float) -> str:
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]  # it has no types
    return text


def _text(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
