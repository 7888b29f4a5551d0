"""Two ranks that accumulate gradients under `no_sync`: run by torchrun. Nothing here knows of torchobs."""

import contextlib
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.scripts.text import VOCABULARY, report, windows

PASSES = 3


def main() -> None:
    """Train 10 steps of three passes each, the last of which averages over the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Flatten(), nn.Linear(8 * 16, VOCABULARY))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    texts = TensorDataset(*windows(2 * 10 * PASSES * 4, 8))
    loader = DataLoader(texts, 4, sampler=DistributedSampler(texts, seed=1))
    loss, steps = torch.zeros(()), 0
    for number, (inputs, targets) in enumerate(loader, start=1):
        last = number % PASSES == 0
        with contextlib.nullcontext() if last else parallel.no_sync():
            loss = nn.functional.cross_entropy(parallel(inputs), targets[:, -1]) / PASSES
            loss.backward()  # type: ignore[no-untyped-call]
        if last:
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    report("accumulate", steps, loss.item(), model, rank=dist.get_rank())
    # torch 2.13 can deadlock when a group goes while a gloo thread frees a backward's work, for which it wants Python's lock
    dist.barrier()
    time.sleep(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
