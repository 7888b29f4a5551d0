"""torchobs: sees PyTorch training runs go bad. ``torchobs.init()`` in the training script is all that is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchobs._version import __version__

if TYPE_CHECKING:
    from torchobs.api import event, log, phase, step, watch
    from torchobs.config.settings import Settings
    from torchobs.runtime.session import Session, init, shutdown

__all__ = ["Session", "Settings", "__version__", "event", "init", "log", "phase", "shutdown", "step", "watch"]

_HOMES = {
    **dict.fromkeys(("event", "log", "phase", "step", "watch"), "torchobs.api"),
    **dict.fromkeys(("Session", "init", "shutdown"), "torchobs.runtime.session"),
    "Settings": "torchobs.config.settings",
}


def __getattr__(name: str) -> Any:
    # Lazy: the exporter imports this package, too, and has no use for the trainer's side of it.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from torchobs.runtime.noop import why_here

    home = _HOMES[name] if name == "Settings" or not why_here() else "torchobs.runtime.noop"
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
