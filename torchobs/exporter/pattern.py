"""Patterns for names of metrics, matched in time that no pattern and no name can blow up.

Python's ``re`` tries one way after the other, so that ``(a+)+`` takes an hour for a name of forty letters; Prometheus' RE2
follows all ways at once, and so does this (Thompson 1968, "Regular expression search algorithm"): a piece of a pattern
takes the set of places reached so far to the set reached behind it. There are literals, ``.``, classes, groups, ``|``,
``*``, ``+`` and ``?``; the whole name has to match, as in Prometheus.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    Places = frozenset[int]
    Piece = Callable[[str, Places], Places]

_ATOM = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]|\\[dDwWsS]|\\[^A-Za-z0-9]|[^\\*+?{}()|\[\]^$]", re.DOTALL)
_LONGEST = 1000
_DEEPEST = 20


def compiled(text: str) -> Callable[[str], bool]:
    """Return what tells whether a whole name matches. Raises ``ValueError`` for what is not understood."""
    if not text or len(text) > _LONGEST:
        raise ValueError(text)
    piece, at = _either(text, 0, 0)
    if at != len(text):
        raise ValueError(text)
    return lambda name: len(name) in piece(name, frozenset({0}))


def _either(text: str, at: int, depth: int) -> tuple[Piece, int]:
    if depth > _DEEPEST:
        raise ValueError(text)
    first, at = _sequence(text, at, depth)
    ways = [first]
    while at < len(text) and text[at] == "|":
        way, at = _sequence(text, at + 1, depth)
        ways.append(way)
    return lambda name, places: frozenset().union(*(way(name, places) for way in ways)), at


def _sequence(text: str, at: int, depth: int) -> tuple[Piece, int]:
    pieces: list[Piece] = []
    while at < len(text) and text[at] not in "|)":
        piece, at = _repeated(text, at, depth)
        pieces.append(piece)

    def follow(name: str, places: Places) -> Places:
        for piece in pieces:
            places = piece(name, places)
        return places

    return follow, at


def _repeated(text: str, at: int, depth: int) -> tuple[Piece, int]:
    piece, at = _one(text, at, depth)
    sign = text[at] if at < len(text) and text[at] in "*+?" else ""
    if sign == "?":
        return lambda name, places: places | piece(name, places), at + 1
    if not sign:
        return piece, at

    def again(name: str, places: Places) -> Places:
        found = new = places if sign == "*" else piece(name, places)
        while new:
            new = piece(name, new) - found
            found |= new
        return found

    return again, at + 1


def _one(text: str, at: int, depth: int) -> tuple[Piece, int]:
    if text[at] == "(":
        piece, end = _either(text, at + (3 if text.startswith("(?:", at) else 1), depth + 1)
        if not text.startswith(")", end):
            raise ValueError(text)
        return piece, end + 1
    found = _ATOM.match(text, at)
    if found is None:
        raise ValueError(text)
    try:
        fits = re.compile(found[0], re.ASCII | re.DOTALL).match  # of one character: there is nothing to try twice
    except re.error as problem:
        raise ValueError(text) from problem
    return lambda name, places: frozenset(place + 1 for place in places if fits(name, place)), found.end()
