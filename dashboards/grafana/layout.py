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
    """Place the panels from grid row ``top`` on and return the first free row below them."""
    left, bottom = 0, top
    for panel in panels:
        size = panel.grid_pos
        if left + size.w > WIDTH:
            left, top = 0, bottom
        panel.grid_pos = GridPos(h=size.h, w=size.w, x=left, y=top)
        left, bottom = left + size.w, max(bottom, top + size.h)
    return bottom
