"""torchobs: sees PyTorch training runs go bad. ``torchobs.init()`` in the training script is all that is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchobs._version import __version__
from torchobs.facade import event, log, phase, step, watch
from torchobs.session import Session, init, shutdown

if TYPE_CHECKING:
    from torchobs.settings import Settings

__all__ = ["Session", "Settings", "__version__", "event", "init", "log", "phase", "shutdown", "step", "watch"]


def __getattr__(name: str) -> Any:
    if name == "Settings":
        from torchobs.settings import Settings  # lazy

        return Settings
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted(__all__)
