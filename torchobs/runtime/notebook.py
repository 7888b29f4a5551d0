"""A status line in a Jupyter notebook, updated while the training runs, and the address of the live page."""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from html import escape
from importlib import import_module
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torchobs import catalog
from torchobs.config import settings
from torchobs.flight.layout import LIVE_PHASES
from torchobs.flight.totals import Word, is_active
from torchobs.runtime.stacks import live_phase
from torchobs.support.import_hooks import imported

if TYPE_CHECKING:
    from torchobs.probes.context import ProbeContext


_INTERVAL_S = 0.5
_PATIENCE_S = 60.0
_logger = logging.getLogger("torchobs")


class PageAddress:
    """Waits for the exporter of the flight file's directory, and shows the address of its page; for the sampler thread."""

    silent: ClassVar[bool] = False
    """Variable that keeps ``torchobs run`` from printing"""

    def __init__(self, flight_file: str, *, says: bool) -> None:
        self._directory, self._says = str(Path(flight_file).parent), says
        self._due_s, self._until_s = 0.0, time.monotonic() + _PATIENCE_S
        self.url = ""
        """Empty until it is announced"""

    def sample(self) -> None:
        """Read the address, if a listening exporter announces it."""
        now_s = time.monotonic()
        if self.url or now_s < self._due_s or now_s > self._until_s:
            return
        from torchobs.flight.directory import opened
        from torchobs.node import election

        self._due_s = now_s + _INTERVAL_S
        with suppress(OSError), opened(self._directory) as directory_fd:
            elected = election.read(directory_fd)
            self.url = elected.url if elected is not None else ""
        if self.url and self._says and not PageAddress.silent:
            port = self.url.rstrip("/").rpartition(":")[2]
            remote = settings.environment().get("SSH_CONNECTION", "")
            tunnel = f"; from your own machine: ssh -L {port}:localhost:{port} {os.uname().nodename}" if remote else ""
            _logger.warning("torchobs: this run is shown live on %s%s", self.url, tunnel)


INTERVAL_S = 1.0
_QUIET_S = 10.0
"""Time without a step after which the line shows that time instead of the speed"""
_STYLE = "font:13px/1.5 system-ui,sans-serif;border:1px solid #8886;border-radius:6px;padding:.35em .8em;display:inline-block"


def in_notebook() -> bool:
    """Return whether this is a Jupyter kernel: its shell has a ``kernel``; IPython in a terminal has none."""
    ipython = imported("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookStatus:
    """The line, shown below the cell that called ``init()``; the sampler thread updates it once a second."""

    def __init__(self, context: ProbeContext, name: str, page: PageAddress | None = None) -> None:
        self._context, self._name, self._page = context, name, page
        self._handle: Any = None
        self._shown, self._due_s = "", 0.0
        self._stepped = (time.monotonic(), 0)
        """When the step last changed, and that step"""
        self._speed = ""

    def begin(self) -> None:
        """Show the line."""
        self._handle = _display().display(self._html("waiting for the first step"), display_id=True)

    def sample(self) -> None:
        """Update the line, if it has changed."""
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + INTERVAL_S
            self.update(self._state(now_s))

    def end(self) -> None:
        """Show that recording has ended."""
        self.update(f"ended after step {self._context.recorder.step:,}")

    def update(self, words: str) -> None:
        """Replace the text of the line."""
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
        since_s, before = self._stepped
        if step > before:
            self._speed = f"{(step - before) / max(now_s - since_s, 1e-9):.3g} steps/s"
            self._stepped = now_s, step
        phase = LIVE_PHASES[live_phase(self._context)[0]]
        if self._speed and phase != "idle":
            parts.append(self._speed if now_s - since_s < _QUIET_S else f"no step for {now_s - since_s:,.0f} s")
        parts.append(phase)
        odd = [kind for index, kind in enumerate(catalog.ANOMALY_KINDS) if is_active(totals, index)]
        parts += [f"<b>⚠ {escape(kind.replace('_', ' '))}</b>" for kind in odd]
        return " · ".join(parts)


def _display() -> Any:
    """Return IPython's module, which has no types."""
    return import_module("IPython.display")
