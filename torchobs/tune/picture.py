"""A benchmark as an image file, drawn by matplotlib (extra ``report``): speed-up with its quartiles, and memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

FORMATS = ("pdf", "png", "svg")
_GAIN, _LOSS, _NOISE = "#2c8a5f", "#b3231d", "#7d8792"


def draw(
    names: Sequence[str],
    speedups: Sequence[tuple[float, float, float]],
    peaks: Sequence[int | None],
    path: str | os.PathLike[str],
) -> Path:
    """Draw modes, quartiles of their speed-ups, and their peaks in bytes; return the file, whose ending says the format.

    Raises:
        OSError: the file cannot be written.
        ValueError: another ending than one of :data:`FORMATS`.
    """
    path = Path(path)
    form = path.suffix.removeprefix(".").lower()
    if form not in FORMATS:
        raise ValueError(f"{path.name!r} ends in none of these: {', '.join(f'.{each}' for each in FORMATS)}")
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "torchobs"}):
        figure = Figure(figsize=(7.2, 1.3 + 0.35 * len(names)), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        speed, memory = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
        medians = [median for _, median, _ in speedups]
        around = [[median - low for low, median, _ in speedups], [high - median for _, median, high in speedups]]
        colours = [_NOISE if low <= 1 <= high else _GAIN if low > 1 else _LOSS for low, _, high in speedups]
        speed.barh(names, medians, color=colours, xerr=around, error_kw={"capsize": 3, "elinewidth": 1})
        speed.axvline(1.0, color="black", linewidth=0.8)
        speed.set_xlabel(f"times as fast as {names[0]} (grey: noise)")
        speed.invert_yaxis()
        memory.barh(names, [(peak or 0) / 2**20 for peak in peaks], color="#2f6fdb")
        memory.set_xlabel("peak memory of a step, MiB")
        figure.savefig(path, format=form, metadata={"Date": None} if form == "svg" else None)
    return path
