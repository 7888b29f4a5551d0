"""Numbers, times and untrusted texts for people: on the page, in a terminal, in the sentences of findings."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import pairwise
from math import inf, isfinite, isnan, log

NONE = "-"
"""Shown in place of a missing value; ASCII, for any terminal"""
_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-=+*#@"
LONGEST = 400
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_TIMES = ((0.9995, "s", 1.0), (0.9995e-3, "ms", 1e3))
_FORBIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories that move the cursor, change the writing direction or are invisible; escape sequences begin with one."""

_TENTH = 0.1
_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86_400.0
_LOGARITHMIC = 100.0


def clean(value: object, longest: int = LONGEST) -> str:
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
    """Return a measured number in four significant digits: ``2.313``, ``0.0015``, ``12,400``, ``3e-5``; ``NaN`` and ``Inf``."""
    if value is None:
        return NONE
    if not isfinite(value):
        return "NaN" if isnan(value) else "Inf" if value > 0 else "-Inf"
    if value and not 1e-3 <= abs(value) < 1e6:  # noqa: PLR2004  # beyond these exponents are easier to read than zeros
        mantissa, _, power = f"{value:.3e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}"
    return f"{value:.4g}" if abs(value) < 999.95 else f"{value:,.0f}"  # noqa: PLR2004  # from there on four whole digits


def count(value: float | None) -> str:
    """Return a whole number: ``1,234,567``."""
    return NONE if value is None else f"{int(value):,}"


def percent(share: float | None) -> str:
    """Return a share in percent: ``46 %``, ``0.4 %``; a smaller one that is not zero as ``<0.1 %``."""
    if share is None:
        return NONE
    if 0 < share < 0.0005:  # noqa: PLR2004  # rounds to zero
        return "<0.1 %"
    return f"{100 * share:.1f} %" if 0 < share < 0.00995 else f"{100 * share:.0f} %"  # noqa: PLR2004  # rounds to 1.0


def fold(factor: float) -> str:
    """Return a factor: ``40-fold``, ``1.6-fold``."""
    return f"{factor:.1f}-fold" if factor < 10 else f"{number(float(f'{factor:.2g}'))}-fold"  # noqa: PLR2004  # two digits


def size(value: float | None) -> str:
    """Return bytes in three significant digits: ``431 MiB``, ``79.2 GiB``, ``4 GiB``."""
    if value is None:
        return NONE
    at = 0
    while abs(value) >= 999.5 and at < len(_SIZES) - 1:  # noqa: PLR2004  # three digits before the point
        value, at = value / 1024, at + 1
    return f"{f'{value:.3g}' if abs(value) < 999.5 else f'{value:,.0f}'} {_SIZES[at]}"  # noqa: PLR2004  # no larger unit


def duration(seconds: float | None) -> str:
    """Return a duration: ``30 µs``, ``12.3 ms``, ``1.52 s``, from a minute on as ``span``."""
    if seconds is None or not isfinite(seconds):
        return NONE
    if seconds >= _MINUTE:
        return span(seconds)
    # 0.9995 of a unit would round to 1,000 of the next smaller one
    unit, per_s = next(((name, scale) for least, name, scale in _TIMES if abs(seconds) >= least), ("µs", 1e6))
    return f"{seconds * per_s:.3g} {unit}" if seconds else "0 s"


def span(seconds: float | None) -> str:
    """Return an age in whole seconds, or its two largest units: ``40 s``, ``3 min 20 s``, ``2 h 5 min``, ``4 d 3 h``."""
    if seconds is None:
        return NONE
    whole = max(0, int(seconds))
    for unit, name, below, part in ((_DAY, "d", _HOUR, "h"), (_HOUR, "h", _MINUTE, "min"), (_MINUTE, "min", 1.0, "s")):
        if whole >= unit:
            rest = int(whole % unit // below)
            return f"{int(whole // unit):,} {name}" + (f" {rest} {part}" if rest else "")
    return f"{whole} s"


def about(seconds: float | None) -> str:
    """Return a duration in its largest unit: ``40 s``, ``3 min``, ``2 h``, ``4 d``."""
    return " ".join(span(seconds).split()[:2])


def rate(per_s: float | None, what: str = "") -> str:
    """Return a rate per second, ``1.92``, or of ``what``: ``45,300 tokens/s``."""
    if per_s is None:
        return NONE
    return f"{in_figures(per_s)} {what}/s" if what else in_figures(per_s)


def in_figures(per_s: float) -> str:
    """Format a rate with at least three digits: ``0.0214``, ``1.90``, ``45,300``."""
    if not isfinite(per_s) or 0 < abs(per_s) < _TENTH:
        return f"{per_s:.3g}"
    return f"{per_s:,.{max(0, 3 - len(str(int(abs(per_s)))))}f}"


def moment(unix_s: float, pattern: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Return a Unix time as local time."""
    try:
        return datetime.fromtimestamp(unix_s).astimezone().strftime(pattern)
    except (ValueError, OverflowError, OSError):
        return "?"


def plural(count: int, singular: str, many: str = "") -> str:
    """Return ``1 step``, ``12,034 steps``."""
    return f"{count:,} {singular if count == 1 else many or f'{singular}s'}"


def joined(items: Sequence[object], most: int | None = None) -> str:
    """Return ``a, b and c``, of more than ``most`` items ``a, b and 3 more``."""
    shown = [str(item) for item in items[:most]]
    if len(items) > len(shown):
        shown.append(f"{len(items) - len(shown):,} more")
    return f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else "".join(shown)


def ranks(names: Sequence[str], most: int) -> str:
    """Return ``rank 3``, ``ranks 0 and 1``, of more than ``most`` ranks ``ranks 0, 1 and 6 more``."""
    return f"{'rank' if len(names) == 1 else 'ranks'} {joined(names, most)}"


def capital(text: str) -> str:
    """Return the text as the beginning of a sentence."""
    return f"{text[:1].upper()}{text[1:]}"


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
    scale = scale if isfinite(scale) else 0.0  # of a difference that is subnormal
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
    if not isfinite(value):
        return "!"
    return bars[round((value - low) * scale) if scale else 0]  # without a scale the difference may be infinite


def _width(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in {"W", "F"} else 1
