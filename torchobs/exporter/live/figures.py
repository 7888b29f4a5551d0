"""The page's formatter, which is that of every sentence about a run (``diagnosis.quantities``)."""

from __future__ import annotations

from torchobs.diagnosis.quantities import NONE, count, number, rate, seconds, share, size, span, took

__all__ = ["NONE", "count", "number", "rate", "seconds", "share", "size", "span", "took"]
