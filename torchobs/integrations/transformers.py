"""Transformers integration: ``Trainer(..., callbacks=[TorchobsCallback()])``.

Adds the epoch, planned steps, logged metrics, samples per step, named evaluation and checkpoints, and tokens with
``include_num_input_tokens_seen``.
"""

from __future__ import annotations

from typing import Any

import torchobs
from torchobs.integrations.hooks import Hooks, missing, record_trainer, scalars

try:
    import transformers
    from transformers import TrainerCallback
except ModuleNotFoundError as _error:
    raise missing("transformers", _error) from None

__all__ = ["TorchobsCallback"]

_MEASURED_WITHOUT = frozenset({"grad_norm", "learning_rate", "num_input_tokens_seen", "total_flos"})
_SETTINGS = (
    "adam_beta1", "adam_beta2", "adam_epsilon", "bf16", "dataloader_num_workers", "fp16", "gradient_accumulation_steps",
    "gradient_checkpointing", "learning_rate", "lr_scheduler_type", "max_grad_norm", "max_steps", "num_train_epochs", "optim",
    "per_device_eval_batch_size", "per_device_train_batch_size", "run_name", "seed", "tf32", "torch_compile", "warmup_steps",
    "weight_decay", "world_size",
)  # fmt: skip
"""Recorded fields of ``TrainingArguments``: no paths, addresses or tokens; a run name of several words is left out."""


class TorchobsCallback(TrainerCallback):  # type: ignore[misc]  # mypy does not follow transformers
    """Forwards the Trainer's state to torchobs.

    Args:
        settings: for :func:`torchobs.init`, which raises ``TypeError`` for an unknown name.
    """

    def __init__(self, **settings: object) -> None:
        self._settings = settings
        self._hooks = Hooks("transformers")
        self._passes = self._tokens = 0

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start recording, now that the process group exists."""
        torchobs.init(**self._settings)

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Record the model, the settings and the planned steps."""
        self.on_init_end(args, state, control)  # for a callback that was added later
        self._hooks.call(self._record_start, args, state, more.get("model"))

    def _record_start(self, args: Any, state: Any, model: Any) -> None:
        self._tokens, self._passes = state.num_input_tokens_seen, 0
        if model is not None:
            torchobs.watch(model)
        settings = {name: getattr(args, name, None) for name in _SETTINGS}
        record_trainer("transformers", transformers.__version__, settings)
        done = state.global_step
        torchobs.log(total_steps=max(0, state.max_steps - done), resumed_from=done)  # after resuming, the remaining steps

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Close an open phase at the start of a step, even if another callback canceled it."""
        if self._hooks.phase is not None:
            self._hooks.call(self._hooks.end)
        self._passes = 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count a gradient accumulation pass, not the step's last."""
        self._passes += 1

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record samples and tokens before the step ends: afterwards they would need a second record."""
        self._hooks.call(self._count, args, state)

    def _count(self, args: Any, state: Any) -> None:
        # The Trainer counts tokens over all ranks
        tokens, self._tokens = state.num_input_tokens_seen - self._tokens, state.num_input_tokens_seen
        batch = state.train_batch_size or args.train_batch_size
        torchobs.log(samples=(self._passes + 1) * batch, tokens=tokens // max(1, args.world_size))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Open the phase that follows: evaluation, then saving, if they are due."""
        if control.should_evaluate:
            self._hooks.call(self._hooks.begin, "evaluation")
        elif control.should_save:
            self._hooks.call(self._hooks.begin, "checkpoint")

    on_epoch_end = on_step_end

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Return to the evaluation phase: there is another dataset."""
        if self._hooks.phase == "checkpoint":
            self._hooks.call(self._hooks.begin, "evaluation")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Close the evaluation phase; during training, saving may follow."""
        if self._hooks.phase is None:
            return
        self._hooks.call(self._hooks.end)
        if control.should_save:
            self._hooks.call(self._hooks.begin, "checkpoint")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Close the checkpoint phase."""
        self._hooks.call(self._hooks.end)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Record the logged numbers, including the epoch."""
        self._hooks.call(_log, logs or {})

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Close the open phase."""
        self._hooks.call(self._hooks.end)


def _log(logs: dict[str, Any]) -> None:
    torchobs.log(**scalars(logs, _MEASURED_WITHOUT))
