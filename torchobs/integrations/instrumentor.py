"""OpenTelemetry instrumentor: ``opentelemetry-instrument python train.py`` turns torchobs on without changing the script."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

import torchobs
from torchobs.integrations.hooks import missing
from torchobs.support.command_line import starts_others

try:
    from opentelemetry.instrumentation.instrumentor import BaseInstrumentor
except ModuleNotFoundError as _error:
    raise missing("instrumentor", _error) from None

__all__ = ["TorchInstrumentor"]


class TorchInstrumentor(BaseInstrumentor):  # type: ignore[misc]  # mypy does not follow it
    """Calls :func:`torchobs.init` and :func:`torchobs.shutdown`; the settings are those of the environment."""

    def instrumentation_dependencies(self) -> Collection[str]:
        """Return the required packages."""
        return ("torch >= 2.4",)

    def _instrument(self, **_: Any) -> None:
        if not starts_others(sys.orig_argv):
            torchobs.init()

    def _uninstrument(self, **_: Any) -> None:
        torchobs.shutdown()
