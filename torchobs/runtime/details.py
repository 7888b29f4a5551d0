"""How the run was started (command line, git commit, versions, devices, settings, seed), and gauges over time since then.

Both are in the flight file, for ``torchobs inspect``, ``report`` and ``compare`` alone: no metric, event or span has them.
Secrets are removed (:mod:`torchobs.config.provenance`); the setting ``run_details`` turns it off.

The step ring holds the last steps only, and the series have no past. Here are at most 128 rows, also of loss and gradient
norm; when they are full every second one goes and the interval doubles, so that 27 KiB cover a run of any length evenly.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
import time
from contextlib import suppress
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.config import settings
from torchobs.config.options import as_text
from torchobs.config.provenance import checkout, redacted, redacted_value
from torchobs.config.settings import Settings
from torchobs.flight.details import encode_history
from torchobs.flight.totals import Word
from torchobs.support.error_guard import call
from torchobs.support.import_hooks import imported

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.flight.value_blocks import Cell
    from torchobs.probes.context import ProbeContext


_GIT_WAIT_S = 0.05
_LONGEST = 1000
_MOST_ARGUMENTS = 200
_LEFT_OUT = frozenset({"traceparent", "tracestate", "resource_attributes", "run_details"})
_VARIABLES = ("PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE")
_GIVEN_UP = ("arguments", "command", "settings", "environment")
"""Details to leave out, in this order, where all of them do not fit"""


class RunDetails:
    """Writes the details at the start, and again with more: git's soon after, torch's state once it is imported."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._details: dict[str, Any] = {}
        self._written: dict[str, Any] = {}
        self._reader = threading.Thread(target=call, args=(context.breaker("details"), self._add_git), daemon=True)

    def begin(self) -> None:
        """Write the details that cost nothing."""
        self._details = {
            "command": _shortened(redacted(sys.orig_argv[:_MOST_ARGUMENTS])),
            "arguments": _shortened(redacted(sys.argv[: _MOST_ARGUMENTS + 1])[1:]),
            "settings": _settings(self._context.settings),
            "environment": {name: text[:_LONGEST] for name in _VARIABLES if (text := settings.environment().get(name))},
            "platform": f"{platform.system()} {platform.machine()}",
        }
        self._write()
        self._reader.start()  # a file system may hang: not in the sampler thread

    def sample(self) -> None:
        """Add details that are known by now. In the sampler thread, every ten seconds and at the end."""
        self._reader.join(_GIT_WAIT_S)  # a run of a second is at its end
        torch = imported("torch")
        if torch is not None:
            self._details["torch"] = _torch(torch)
        self._write()

    def _add_git(self) -> None:
        with suppress(OSError, ValueError):  # a name that is no path
            # `torchobs run` has no script yet, but its name is in the arguments already
            main = getattr(sys.modules.get("__main__"), "__file__", None) or next(filter(os.path.isfile, sys.argv[:1]), None)
            if state := checkout(Path(main).resolve().parent if main else Path.cwd()):
                self._details["git"] = state._asdict()  # one store: the sampler thread adds to the same dictionary

    def _write(self) -> None:
        details = dict(self._details)
        if details == self._written:
            return
        document = self._context.writer.details
        for name in (None, *_GIVEN_UP):
            if name is not None:
                details.pop(name, None)
            payload = json.dumps(details, separators=(",", ":"), default=str).encode(errors="replace")
            if len(payload) <= document.room:
                if document.replace(payload):
                    self._written = dict(self._details)
                return


def _shortened(arguments: list[str]) -> list[str]:
    return [text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…" for text in arguments]


def _settings(chosen: Settings) -> dict[str, str]:
    """Return the settings that are not the defaults, as text."""
    usual = Settings()
    changed = {}
    for option in settings.OPTIONS:
        value = getattr(chosen, option.name)
        if value is not None and value != getattr(usual, option.name) and option.name not in _LEFT_OUT:
            changed[option.name] = redacted_value(option.name, as_text(value))[:_LONGEST]
    return changed


def _torch(torch: Any) -> dict[str, Any]:
    """Return versions, devices, and the settings that a repeatable run depends on. Initializes no device."""
    facts: dict[str, Any] = {}
    readers: dict[str, Callable[[], Any]] = {
        "version": lambda: str(torch.__version__),
        "cuda": lambda: torch.version.cuda,
        "hip": lambda: getattr(torch.version, "hip", None),
        "seed": lambda: str(torch.initial_seed()),
        "deterministic": lambda: torch.are_deterministic_algorithms_enabled(),  # noqa: PLW0108  # looked up when called
        "matmul_precision": lambda: torch.get_float32_matmul_precision(),  # noqa: PLW0108  # as above
        "default_dtype": lambda: str(torch.get_default_dtype()),
        "threads": lambda: torch.get_num_threads(),  # noqa: PLW0108  # as above
        "cudnn_benchmark": lambda: torch.backends.cudnn.benchmark,
        "cudnn_deterministic": lambda: torch.backends.cudnn.deterministic,
    }
    for name, read in readers.items():
        with suppress(AttributeError, RuntimeError):  # torch is still being imported, or lacks it; mixed settings raise
            if (value := read()) is not None:
                facts[name] = value
    with suppress(AttributeError, RuntimeError):
        if torch.cuda.is_initialized():
            facts["devices"] = [torch.cuda.get_device_properties(index).name for index in range(torch.cuda.device_count())]
            facts["cudnn"] = torch.backends.cudnn.version()
    return facts


FIRST_INTERVAL_S = 0.5
MOST_ROWS = 128
METRICS = (
    catalog.MEMORY_HOST_RSS, catalog.MEMORY_HOST_CHILDREN_RSS, catalog.CGROUP_MEMORY_WORKING_SET,
    catalog.MEMORY_DEVICE_ALLOCATED, catalog.MEMORY_DEVICE_RESERVED, catalog.AMP_SCALE, catalog.GRAD_LAYER_NORM,
)  # fmt: skip
STEP_METRICS = {catalog.LOSS: Word.LOSS, catalog.GRAD_NORM: Word.GRAD_NORM}
"""Metrics that the fold of the steps keeps, each with its last value"""
CURVES = ((METRICS, 48), ((catalog.ACTIVATION_LAYER_STD,), 24))
"""Metrics, and their number of curves together; those of layers' outputs come at level extreme"""


class GaugeHistory:
    """Records the gauges. In the sampler thread."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._series = 0
        self._names = [metric.name for metric in STEP_METRICS]
        self._left = [most for _, most in CURVES]
        self._cells: list[Cell] = []
        self._rows: list[tuple[float, int, tuple[float, ...]]] = []
        self._interval_s, self._due_s = FIRST_INTERVAL_S, 0.0
        self._room = context.writer.history.room

    def sample(self) -> None:
        """Add a row if one is due."""
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + self._interval_s
            self.record()

    def record(self) -> None:
        """Add a row, and write all of them."""
        writer = self._context.writer
        if len(writer.table) != self._series:
            self._series = len(writer.table)
            self._find_cells()
        floats = writer.table.core.totals.floats
        values = (*(floats[word] for word in STEP_METRICS.values()), *(cell.read() for cell in self._cells))
        if all(map(isnan, values)):
            return
        self._rows.append((writer.elapsed_ns() / 1e9, self._context.recorder.step, values))
        payload = encode_history(self._names, self._rows)
        while len(self._rows) >= MOST_ROWS or (len(payload) > self._room and len(self._rows) > 1):
            # the newest stays
            self._rows = self._rows[len(self._rows) % 2 ^ 1 :: 2]
            self._interval_s *= 2
            payload = encode_history(self._names, self._rows)
        writer.history.replace(payload)

    def _find_cells(self) -> None:
        for group, (metrics, _) in enumerate(CURVES):
            for metric in metrics:
                for attribute, cell in self._context.writer.table.cells_of(metric).items():
                    name = f"{metric.name}{{{attribute[:120]}}}" if attribute else metric.name
                    if name not in self._names and self._left[group]:
                        self._left[group] -= 1
                        self._names.append(name)
                        self._cells.append(cell)
