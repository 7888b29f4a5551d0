"""One thing to say about a run (``diagnosis.health``)."""

from __future__ import annotations

from torchobs.diagnosis.health import ERROR, INFO, WARNING, Finding

__all__ = ["ERROR", "INFO", "WARNING", "Finding"]
