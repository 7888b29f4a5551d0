"""One thing to say about a run."""

from __future__ import annotations

from typing import NamedTuple

ERROR, WARNING, INFO = "error", "warning", "info"


class Finding(NamedTuple):
    """A sentence, for a person; ``kind`` names what it is about, for a program, and does not change between versions."""

    severity: str
    kind: str
    text: str
