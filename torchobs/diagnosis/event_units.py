"""Sizes and durations among the attributes of events and spans, as text: ``1.2 GiB``, ``3 min 20 s``."""

from __future__ import annotations

from torchobs import catalog
from torchobs.diagnosis import text_format

_OF = {one.name: one.attributes for one in catalog.EVENTS} | {one.name: one.attributes for one in catalog.SPANS}
_UNITS = {(name, one.name): one.unit for name, attributes in _OF.items() for one in attributes if one.unit}
_MOST = 1e18
"""A flight file may hold anything"""
_FORMATS = {"By": text_format.size, "s": text_format.duration}


def with_unit(event: str, attribute: str, value: object) -> str | None:
    """Return the value of an attribute of that event or span with its unit; ``None`` if it has none, or is no likely number."""
    unit = _UNITS.get((event, attribute))
    if unit is None or isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _MOST:
        return None
    return _FORMATS[unit](value)
