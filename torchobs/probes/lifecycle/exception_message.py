"""The message of an exception as it is recorded: its first line, without secrets and control characters, cut."""

from __future__ import annotations

import re

from torchobs.identity.redaction import redacted_text

MAX_LENGTH = 100
_MAX_READ = 4096
"""Characters of a message that are looked at; patterns of secrets take their time"""
_COLOUR = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""A terminal's control sequence (ECMA-48): its first character alone is no printable one"""
_PLAIN = (str, int, float, bool, type(None))


def message(error: BaseException) -> str:
    """Return the first line of its message; empty if it has none.

    An argument that is no plain value is not formatted, but by a class that does so itself: a tensor would wait for its device.
    """
    if type(error).__str__ in {BaseException.__str__, KeyError.__str__}:
        plain = all(_is_plain(argument) for argument in error.args)
        return first_line(str(error) if plain else next((text for text in error.args if type(text) is str), ""))
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  # the class' own method, which may raise anything
        return ""
    return first_line(text)


def _is_plain(value: object) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(type(item) in _PLAIN for item in value))


def first_line(text: str) -> str:
    """Return the first line that is not blank, as it is recorded."""
    line = next((line for line in text[:_MAX_READ].splitlines() if line.strip()), "")
    printable = "".join(char if char.isprintable() else " " if char.isspace() else "" for char in _COLOUR.sub("", line))
    clean = redacted_text(printable.strip())
    return clean if len(clean) <= MAX_LENGTH else f"{clean[: MAX_LENGTH - 1]}…"
