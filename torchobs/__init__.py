"""torchobs: sees PyTorch training runs go bad. ``torchobs.init()`` in the training script is all that is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchobs._version import __version__

if TYPE_CHECKING:
    from torchobs import debug as debug  # said to be public
    from torchobs import guard as guard
    from torchobs import tune as tune
    from torchobs.api import event, log, phase, step, watch
    from torchobs.config.settings import Settings
    from torchobs.probes.nonfinite.probe import NonFiniteError
    from torchobs.runtime.session import Session, init, shutdown
    from torchobs.support.anomaly_callbacks import AnomalyReport, on_anomaly

__all__ = [
    "AnomalyReport", "NonFiniteError", "Session", "Settings", "__version__", "event", "init", "log", "on_anomaly", "phase",
    "shutdown", "step", "watch",
]  # fmt: skip

_HOMES = {
    **dict.fromkeys(("event", "log", "phase", "step", "watch"), "torchobs.api"),
    **dict.fromkeys(("Session", "init", "shutdown"), "torchobs.runtime.session"),
    **dict.fromkeys(("AnomalyReport", "on_anomaly"), "torchobs.support.anomaly_callbacks"),
    "NonFiniteError": "torchobs.probes.nonfinite.probe",
    "Settings": "torchobs.config.settings",
}
_INERT = {"event", "init", "log", "phase", "shutdown", "step", "watch", "Session"}
"""Those that ``runtime.noop`` stands in for where torchobs does nothing"""
_TOOLBOXES = ("debug", "guard", "tune")
"""Packages of their own, reached as ``torchobs.debug`` and so on after ``import torchobs``"""


def __getattr__(name: str) -> Any:
    # Lazy: the exporter imports this package, too, and has no use for the trainer's side of it.
    from importlib import import_module

    if name in _TOOLBOXES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    from torchobs.runtime.noop import why_here

    home = _HOMES[name] if name not in _INERT or not why_here() else "torchobs.runtime.noop"
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
