"""``debug.dataloader``: what a loader gives, how its workers share the work, what is wrong with its batches and splits."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from torchobs import debug


def samples(classes: list[int]) -> TensorDataset:
    """One row of three numbers for each label."""
    return TensorDataset(torch.randn(len(classes), 3), torch.tensor(classes))


class Slow(Dataset[torch.Tensor]):
    """The second worker takes long for a sample."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        info = torch.utils.data.get_worker_info()
        time.sleep(0.1 if info is not None and info.id == 1 else 0.0)
        return torch.tensor([float(index)])


class Even(Dataset[torch.Tensor]):
    """Both workers take equally long, but for the first sample."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.02 + 0.03 * (index == 0))
        return torch.tensor([float(index)])


class Unsplit(IterableDataset[torch.Tensor]):
    """Every worker reads everything."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(40.0).unsqueeze(1)


class Shuffling(IterableDataset[torch.Tensor]):
    """Every worker reads everything, in an order of its own; or its share, in which each sample has an equal one."""

    def __init__(self, *, shares: bool = False) -> None:
        self._shares = shares

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        worker = 0 if info is None else info.id
        order = torch.randperm(48, generator=torch.Generator().manual_seed(worker)).repeat(2)
        yield from (order[order % 2 == worker] if self._shares else order[:48]).float().unsqueeze(1)


class Unknown(Sampler[int]):
    """Takes what nobody else knows."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def test_what_is_in_the_batches() -> None:
    """Sizes, shapes (the last batch is smaller), classes, throughput."""
    loader = DataLoader(samples([0, 0, 0, 1] * 25 + [1, 1]), batch_size=10)
    found = debug.dataloader(loader)
    assert (found.dataset, found.dataset_size, found.batch_size, found.workers) == ("TensorDataset", 102, 10, 0)
    assert (found.batches, found.samples, found.classes, found.anomalies) == (11, 102, {"0": 75, "1": 27}, ())
    assert [(part.name, part.dtype, part.shapes) for part in found.parts] == [
        ("batch[0]", "float32", ("10x3", "2x3")), ("batch[1]", "int64", ("10", "2")),
    ]  # fmt: skip
    assert found.throughput > 0
    assert found.first_batch > 0


def test_training_s_order_is_not_changed() -> None:
    """A shuffled loader gives the same batches after it as without it, and an epoch in progress goes on."""

    def epochs(*, looked: bool) -> list[Any]:
        torch.manual_seed(3)
        generator, data = torch.Generator().manual_seed(4), samples([0] * 8)
        loaders = [DataLoader(data, batch_size=2, shuffle=True, generator=g) for g in (generator, None)]
        own = RandomSampler(data, generator=torch.Generator().manual_seed(5))
        loaders.append(DataLoader(data, batch_sampler=BatchSampler(own, 2, drop_last=False)))
        orders: list[Any] = []
        for loader in loaders:
            iterator = iter(loader)
            orders.append(next(iterator)[0].tolist())
            if looked:
                debug.dataloader(loader, batches=2)
            orders += [[batch[0].tolist() for batch in iterator], [batch[0].tolist() for batch in loader]]
        return orders

    assert epochs(looked=True) == epochs(looked=False)


def test_a_slow_worker_is_named_and_workers_are_ended() -> None:
    """By how long the main process waited for its batches."""
    before = set(torch.multiprocessing.active_children())
    found = debug.dataloader(DataLoader(Slow(), batch_size=2, num_workers=2), batches=10)
    assert [load.worker for load in found.worker_loads] == [0, 1]
    assert any(text.startswith("worker 1 is waited for") for text in found.anomalies)
    assert not any(text.startswith("worker 0") for text in found.anomalies)
    assert set(torch.multiprocessing.active_children()) <= before


def test_equal_workers_are_not_slow() -> None:
    """Promise: of two equal workers the one that is a moment behind has all of the wait, and is not slow."""
    found = debug.dataloader(DataLoader(Even(), batch_size=2, num_workers=2), batches=12)
    assert found.anomalies == ()


def test_workers_that_give_the_same_data() -> None:
    """The usual mistake with an iterable data set; one worker is none."""
    (text,) = debug.dataloader(DataLoader(Unsplit(), batch_size=4, num_workers=2), batches=4).anomalies
    assert text.startswith("all 2 workers begin with the same batch")
    assert debug.dataloader(DataLoader(Unsplit(), batch_size=4), batches=4).anomalies == ()


def test_workers_that_each_shuffle_the_same_data() -> None:
    """Promise: told by the samples; data that is shared out, and has equal samples, is not."""
    (text,) = debug.dataloader(DataLoader(Shuffling(), batch_size=4, num_workers=2), batches=20).anomalies
    assert "different samples seen come from more than one worker" in text
    assert debug.dataloader(DataLoader(Shuffling(shares=True), batch_size=4, num_workers=2), batches=20).anomalies == ()


@pytest.mark.parametrize("classes", [60, 200])
def test_many_balanced_classes_are_not_imbalanced_by_chance(classes: int) -> None:
    """Promise: the rarest of many classes is not told for what random batches do; one that is rare in truth is."""
    labels = torch.arange(classes).repeat(20)
    ratios, told = list[float](), list[str]()
    for seed in range(20):
        torch.manual_seed(seed)
        loader = DataLoader(TensorDataset(labels, labels), batch_size=classes, shuffle=True)
        found = debug.dataloader(loader, batches=4)
        ratios.append(found.imbalance or 0)
        told += found.anomalies
    assert max(ratios) >= 10
    assert told == []
    long_tail = torch.cat([torch.zeros(20 * classes, dtype=torch.int64), labels])
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(long_tail, long_tail), batch_size=100, shuffle=True)
    (text,) = debug.dataloader(loader, batches=10).anomalies
    assert text.startswith("class 0 is ")


def test_bad_batches() -> None:
    """NaN in the inputs, a class that is rare, one class only, no batch."""
    data = samples([0] * 190 + [1] * 10)
    data.tensors[0][3, 1] = float("nan")
    found = debug.dataloader(DataLoader(data, batch_size=100))
    assert found.anomalies == ("batch[0] has NaN or Inf", "class 0 is 19 times as frequent as class 1")
    assert found.imbalance == 19.0
    sorted_data = DataLoader(samples([0] * 120 + [1] * 120), batch_size=20)
    assert debug.dataloader(sorted_data, batches=6).anomalies[0].startswith("all 120 labels seen are 0")
    assert debug.dataloader([]).anomalies == ("the loader gives no batch",)


def test_splits() -> None:
    """Sizes and shares; an overlap is counted; those of ``random_split`` have none."""
    data = samples([0, 1] * 50)
    train, validation = random_split(data, [0.8, 0.2])
    loader = DataLoader(train, batch_size=10)
    found = debug.dataloader(loader, splits={"train": loader, "validation": validation})
    assert [(row.name, row.samples, row.share) for row in found.splits] == [("train", 80, 0.8), ("validation", 20, 0.2)]
    assert found.anomalies == ()
    leaking = Subset(data, list(train.indices[:3]))
    found = debug.dataloader(loader, splits={"train": loader, "test": leaking})
    assert found.anomalies == ("3 samples of train are in test, too",)


def test_shared_samples_are_found_through_subsets_parts_and_samplers() -> None:
    """Promise: what counts are the indices of the data set below; of a sampler that nobody knows nothing is said."""
    data, more = samples([0, 1] * 50), samples([0] * 10)
    both: ConcatDataset[Any] = ConcatDataset([data, more])

    def loader(sampler: Any) -> DataLoader[Any]:
        return DataLoader(data, batch_size=4, sampler=sampler)

    def told(one: Any, other: Any) -> tuple[str, ...]:
        return debug.dataloader([torch.zeros(1)], splits={"one": one, "other": other}).anomalies

    upper = Subset(data, torch.arange(60, 100))  # type: ignore[arg-type]
    shared: list[tuple[Any, Any, int]] = [
        (data, upper, 40), (Subset(data, range(70)), upper, 10), (Subset(upper, [0, 1, -1]), Subset(data, [60, 99]), 2),
        (both, more, 10), (Subset(both, [0, 105, -1]), more, 2), (Subset(both, range(50)), upper, 0),
        (loader(SubsetRandomSampler(range(80))), loader(SubsetRandomSampler(range(80, 100))), 0),
        (loader(SubsetRandomSampler(range(80))), upper, 20), (loader(None), loader(RandomSampler(data)), 100),
        (loader(WeightedRandomSampler([1.0] * 70 + [0.0] * 30, 70)), upper, 10), (loader(Unknown()), loader(None), 0),
        (DataLoader(data, batch_sampler=BatchSampler(SubsetRandomSampler(range(30)), 5, drop_last=False)), upper, 0),
    ]  # fmt: skip
    assert [told(one, other) for one, other, _ in shared] == [
        (f"{count} samples of one are in other, too",) if count else () for _, _, count in shared
    ]
    splits = {"train": loader(SubsetRandomSampler(range(80))), "test": upper}
    assert [row.samples for row in debug.dataloader([torch.zeros(1)], splits=splits).splits] == [80, 40]


def test_arguments() -> None:
    """The errors say what to give."""
    with pytest.raises(TypeError, match="iterable of batches"):
        debug.dataloader(3)
    with pytest.raises(ValueError, match="at least one"):
        debug.dataloader([], batches=0)


@dataclass
class _Batch:
    labels: torch.Tensor
    x: torch.Tensor


class _Named(NamedTuple):
    y: torch.Tensor
    x: torch.Tensor


@pytest.mark.parametrize("kind", [_Batch, _Named])
def test_labels_are_found_by_their_names_in_batches_of_other_kinds(kind: Any) -> None:
    """Promise: in a dataclass and in a named tuple as in a mapping, wherever they stand."""
    found = debug.dataloader([kind(torch.tensor([0, 1, 1]), torch.randint(9, (3, 2)))] * 2)
    assert found.classes == {"0": 2, "1": 4}
