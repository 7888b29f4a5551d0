"""Transformers' Trainer on a small GPT-2 made from its configuration: accumulation, clipping, evaluation, checkpoints.

`with_transformers.py WORD...` trains once for each: `plain` knows nothing of torchobs, `integration` uses its callback.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, logging, set_seed

from tests.scripts.text import VOCABULARY, report, windows

ACCUMULATE, EPOCHS, BATCHES, BATCH, LENGTH = 2, 2, 10, 4, 16


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Stretches of text."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main(*, integration: bool) -> None:
    """Train two epochs of five steps."""
    callbacks: list[TrainerCallback] = []
    if integration:
        from torchobs.integrations.transformers import TorchobsCallback

        callbacks.append(TorchobsCallback())
    set_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    tokens, _ = windows(BATCHES * BATCH + 8, LENGTH)
    split = BATCHES * BATCH
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=BATCH, gradient_accumulation_steps=ACCUMULATE, learning_rate=1e-2, max_grad_norm=0.5,
            eval_strategy="steps", eval_steps=2, save_steps=4, logging_steps=1, report_to="none", disable_tqdm=True,
            include_num_input_tokens_seen="all", run_name="small",
        )  # fmt: skip
        trainer = Trainer(
            model, arguments, train_dataset=Windows(tokens[:split]), eval_dataset=Windows(tokens[split:]), callbacks=callbacks
        )
        trainer.train()
    history = trainer.state.log_history
    losses = [entry["loss"] for entry in history if "loss" in entry]
    norms = [entry["grad_norm"] for entry in history if "grad_norm" in entry]
    validation = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    more = {"losses": losses, "norms": norms, "tokens": trainer.state.num_input_tokens_seen, "eval_loss": validation[-1]}
    report("transformers", trainer.state.global_step, losses[-1], model, **more)


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for word in sys.argv[1:]:
        main(integration=word == "integration")
