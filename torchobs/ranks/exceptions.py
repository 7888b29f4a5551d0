"""The exception that ended a rank, from the frames of its event ring, and in words. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.flight.format.event_ring import fields_of
from torchobs.ranks import labels

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MARK = f'"{catalog.EVENT_EXCEPTION.name}"'.encode()
_BARE = re.compile(r"\A(?:builtins|__main__)\.")
"""Modules that Python's own tracebacks leave out"""
_LINE = re.compile(r"[^/]+:\d+(?=\Z| in )")
"""The name of a file, and a line of it"""
_MAX_MESSAGE = 100
_MAX_TEXT = 256
"""Characters of a class' name, and of a place"""


def newest(payloads: Sequence[bytes]) -> Mapping[str, str]:
    """Return the newest exception of the main thread as attributes of ``catalog.RANK_EXCEPTION``; empty if there is none."""
    for payload in reversed(payloads):
        fields = fields_of(payload) if _MARK in payload else None
        if fields is not None and fields.get("k") == "event" and fields.get("name") == catalog.EVENT_EXCEPTION.name:
            attributes = fields.get("attrs")
            if isinstance(attributes, dict) and not attributes.get("thread"):
                return described(attributes)
    return {}


def in_words(exception: Mapping[str, str]) -> str:
    """Return class and line of an exception, ``ValueError at train.py:12``; ``exception``: as of :func:`described`."""
    kind, place = exception.get("exception.type", ""), _LINE.search(exception.get("location", ""))
    return f"{kind} at {place[0]}" if kind and place else kind


def described(attributes: Mapping[str, Any]) -> dict[str, str]:
    """Return the attributes of ``catalog.RANK_EXCEPTION`` from those of its event."""
    return {
        "exception.type": _BARE.sub("", _text(attributes.get("exception.type"), _MAX_TEXT)),
        "message": _text(attributes.get("exception.message"), _MAX_MESSAGE),
        "location": _text(attributes.get("caller") or attributes.get("location"), _MAX_TEXT),
    }


def _text(value: object, longest: int) -> str:
    plain = labels.text(value) if isinstance(value, str) else ""
    return "".join(char for char in plain[:longest] if char.isprintable())
