"""Lightning integration: ``Trainer(callbacks=[TorchobsCallback()])``.

Adds the epoch, planned steps, logged metrics, samples and tokens per step, and named evaluation. Calls :func:`torchobs.init`
in every rank once the process group exists, however the ranks were started.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from math import isfinite
from typing import Any

import torchobs
from torchobs.integrations.hooks import Hooks, missing, record_trainer, samples_in, scalars, tokens_in

__all__ = ["TorchobsCallback"]


def _framework() -> Any:
    """Return the package that the script uses: both define the same classes, and neither accepts the other's."""
    names = ["lightning.pytorch", "pytorch_lightning"]
    for name in names:
        if sys.modules.get(name) is not None:
            return sys.modules[name]
    try:
        return import_module(names[0])
    except ModuleNotFoundError:
        return import_module(names[1])


try:
    _lightning = _framework()
except ModuleNotFoundError as _error:
    raise missing("lightning", _error) from None


class TorchobsCallback(_lightning.Callback):  # type: ignore[misc, name-defined]  # one of two packages
    """Forwards Lightning's training state to torchobs.

    Args:
        tokens: counts the tokens of a batch; by default the elements of its ``input_ids``, if it has any.
        settings: for :func:`torchobs.init`, which raises ``TypeError`` for an unknown name.
    """

    def __init__(self, *, tokens: Callable[[Any], int] | None = None, **settings: object) -> None:
        super().__init__()
        self._tokens = tokens or tokens_in
        self._settings = settings
        self._hooks = Hooks("lightning")

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Start recording, now that the process group exists."""
        torchobs.init(**self._settings)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Record the model, the settings and the planned steps."""
        self._hooks.call(_record_start, trainer, pl_module)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Record the epoch, and the metrics logged for the last one."""
        self._hooks.call(_log_metrics, trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Record samples and tokens before the step ends: afterwards they would need a second record."""
        self._hooks.call(self._count, batch)

    def _count(self, batch: Any) -> None:
        torchobs.log(samples=samples_in(batch), tokens=self._tokens(batch))

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the evaluation phase."""
        self._hooks.call(self._hooks.begin, "evaluation")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the evaluation phase and record its metrics, except those of the sanity check, which Lightning drops too."""
        self._hooks.call(self._hooks.end)
        if not trainer.sanity_checking:
            self._hooks.call(_log_metrics, trainer)

    on_test_start = on_validation_start
    on_test_end = on_validation_end

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the metrics logged last."""
        self._hooks.call(_log_metrics, trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the open phase; the exception propagates."""
        self._hooks.call(self._hooks.end)


def _record_start(trainer: Any, model: Any) -> None:
    torchobs.watch(model)
    settings = {
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        "max_epochs": trainer.max_epochs,
        "max_steps": trainer.max_steps,
        "num_devices": trainer.num_devices,
        "num_nodes": trainer.num_nodes,
        "precision": trainer.precision,
        "strategy": type(trainer.strategy).__name__,
    }
    record_trainer("lightning", _lightning.__version__, settings)
    if len(trainer.optimizers) == 1:  # else Lightning counts several for what is one step here
        torchobs.log(resumed_from=trainer.global_step)
    planned = trainer.estimated_stepping_batches
    if isfinite(planned) and planned > 0:
        torchobs.log(total_steps=int(planned) - trainer.global_step)  # after resuming, the remaining steps


def _log_metrics(trainer: Any) -> None:
    torchobs.log(**{"epoch": trainer.current_epoch, **scalars(trainer.callback_metrics)})
