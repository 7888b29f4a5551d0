"""``debug.check_dataloader``: what a loader gives, how its workers share the work, what is wrong with its batches."""

# ruff: noqa: NPY002  # the global generator, which augmentations draw from

import random
import time
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

from tests.debug.models import texts
from torchobs import debug, tune


def samples(classes: list[int]) -> TensorDataset:
    """One row of three numbers for each label."""
    return TensorDataset(torch.randn(len(classes), 3), torch.tensor(classes))


class Waiting(Dataset[torch.Tensor]):
    """Takes a while for each sample, longer for the first one or in the second worker."""

    def __init__(self, sample_s: float, *, first_s: float = 0.0, second_worker_s: float = 0.0) -> None:
        self.waits = sample_s, first_s, second_worker_s

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        (sample_s, first_s, second_worker_s), worker = self.waits, torch.utils.data.get_worker_info()
        time.sleep(sample_s + first_s * (index == 0) + second_worker_s * (worker is not None and worker.id == 1))
        return torch.tensor([float(index)])


def test_what_is_in_the_batches() -> None:
    """Sizes, shapes (the last batch is smaller), classes, throughput."""
    loader = DataLoader(samples([0, 0, 0, 1] * 25 + [1, 1]), batch_size=10)
    check = debug.check_dataloader(loader)
    assert (check.dataset, check.dataset_size, check.batch_size, check.workers) == ("TensorDataset", 102, 10, 0)
    assert (check.batches, check.samples, check.classes, check.problems) == (11, 102, {"0": 75, "1": 27}, ())
    assert [(part.name, part.dtype, part.shapes) for part in check.parts] == [
        ("batch[0]", "float32", ("10x3", "2x3")), ("batch[1]", "int64", ("10", "2")),
    ]  # fmt: skip
    assert (check.samples_per_s or 0) > 0
    assert (check.first_batch_s or 0) > 0


def test_training_s_order_is_not_changed() -> None:
    """A shuffled loader gives the same batches after it as without it, augmented alike, and an epoch in progress goes on."""

    def augmented(batch: Any) -> Any:
        return torch.stack([x for x, _ in batch]) + random.random() + float(np.random.rand()), len(batch)

    def epochs(*, looked: bool) -> list[Any]:
        tune.seed(3)
        generator, data = torch.Generator().manual_seed(4), samples([0] * 8)
        loaders = [DataLoader(data, batch_size=2, shuffle=True, generator=g) for g in (generator, None)]
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(5))
        loaders.append(DataLoader(data, batch_sampler=BatchSampler(sampler, 2, drop_last=False), collate_fn=augmented))
        orders: list[Any] = []
        for loader in loaders:
            iterator = iter(loader)
            orders.append(next(iterator)[0].tolist())
            if looked:
                debug.check_dataloader(loader, batches=2)
            orders += [[batch[0].tolist() for batch in iterator], [batch[0].tolist() for batch in loader]]
        return orders

    assert epochs(looked=True) == epochs(looked=False)


def test_a_slow_worker_is_named_and_workers_are_ended() -> None:
    """By how long the main process waited for its batches."""
    before = set(torch.multiprocessing.active_children())
    check = debug.check_dataloader(DataLoader(Waiting(0.0, second_worker_s=0.1), batch_size=2, num_workers=2), batches=10)
    assert [load.worker for load in check.worker_loads] == [0, 1]
    assert any(text.startswith("worker 1: it is waited for") for text in texts(check))
    assert not any(text.startswith("worker 0") for text in texts(check))
    assert set(torch.multiprocessing.active_children()) <= before


def test_equal_workers_are_not_slow() -> None:
    """Promise: of two equal workers the one that is a moment behind has all of the wait, and is not slow."""
    check = debug.check_dataloader(DataLoader(Waiting(0.02, first_s=0.03), batch_size=2, num_workers=2), batches=12)
    assert check.problems == ()


def test_many_balanced_classes_are_not_imbalanced_by_chance() -> None:
    """Promise: the rarest of many classes is not reported for what random batches do."""
    labels, ratios = torch.arange(60).repeat(20), list[float]()
    for seed in range(20):
        torch.manual_seed(seed)
        check = debug.check_dataloader(DataLoader(TensorDataset(labels, labels), batch_size=60, shuffle=True), batches=4)
        ratios.append(check.imbalance or 0)
        assert check.problems == ()
    assert max(ratios) >= 10


def test_bad_batches() -> None:
    """NaN in the inputs, a class that is rare, one class only, no batch."""
    data = samples([0] * 190 + [1] * 10)
    data.tensors[0][3, 1] = float("nan")
    check = debug.check_dataloader(DataLoader(data, batch_size=100))
    assert texts(check) == ("batch[0]: it has NaN or Inf", "classes: class 0 is 19 times as frequent as class 1")
    assert check.imbalance == 19.0
    sorted_data = DataLoader(samples([0] * 120 + [1] * 120), batch_size=20)
    assert debug.check_dataloader(sorted_data, batches=6).problems[0].text.startswith("all 120 labels seen are 0")
    assert texts(debug.check_dataloader([])) == ("loader: the loader gives no batch",)
