"""Formatting of numbers, times and untrusted texts for a terminal, free of control sequences."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import pairwise
from math import inf, isfinite, isnan, log

from torchobs.diagnosis import quantities
from torchobs.flight.metrics.throughput import in_figures

_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-=+*#@"
_LONGEST = 400
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")
_FORBIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories that move the cursor, change the writing direction or are invisible; escape sequences begin with one."""

_MINUTE = 60.0
_BASE = 1024.0
_LOGARITHMIC = 100.0


def clean(value: object, longest: int = _LONGEST) -> str:
    """Return a value as one sanitised line: control characters become ``?``, long texts end in ``…``."""
    text = value if isinstance(value, str) else str(value)
    if len(text) > longest:
        text = text[: longest - 1] + "…"
    if text.isascii() and text.isprintable():
        return text
    return "".join("?" if unicodedata.category(char) in _FORBIDDEN else char for char in text)


def source_location(text: str) -> str:
    """Return a source location, shortened to start at the package's name for installed packages."""
    return re.sub(r"[^\s'\"]*/(?:site|dist)-packages/", "", text)


def columns(text: str) -> int:
    """Return the display width of a clean text: East Asian characters take two columns, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(_width(char) for char in text)


def cut(text: str, room: int) -> str:
    """Truncate a clean text to ``room`` columns, ending in ``…`` if shortened."""
    if columns(text) <= room:
        return text
    used, kept = 0, []
    for char in text:
        used += _width(char)
        if used > room - 1:
            break
        kept.append(char)
    return "".join(kept) + "…" if room > 0 else ""


def pad(text: str, room: int, *, right: bool = False) -> str:
    """Pad a clean text to exactly ``room`` columns; ``right``: right-aligned."""
    shown = cut(text, room)
    space = " " * (room - columns(shown))
    return space + shown if right else shown + space


def number(value: float | None) -> str:
    """Return a measured number in four significant digits; ``-`` for none."""
    if value is None:
        return "-"
    if not isfinite(value):
        return "NaN" if isnan(value) else "Inf" if value > 0 else "-Inf"
    if value and not 1e-3 <= abs(value) < 1e6:  # noqa: PLR2004  # beyond these exponents are easier to read than zeros
        mantissa, _, power = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"  # noqa: PLR2004  # from there on %g would use an exponent


def percent(share: float) -> str:
    """Return a share as a whole percentage; a small one that is not zero as ``<1 %``."""
    return "<1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"  # noqa: PLR2004  # rounds to zero


def fold(factor: float) -> str:
    """Return a factor: ``40-fold``, ``1.6-fold``."""
    return f"{factor:.1f}-fold" if factor < 10 else f"{number(float(f'{factor:.2g}'))}-fold"  # noqa: PLR2004  # two digits


def size(count: float | None) -> str:
    """Return bytes in the unit that fits."""
    if count is None:
        return "-"
    at = 0
    while abs(count) >= _BASE and at < len(_SIZES) - 1:
        count, at = count / _BASE, at + 1
    return f"{count:.0f} {_SIZES[at]}" if at == 0 or abs(count) >= 100 else f"{count:.1f} {_SIZES[at]}"  # noqa: PLR2004


def duration(seconds: float | None) -> str:
    """Return a duration in its one or two largest units."""
    if seconds is None or not isfinite(seconds):
        return "-"
    if abs(seconds) < 0.9995:  # noqa: PLR2004  # above, it would round to 1,000 ms
        return f"{1e3 * seconds:.3g} ms" if seconds else "0"
    return f"{seconds:.3g} s" if seconds < _MINUTE else quantities.span(seconds)


def rate(per_s: float | None) -> str:
    """Return a rate per second."""
    return "-" if per_s is None else in_figures(per_s)


def moment(unix_s: float, pattern: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Return a Unix time as local time."""
    try:
        return datetime.fromtimestamp(unix_s).astimezone().strftime(pattern)
    except (ValueError, OverflowError, OSError):
        return "?"


def plural(count: int, one: str, more: str = "") -> str:
    """Return ``1 step``, ``12,034 steps``."""
    return f"{count:,} {one if count == 1 else more or f'{one}s'}"


def joined(items: Sequence[object], most: int | None = None) -> str:
    """Return ``a, b and c``, of more than ``most`` items ``a, b and 3 more``."""
    shown = [str(item) for item in items[:most]]
    if len(items) > len(shown):
        shown.append(f"{len(items) - len(shown):,} more")
    return f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else "".join(shown)


def sparkline(values: Iterable[float | None], room: int, *, ascii_only: bool = False) -> str:
    """Return values, oldest first, as bars in at most ``room`` columns, each the maximum of its group, so that spikes show.

    A non-finite value is ``!``, a missing one a space. Positive values that differ by more than a hundredfold are drawn on a
    log scale, else one spike would flatten the rest.
    """
    bars, shown = (_ASCII_BARS if ascii_only else _BARS), list(values)
    if room <= 0 or not shown:
        return ""
    groups = _groups(shown, min(room, len(shown)))
    finite = [value for value in groups if value is not None and isfinite(value)]
    if finite and min(finite) > 0 and max(finite) / min(finite) > _LOGARITHMIC:
        groups = [log(value) if value is not None and 0 < value < inf else value for value in groups]
        finite = [log(value) for value in finite]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(bars) - 1) / (high - low) if isfinite(high - low) and high - low > 0 else 0.0
    return "".join(_bar(value, low, scale, bars) for value in groups)


def _groups(values: Sequence[float | None], count: int) -> list[float | None]:
    edges = [index * len(values) // count for index in range(count + 1)]
    return [_greatest(values[begin:end]) for begin, end in pairwise(edges)]


def _greatest(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    odd = [value for value in there if not isfinite(value)]
    return odd[0] if odd else max(there, default=None)


def _bar(value: float | None, low: float, scale: float, bars: str) -> str:
    if value is None:
        return " "
    return bars[round((value - low) * scale)] if isfinite(value) else "!"


def _width(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in {"W", "F"} else 1
