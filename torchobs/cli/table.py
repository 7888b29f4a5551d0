"""Tables and paragraphs that fit the terminal's width, dropping less important columns. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import NamedTuple

from torchobs.diagnosis import text_format

GAP = "  "
NARROWEST = 20


class Column(NamedTuple):
    """A column: heading, whether right-aligned, and the order in which it is dropped (0 never, 9 before 8)."""

    heading: str
    right: bool = True
    dispensable: int = 0


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return a heading and one line per row, at most ``width`` columns wide. Cells must be clean texts."""
    kept = list(range(len(columns)))
    widths = [max([text_format.columns(row[index]) for row in rows] + [len(columns[index].heading)]) for index in kept]
    while sum(widths[index] + len(GAP) for index in kept) - len(GAP) > width:
        at = max(kept, key=lambda index: columns[index].dispensable)
        if not columns[at].dispensable:
            break
        kept.remove(at)
    heading = [column.heading for column in columns]
    return [
        _line([text_format.pad(row[i], widths[i], right=columns[i].right) for i in kept], width) for row in (heading, *rows)
    ]


def bullets(texts: Sequence[str], width: int, mark: str = "- ") -> list[str]:
    """Return each text as a paragraph with a bullet."""
    lines: list[str] = []
    for text in texts:
        first, *rest = wrap(text, max(NARROWEST, width - len(mark)), break_on_hyphens=False) or [""]
        lines += [mark + first, *(" " * len(mark) + line for line in rest)]
    return lines


def shares(parts: Mapping[str, float], width: int, total: float | None = None) -> list[str]:
    """Return ``productive 84 %  data 3 %`` in as many lines as needed; zero shares are left out."""
    whole = sum(parts.values()) if total is None else total
    if whole <= 0:
        return []
    shown = [f"{name} {text_format.percent(value / whole)}" for name, value in parts.items() if value > 0]
    return flow(shown, width)


def flow(items: Sequence[str], width: int) -> list[str]:
    """Return items side by side, in as many lines as needed, without breaking any."""
    lines: list[str] = []
    for item in items:
        if lines and text_format.columns(lines[-1]) + len(GAP) + text_format.columns(item) <= width:
            lines[-1] += GAP + item
        else:
            lines.append(text_format.cut(item, width))
    return lines


def _line(cells: Sequence[str], width: int) -> str:
    return text_format.cut(GAP.join(cells).rstrip(), width)
