"""An Accelerate loop: `accumulate`, clipping, a schedule, evaluation between steps, `save_state`.

`with_accelerate.py WORD...` trains once for each: `plain` knows nothing of torchobs, `integration` uses its tracker.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.scripts.text import VOCABULARY, report, windows

ACCUMULATE, EPOCHS, BATCHES, BATCH, LENGTH = 2, 2, 8, 4, 16


def main(*, integration: bool) -> None:
    """Train two epochs of four steps."""
    trackers: list[object] = []
    if integration:
        from torchobs.integrations.accelerate import TorchobsTracker

        trackers.append(TorchobsTracker())
    set_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE, log_with=trackers)
    settings = {"max_train_steps": EPOCHS * BATCHES // ACCUMULATE, "learning_rate": 1e-2, "data": "/home/someone/text"}
    accelerator.init_trackers("characters", settings)
    net = nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, VOCABULARY))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    inputs, targets = windows(BATCHES * BATCH + 8, LENGTH)
    split = BATCHES * BATCH
    model, optimizer, schedule, training, validating = accelerator.prepare(
        net, optimizer, schedule,
        DataLoader(TensorDataset(inputs[:split], targets[:split]), BATCH, shuffle=True),
        DataLoader(TensorDataset(inputs[split:], targets[split:]), BATCH),
    )  # fmt: skip

    def loss_of(batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    loss = validation = torch.zeros(())
    steps = 0
    for epoch in range(EPOCHS):
        for batch in training:
            with accelerator.accumulate(model):
                loss = loss_of(batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    steps += 1
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            validation = torch.stack([loss_of(batch) for batch in validating]).mean()
        model.train()
        accelerator.log({"validation_loss": validation.item(), "epoch": epoch, "loss": loss.item(), "note": "x"}, step=steps)
        with tempfile.TemporaryDirectory() as folder:
            accelerator.save_state(folder)
    accelerator.end_training()
    report("accelerate", steps, loss.item(), net, validation_loss=validation.item())


if __name__ == "__main__":
    torch.set_num_threads(1)
    for word in sys.argv[1:]:
        main(integration=word == "integration")
