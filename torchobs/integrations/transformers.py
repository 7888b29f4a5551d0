"""For Transformers: ``Trainer(..., callbacks=[TorchobsCallback()])``.

It adds to what is seen anyway: the epoch, the steps to come, logged metrics, samples per step, evaluation and checkpoints by
name, and tokens with ``include_num_input_tokens_seen``.
"""

from __future__ import annotations

from typing import Any

import torchobs
from torchobs.integrations.hooks import Hooks, missing, scalars, tell_trainer

try:
    import transformers
    from transformers import TrainerCallback
except ModuleNotFoundError as _error:
    raise missing("transformers", _error) from None

__all__ = ["TorchobsCallback"]

_SEEN_ANYWAY = frozenset({"grad_norm", "learning_rate", "num_input_tokens_seen", "total_flos"})
_SETTINGS = (
    "adam_beta1", "adam_beta2", "adam_epsilon", "bf16", "dataloader_num_workers", "fp16", "gradient_accumulation_steps",
    "gradient_checkpointing", "learning_rate", "lr_scheduler_type", "max_grad_norm", "max_steps", "num_train_epochs", "optim",
    "per_device_eval_batch_size", "per_device_train_batch_size", "run_name", "seed", "tf32", "torch_compile", "warmup_steps",
    "weight_decay", "world_size",
)  # fmt: skip
"""Of ``TrainingArguments``: no path, no address, no token is among them; a run name that is no single word is left out."""


class TorchobsCallback(TrainerCallback):  # type: ignore[misc]  # mypy does not follow transformers
    """Tells torchobs what the Trainer knows.

    Args:
        settings: for :func:`torchobs.init`, which raises ``TypeError`` for a name that is none.
    """

    def __init__(self, **settings: object) -> None:
        self._settings = settings
        self._hooks = Hooks("transformers")
        self._passes = self._tokens = 0

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin to record: the ranks know each other by now."""
        del args, state, control
        torchobs.init(**self._settings)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Say what is trained, with what settings, and for how long."""
        self.on_init_end(args, state, control)  # of a callback that was added later
        self._hooks.call(self._tell_start, args, state, given.get("model"))

    def _tell_start(self, args: Any, state: Any, model: Any) -> None:
        self._tokens, self._passes = state.num_input_tokens_seen, 0
        if model is not None:
            torchobs.watch(model)
        settings = {name: getattr(args, name, None) for name in _SETTINGS}
        tell_trainer("transformers", transformers.__version__, settings)
        torchobs.log(total_steps=max(0, state.max_steps - state.global_step))  # of a resumed training, what is left

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A step begins: whatever was open is over, even if another callback called it off."""
        del args, state, control
        if self._hooks.phase is not None:
            self._hooks.call(self._hooks.end)
        self._passes = 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """One of a step's passes is done, not the last."""
        del args, state, control
        self._passes += 1

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count samples and tokens, before the step ends: afterwards it would be a second record."""
        del control
        self._hooks.call(self._count, args, state)

    def _count(self, args: Any, state: Any) -> None:
        # The Trainer counts tokens over all ranks
        tokens, self._tokens = state.num_input_tokens_seen - self._tokens, state.num_input_tokens_seen
        batch = state.train_batch_size or args.train_batch_size
        torchobs.log(samples=(self._passes + 1) * batch, tokens=tokens // max(1, args.world_size))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Evaluation and saving come next, in this order, if they are due."""
        del args, state
        if control.should_evaluate:
            self._hooks.call(self._hooks.begin, "evaluation")
        elif control.should_save:
            self._hooks.call(self._hooks.begin, "checkpoint")

    on_epoch_end = on_step_end

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """There is another dataset to evaluate on."""
        del args, state, control
        if self._hooks.phase == "checkpoint":
            self._hooks.call(self._hooks.begin, "evaluation")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A dataset has been evaluated; only if this was within training it may be time to save."""
        del args, state
        if self._hooks.phase is None:
            return
        self._hooks.call(self._hooks.end)
        if control.should_save:
            self._hooks.call(self._hooks.begin, "checkpoint")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A checkpoint is there."""
        del args, state, control
        self._hooks.call(self._hooks.end)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Show what was logged, the epoch among it."""
        del args, state, control
        self._hooks.call(_log, logs or {})

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Close what is open."""
        del args, state, control
        self._hooks.call(self._hooks.end)


def _log(logs: dict[str, Any]) -> None:
    torchobs.log(**scalars(logs, _SEEN_ANYWAY))
