"""Lightning's Trainer on a small character model: accumulation, clipping, validation every few batches, checkpoints.

`with_lightning.py WORD...` trains once for each: `plain` knows nothing of torchobs, `integration` uses its callback,
and `ranks` does so on two ranks that Lightning starts itself.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.scripts.text import VOCABULARY, report, windows

ACCUMULATE, EPOCHS, BATCHES, BATCH, LENGTH = 2, 2, 12, 4, 16


class Characters(lightning.LightningModule):  # type: ignore[misc]  # mypy does not follow lightning
    """Predicts the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, VOCABULARY))
        self.last = 0.0

    def _loss(self, batch: list[Tensor]) -> Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(self.net(inputs).flatten(0, 1), targets.flatten())

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        del index
        loss = self._loss(batch)
        self.last = loss.item()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        del index
        self.log("val_loss", self._loss(batch))

    def configure_optimizers(self) -> dict[str, object]:
        """AdamW and a schedule, stepped per step."""
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loaders() -> tuple[DataLoader[tuple[Tensor, ...]], DataLoader[tuple[Tensor, ...]]]:
    """For training and for validation."""
    inputs, targets = windows(BATCHES * BATCH + 8, LENGTH)
    split = BATCHES * BATCH
    train, validate = TensorDataset(inputs[:split], targets[:split]), TensorDataset(inputs[split:], targets[split:])
    return DataLoader(train, BATCH, shuffle=True), DataLoader(validate, BATCH)


def main(*, integration: bool, devices: int = 1) -> None:
    """Train two epochs of six steps (of three on two devices)."""
    callbacks: list[lightning.Callback] = []
    if integration:
        from torchobs.integrations.lightning import TorchobsCallback

        callbacks.append(TorchobsCallback())
    lightning.seed_everything(0, verbose=False)
    model = Characters()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu", devices=devices, max_epochs=EPOCHS, accumulate_grad_batches=ACCUMULATE, gradient_clip_val=0.5,
            val_check_interval=4 // devices, callbacks=callbacks, default_root_dir=folder, logger=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(model, *loaders())
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    report("lightning", trainer.global_step, model.last, model, metrics=metrics, rank=trainer.global_rank)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for word in sys.argv[1:]:
        main(integration=word != "plain", devices=2 if word == "ranks" else 1)
