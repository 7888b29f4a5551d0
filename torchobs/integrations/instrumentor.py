"""OpenTelemetry instrumentor: ``opentelemetry-instrument python train.py`` turns torchobs on without changing the script."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import PurePath
from typing import Any

import torchobs
from torchobs.integrations.hooks import missing

try:
    from opentelemetry.instrumentation.instrumentor import BaseInstrumentor
except ModuleNotFoundError as _error:
    raise missing("instrumentor", _error) from None

__all__ = ["TorchInstrumentor"]

_LAUNCHERS = frozenset({"torchrun", "accelerate", "accelerate-launch", "deepspeed", "lightning", "fabric"})
_LAUNCHER_MODULES = ("torch.distributed.", "accelerate.commands.", "torch._inductor.")


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


def starts_others(command: Sequence[str]) -> bool:
    """Return True if this process starts or helps a training without being a rank: all of them inherit the instrumentation.

    A launcher, a process of ``multiprocessing`` (DataLoader workers, its resource tracker), or one of the compiler's pool.
    """
    arguments = list(command[1:])
    while arguments and arguments[0].startswith("-") and arguments[0] not in {"-c", "-m"}:
        arguments = arguments[2:] if arguments[0] in {"-W", "-X"} else arguments[1:]
    first, second, *_ = [*arguments, "", ""]
    if first == "-c":
        return "multiprocessing" in second
    if first == "-m":
        return f"{second}.".startswith(_LAUNCHER_MODULES)
    return PurePath(first).name in _LAUNCHERS or "/torch/_inductor/" in first
