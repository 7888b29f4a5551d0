"""The formats of ``support/text.py``, by the name that pages and commands use."""

from torchobs.support.text import (
    LONGEST,
    NONE,
    capital,
    clean,
    columns,
    count,
    cut,
    duration,
    fold,
    in_figures,
    joined,
    moment,
    number,
    pad,
    percent,
    plural,
    ranks,
    rate,
    size,
    source_location,
    span,
    sparkline,
)

__all__ = [
    "LONGEST", "NONE", "capital", "clean", "columns", "count", "cut", "duration", "fold", "in_figures", "joined",
    "moment", "number", "pad", "percent", "plural", "ranks", "rate", "size", "source_location", "span", "sparkline",
]  # fmt: skip
