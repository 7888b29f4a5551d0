"""Two ranks train on halves of each batch by tune.pipeline, in DDP and sharded; rank 0 writes. Started by torchrun."""

import sys
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from tests.tune.models import blocks
from torchobs import tune

folder = Path(sys.argv[1])
loss_fn = nn.functional.mse_loss


def ddp() -> None:
    """One step of two micro-batches."""
    model = nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.zero_()
    run = tune.pipeline(
        model, loss_fn, optimizer="sgd", lr=0.1, scheduler="constant", accumulate=2, max_grad_norm=None, amp="off"
    )
    x, y = torch.arange(32.0).view(8, 4) / 32, torch.arange(16.0).view(8, 2) / 16
    rank = distributed.get_rank()
    for number in range(2):
        part = slice(4 * number + 2 * rank, 4 * number + 2 * rank + 2)
        run.train_step((x[part], y[part]))
        if not number:
            gradients = [torch.zeros_like(model.weight) for _ in range(2)]
            distributed.all_gather(gradients, model.weight.grad)
            assert not torch.equal(*gradients), "averaged before the last micro-batch"
    run.save(folder / "ddp.pt")


def sharded_by_halves() -> None:
    """Two epochs of five batches, half of each on a rank; the test trains on whole ones in one process."""
    model = blocks(depth=2, dropout=0.0)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    run = tune.pipeline(model, loss_fn, lr=1e-2, accumulate=2, max_grad_norm=0.05, amp="off")
    torch.manual_seed(3)
    batches = [(torch.randn(4, 16), torch.randn(4, 4)) for _ in range(5)]
    rank = distributed.get_rank()
    halves = [(x[2 * rank : 2 * rank + 2], y[2 * rank : 2 * rank + 2]) for x, y in batches]
    try:
        run.fit(halves, 2, checkpoint=folder / "fsdp.pt")
    except RuntimeError as error:
        assert "torch.distributed.checkpoint" in str(error)  # noqa: PT017  # no test, but a rank of one
    assert run.step == 0
    run.fit(halves, 2)
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    if not rank:
        torch.save(whole, folder / "fsdp.pt")


ddp()
sharded_by_halves()
distributed.destroy_process_group()
