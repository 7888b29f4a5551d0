"""Two ranks train on halves of each batch by tune.pipeline, in DDP; rank 0 writes. Started by torchrun."""

import sys
from pathlib import Path

import torch
from torch import distributed, nn

from torchobs import tune

folder = Path(sys.argv[1])
loss_fn = nn.functional.mse_loss


def ddp() -> None:
    """One step of two micro-batches."""
    model = nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.zero_()
    run = tune.pipeline(model, optimizer="sgd", lr=0.1, scheduler="constant", accumulate=2, max_grad_norm=None, amp=False)
    x, y = torch.arange(32.0).view(8, 4) / 32, torch.arange(16.0).view(8, 2) / 16
    rank = distributed.get_rank()
    for number in range(2):
        part = slice(4 * number + 2 * rank, 4 * number + 2 * rank + 2)
        run.train_step((x[part], y[part]), loss_fn)
        if not number:
            gradients = [torch.zeros_like(model.weight) for _ in range(2)]
            distributed.all_gather(gradients, model.weight.grad)
            assert not torch.equal(*gradients), "averaged before the last micro-batch"
    run.save(folder / "ddp.pt")


ddp()
distributed.destroy_process_group()
