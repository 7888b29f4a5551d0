"""What of the machine is to be collected, as a person says it."""

from __future__ import annotations

from torchobs.catalog import HOST_COLLECTORS
from torchobs.config import option_types

ALL, NONE = "all", "none"


def parse(text: str) -> tuple[str, ...]:
    """Return the collectors that ``all``, ``none``, ``true``, ``false`` or a list names. Raises ``ValueError`` for others."""
    word = text.lower()
    if word in {ALL, NONE}:
        return HOST_COLLECTORS if word == ALL else ()
    if "," not in word and word not in HOST_COLLECTORS:
        return HOST_COLLECTORS if option_types.BOOLEAN.parse(word) else ()
    named = {name.strip() for name in word.split(",")} - {""}
    if not named <= set(HOST_COLLECTORS):
        raise ValueError(text)
    return tuple(name for name in HOST_COLLECTORS if name in named)


KIND = option_types.ValueKind(f"{ALL}, {NONE}, or a comma-separated list of {', '.join(HOST_COLLECTORS)}", parse)
