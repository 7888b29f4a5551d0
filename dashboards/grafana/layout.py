"""Layout of panels. The SDK assigns no ids, and would move a panel that is at the far left or top."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.models.dashboard import GridPos, Panel, RowPanel

WIDTH = 24
"""Columns of Grafana's grid; a grid row is 30 pixels high."""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and its panels, placed from left to right, then in the next row. ``grid_pos`` holds a panel's size.

    ``collapsed``: the panels are shown, and their queries asked, when the heading is opened.
    """

    title: str
    panels: tuple[Panel, ...]
    collapsed: bool = False


def arrange(sections: Sequence[Section]) -> list[Panel | RowPanel]:
    """Return headings and panels with positions, and with ids from 1, in reading order."""
    arranged: list[Panel | RowPanel] = []
    top = 0
    number = 0
    for section in sections:
        row = RowPanel(title=section.title, grid_pos=GridPos(h=1, w=WIDTH, x=0, y=top), collapsed=section.collapsed)
        bottom = _place(section.panels, top + 1)
        for number, panel in enumerate((row, *section.panels), start=number + 1):  # noqa: B020  # goes on from the last section
            panel.id_val = number
        arranged.append(row)
        if section.collapsed:
            row.panels = list(section.panels)
            top += 1
        else:
            arranged.extend(section.panels)
            top = bottom
    return arranged


def _place(panels: Sequence[Panel], top: int) -> int:
    """Place the panels from grid row ``top`` on and return the first free row below them.

    Panels that do not fill their row, of one height, are made wider until they do.
    """
    for row in _rows(panels):
        sizes = [panel.grid_pos for panel in row]
        free = WIDTH - sum(size.w for size in sizes) if len({size.h for size in sizes}) == 1 else 0
        left = 0
        for number, (panel, size) in enumerate(zip(row, sizes, strict=True)):
            wider = free // len(row) + (number < free % len(row))
            panel.grid_pos = GridPos(h=size.h, w=size.w + wider, x=left, y=top)
            left += size.w + wider
        top += max(size.h for size in sizes)
    return top


def _rows(panels: Sequence[Panel]) -> list[list[Panel]]:
    """Divide panels into rows of at most the grid's width."""
    rows: list[list[Panel]] = []
    left = WIDTH
    for panel in panels:
        if left + panel.grid_pos.w > WIDTH:
            rows.append([])
            left = 0
        rows[-1].append(panel)
        left += panel.grid_pos.w
    return rows
