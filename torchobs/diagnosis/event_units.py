"""Attributes of events and spans as text, sizes and durations with their units: ``1.2 GiB``, ``3 min 20 s``."""

from __future__ import annotations

from collections.abc import Iterable

from torchobs import catalog
from torchobs.diagnosis import text_format
from torchobs.diagnosis.rank_report import Fact

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


def units(event: str, attributes: Iterable[str]) -> dict[str, str]:
    """Return the units (UCUM: ``By``, ``s``) of those attributes of an event that have one, for programs."""
    return {name: unit for name in attributes if (unit := _UNITS.get((event, name)))}


def attribute_text(fact: Fact, name: str, longest: int = text_format.LONGEST) -> str:
    """Return an attribute of an event for people; empty if absent."""
    value = fact.attributes.get(name)
    if (sized := with_unit(fact.name, name, value)) is not None:
        return sized
    number = fact.number(name) if isinstance(value, float) else None
    if number is not None:
        return text_format.number(number)
    return text_format.clean(text_format.source_location(fact.text(name, longest)), longest)
