"""Layout of panels. The SDK assigns no ids, and would move a panel that is at the far left or top."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.models.dashboard import GridPos, Panel, RowPanel

WIDTH = 24
"""Columns of Grafana's grid; a grid row is 30 pixels high."""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and its panels, placed from left to right, then in the next row. ``grid_pos`` holds a panel's size."""

    title: str
    panels: tuple[Panel, ...]


def arrange(sections: Sequence[Section]) -> list[Panel | RowPanel]:
    """Return headings and panels with positions, and with ids from 1, in reading order."""
    arranged: list[Panel | RowPanel] = []
    top = 0
    for section in sections:
        arranged.append(RowPanel(title=section.title, grid_pos=GridPos(h=1, w=WIDTH, x=0, y=top)))
        top = _place(section.panels, top + 1)
        arranged.extend(section.panels)
    for number, panel in enumerate(arranged, start=1):
        panel.id_val = number
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
