"""A line of status in a Jupyter notebook that updates itself while the training runs, and the address of the live page."""

from __future__ import annotations

import logging
import time
from collections import deque
from html import escape
from importlib import import_module
from math import isnan
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar

from torchobs import catalog
from torchobs.detect.hangs import Standstill, standstill
from torchobs.flight.format.layout import LIVE_PHASES
from torchobs.flight.metrics.totals import Word, is_active
from torchobs.runtime.stacks import durations, live_phase
from torchobs.support.import_hooks import imported

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.probes.core.context import ProbeContext


_INTERVAL_S = 0.5
_PATIENCE_S = 60.0
_logger = logging.getLogger("torchobs")


class PageAddress:
    """Waits for the exporter of the flight file's directory; for the sampler thread."""

    said_elsewhere: ClassVar[bool] = False
    """Whether the command that runs the script says it"""

    def __init__(self, flight_file: str, *, says: bool) -> None:
        self._directory, self._says = str(Path(flight_file).parent), says
        self._due_s, self._until_s = 0.0, time.monotonic() + _PATIENCE_S
        self.url = ""
        """Empty until it is announced"""

    def sample(self) -> None:
        """Look whether it is announced."""
        now_s = time.monotonic()
        if self.url or now_s < self._due_s or now_s > self._until_s:
            return
        self._due_s = now_s + _INTERVAL_S
        self.url = announced(self._directory)
        if self.url and self._says and not PageAddress.said_elsewhere:
            _logger.warning("torchobs: this run is shown live on %s", self.url)


def announced(directory: str) -> str:
    """Return the address of the directory's exporter; empty if there is none, or none that listens yet."""
    from torchobs.flight.files.location import opened
    from torchobs.node import election

    try:
        with opened(directory) as directory_fd:
            found = election.read(directory_fd)
    except OSError:
        return ""
    return found.url if found is not None else ""


INTERVAL_S = 1.0
_LATEST = 64
"""Number of updates over which the duration of a step is the usual one"""
_STYLE = "font:13px/1.5 system-ui,sans-serif;border:1px solid #8886;border-radius:6px;padding:.35em .8em;display:inline-block"


def in_notebook() -> bool:
    """Return True in a Jupyter kernel, whose shell has a ``kernel``; IPython in a terminal has none."""
    ipython = imported("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookStatus:
    """The line, shown below the cell that called ``init()``; the sampler thread updates it once a second."""

    def __init__(
        self, context: ProbeContext, name: str, page: PageAddress | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._context, self._name, self._page, self._clock = context, name, page, clock
        self._handle: Any = None
        self._shown, self._due_s = "", 0.0
        self._before: tuple[float, int] | None = None
        """When the step was last another than before, and that step"""
        self._step_s: deque[float] = deque(maxlen=_LATEST)
        """Durations of a step between two updates, of the latest"""

    def begin(self) -> None:
        """Show the line."""
        self._handle = _display().display(self._html("waiting for the first step"), display_id=True)

    def sample(self) -> None:
        """Update the line, if it has changed."""
        now_s = self._clock()
        if now_s >= self._due_s:
            self._due_s = now_s + INTERVAL_S
            self.update(self._state(now_s))

    def end(self) -> None:
        """Show that recording has ended."""
        self.update(f"ended after step {self._context.recorder.step:,}")

    def update(self, words: str) -> None:
        """Replace what the line says."""
        if self._page is not None and self._page.url:
            words += f' · <a href="{escape(self._page.url)}" target="_blank" rel="noopener">live page</a>'
        if self._handle is not None and words != self._shown:
            self._shown = words
            self._handle.update(self._html(words))

    def _html(self, words: str) -> Any:
        line = f'<div role="status" style="{_STYLE}"><b>torchobs</b> {escape(self._name)} · {words}</div>'
        return _display().HTML(line)

    def _state(self, now_s: float) -> str:
        totals, step = self._context.writer.table.core.totals, self._context.recorder.step
        parts = [f"step {step:,}"]
        for word, name in ((Word.LOSS, "loss"), (Word.GRAD_NORM, "gradient norm")):
            if totals.ints[word] and not isnan(value := totals.floats[word]):
                parts.append(f"{name} {value:.4g}")
        phase, since_ns = live_phase(self._context)
        still = self._standstill(now_s, LIVE_PHASES[phase], since_ns / 1e9)
        if self._before is None or step > self._before[1]:
            if self._before is not None:
                self._step_s.append((now_s - self._before[0]) / (step - self._before[1]))
            self._before = now_s, step
        if still is not None:
            parts[0] = f"<b>⚠ no step for {still.seconds:,.0f} s</b> (usual: {still.usual_step:.3g} s), {parts[0]}"
        if self._step_s:
            parts.append("– steps/s" if still or LIVE_PHASES[phase] == "idle" else f"{1 / self._step_s[-1]:.3g} steps/s")
        parts.append(LIVE_PHASES[phase])
        odd = [kind for index, kind in enumerate(catalog.ANOMALY_KINDS) if is_active(totals, index)]
        parts += [f"<b>⚠ {escape(kind.replace('_', ' '))}</b>" for kind in odd]
        return " · ".join(parts)

    def _standstill(self, now_s: float, phase: str, since_s: float) -> Standstill | None:
        if self._before is None or not self._step_s or self._context.recorder.step > self._before[1]:
            return None
        age_s = now_s - self._before[0]
        return standstill(age_s, min(age_s, now_s - since_s), phase, median(self._step_s), durations(self._context))


def _display() -> Any:
    """Return IPython's module, which has no types."""
    return import_module("IPython.display")
