"""Formatting of numbers for sentences and table cells, rounded for people."""

from __future__ import annotations

from math import isfinite, isnan

from torchobs.flight.metrics.throughput import in_figures

_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86_400.0
_PLAIN_LEAST, _PLAIN_MOST = 1e-3, 1e6
_PREFIXES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_TIMES = ((1.0, "s", 1.0), (1e-3, "ms", 1e3), (1e-6, "µs", 1e6))
NONE = "–"


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with some significant digits: ``2.313``, ``12,400``, ``3.2e-05``; ``NaN`` and ``Inf`` by their names."""
    if value is None:
        return NONE
    if not isfinite(value):
        return "NaN" if isnan(value) else "Inf" if value > 0 else "-Inf"
    if value == int(value) and abs(value) < _PLAIN_MOST:
        return f"{int(value):,}"
    if _PLAIN_LEAST <= abs(value) < _PLAIN_MOST:
        return f"{value:,.{max(0, digits - _whole_digits(value))}f}"
    return f"{value:.{digits - 2}e}"


def count(value: float | None) -> str:
    """Return a whole number: ``1,234,567``."""
    return NONE if value is None else f"{int(value):,}"


def share(value: float | None) -> str:
    """Return a ratio in percent: ``46 %``, ``0.4 %``."""
    if value is None:
        return NONE
    percent = 100 * value
    return f"{percent:.1f} %" if 0 < percent < 1 else f"{percent:.0f} %"


def size(value: float | None) -> str:
    """Return bytes: ``431 MiB``, ``79.2 GiB``."""
    if value is None:
        return NONE
    scale = 0
    while abs(value) >= 1000 and scale < len(_PREFIXES) - 1:  # noqa: PLR2004  # three digits before the point
        value, scale = value / 1024, scale + 1
    return f"{value:.{max(0, 3 - _whole_digits(value)) if scale else 0}f} {_PREFIXES[scale]}"


def seconds(value: float | None) -> str:
    """Return a short duration: ``12.3 ms``, ``1.52 s``."""
    if value is None:
        return NONE
    unit = next((one for one in _TIMES if abs(value) >= one[0]), _TIMES[-1])
    scaled = value * unit[2]
    return f"{scaled:.{max(0, 3 - _whole_digits(scaled))}f} {unit[1]}" if value else "0 s"


def span(value: float | None) -> str:
    """Return a long duration in its two largest units: ``40 s``, ``3 min 20 s``, ``2 h 5 min``, ``4 d 3 h``."""
    if value is None:
        return NONE
    whole = max(0, int(value))
    for unit, name, below, part in ((_DAY, "d", _HOUR, "h"), (_HOUR, "h", _MINUTE, "min"), (_MINUTE, "min", 1.0, "s")):
        if whole >= unit:
            rest = int(whole % unit // below)
            return f"{int(whole // unit)} {name}" + (f" {rest} {part}" if rest else "")
    return f"{whole} s"


def took(value: float | None) -> str:
    """Return a duration, short or long."""
    return seconds(value) if value is None or value < _MINUTE else span(value)


def rate(value: float | None, what: str = "") -> str:
    """Return a rate per second: ``1.92/s``, ``45,300 tokens/s``."""
    if value is None:
        return NONE
    text = in_figures(value)
    return f"{text} {what}/s" if what else f"{text}/s"


def _whole_digits(value: float) -> int:
    return len(str(int(abs(value))))
