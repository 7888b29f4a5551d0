"""Encoding of a span as a frame of the event ring: a JSON object of at most 16 KiB.

=========== ==========================================================================================================
field       meaning
=========== ==========================================================================================================
k           ``span``; ``span_start`` for one announced at its begin, without the fields known only at its end
name        its name
trace_id    32 hexadecimal digits
span_id     16 hexadecimal digits
parent      the parent's ``span_id``; absent for a root
remote      true when the parent lives in another process
flags       W3C trace flags
state       W3C ``tracestate``; absent when empty
kind        ``internal``, ``server``, ``client``, ``producer`` or ``consumer``
t0, t1      begin and end, Unix time in ns
status      ``unset``, ``ok`` or ``error``
description why the status is ``error``; absent when not given
attrs       attributes (``attributes.py``)
events      ``[t, name, attrs, dropped attributes]`` each, ``t`` in Unix ns
links       ``[trace_id, span_id, flags, state, attrs, dropped attributes]`` each
scope       ``[name, version, schema_url, attrs]`` of the tracer
dropped     ``[attributes, events, links]`` beyond the limits; absent when none were
cut         number of values shortened or left out so that the frame fits; absent when zero
=========== ==========================================================================================================
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_LENGTHS = (4096, 1024, 256, 64)
_COUNTS = (32, 8, 2, 0)
_LONG = ("name", "description", "attrs", "events", "links", "scope")
_MANY = ("attrs", "events", "links")


def fit(fields: Mapping[str, Any], limit: int) -> tuple[bytes, int]:
    """Return the frame's payload of at most ``limit`` bytes (at least 2 KiB), and the number of values cut.

    A span that is too long loses the ends of its longest texts first, then its oldest events, links and attributes.
    """
    payload, shorter, cut = _encode(fields).encode(), dict(fields), 0
    for length in _LENGTHS:
        if len(payload) <= limit:
            return payload, cut
        shorter, cut = _shorten(fields, length)
        payload = _encode(shorter | {"cut": cut}).encode()
    return (payload, cut) if len(payload) <= limit else _thin_out(shorter, cut, limit)


def _shorten(fields: Mapping[str, Any], length: int) -> tuple[dict[str, Any], int]:
    cuts: list[None] = []

    def short(value: Any) -> Any:
        if isinstance(value, str) and len(value) > length:
            cuts.append(None)
            return value[:length]
        if isinstance(value, list):
            return [short(item) for item in value]
        return {short(key): short(item) for key, item in value.items()} if isinstance(value, dict) else value

    return {name: short(value) if name in _LONG else value for name, value in fields.items()}, len(cuts)


def _thin_out(fields: Mapping[str, Any], cut: int, limit: int) -> tuple[bytes, int]:
    fewer = {name: value for name, value in fields.items() if name != "state"}
    cut += len(fields) - len(fewer)
    for count in _COUNTS:
        for name in _MANY:
            found = fewer.get(name, ())
            surplus = max(len(found) - count, 0)
            kept = list(found.items() if isinstance(found, dict) else found)[surplus:]
            fewer[name], cut = dict(kept) if isinstance(found, dict) else kept, cut + surplus
        payload = _encode(fewer | {"cut": cut}).encode()
        if len(payload) <= limit:
            return payload, cut
    fewer["scope"] = [*fewer["scope"][:3], {}]  # the only other field that can be long
    return _encode(fewer | {"cut": cut + 1}).encode(), cut + 1
