"""Accelerate integration: ``Accelerator(log_with=TorchobsTracker())``, and ``init_trackers`` as for any tracker.

Adds the numbers given to ``accelerator.log`` and those of the configuration, and the planned steps if the configuration has
``num_training_steps``, ``max_train_steps`` or ``total_steps``.
"""

from __future__ import annotations

from typing import Any

import torchobs
from torchobs.integrations.hooks import Hooks, missing, record_trainer, scalars

try:
    import accelerate
    from accelerate.tracking import GeneralTracker
except ModuleNotFoundError as _error:
    raise missing("accelerate", _error) from None

__all__ = ["TorchobsTracker"]

_TOTALS = ("num_training_steps", "max_train_steps", "total_steps")


class TorchobsTracker(GeneralTracker):  # type: ignore[misc]  # mypy does not follow accelerate
    """Forwards the values logged to Accelerate, on every rank.

    Args:
        settings: for :func:`torchobs.init`, which raises ``TypeError`` for an unknown name.
    """

    name = "torchobs"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, **settings: object) -> None:
        super().__init__()
        self._settings = settings
        self._hooks = Hooks("accelerate")
        self._session: torchobs.Session | None = None

    @property
    def tracker(self) -> torchobs.Session | None:
        """Session; ``None`` before ``init_trackers``."""
        return self._session

    def start(self) -> None:
        """Start recording, now that the process group exists."""
        self._session = torchobs.init(**self._settings)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the configuration's numbers and single words, and the planned steps."""
        self._hooks.call(_record_start, values)

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """Record the numbers. ``step`` is the script's own count; torchobs has its own."""
        self._hooks.call(_log, values)

    def finish(self) -> None:
        """Do nothing: the session ends with the process, which may go on to evaluate or train."""


def _record_start(values: dict[str, Any]) -> None:
    record_trainer("accelerate", accelerate.__version__, values)
    torchobs.log(total_steps=next((values[name] for name in _TOTALS if isinstance(values.get(name), int)), None))


def _log(values: dict[str, Any]) -> None:
    torchobs.log(**scalars(values))
