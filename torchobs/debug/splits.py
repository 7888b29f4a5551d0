"""Parts of a data set: their sizes, and samples that two of them share."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

from torchobs.support.result import Result

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    Places = dict[int, "range | set[Hashable]"]
    """Indices of samples by the id of the data set that has them; all of it as a range"""


@dataclass(frozen=True, slots=True)
class SplitSize(Result):
    """One part of a data set."""

    name: str
    samples: int | None
    """Those that the sampler chooses from, where it is known to choose; ``None`` where the data set has no length"""
    share: float | None


def judge_splits(splits: Mapping[str, Any]) -> tuple[tuple[SplitSize, ...], list[tuple[str, str, str]]]:
    """Return the size of each split (loader or data set), and kind, names and text of what is wrong with them."""
    datasets = {name: _dataset(split) for name, split in splits.items()}
    chosen = {name: _chosen(split, datasets[name]) for name, split in splits.items()}
    places = {name: _places(datasets[name], chosen[name]) for name in splits}
    sizes = {name: _size(datasets[name], chosen[name]) for name in splits}
    total = sum(size or 0 for size in sizes.values())
    rows = tuple(SplitSize(name, size, size / total if size is not None and total else None) for name, size in sizes.items())
    texts = [
        ("split_overlap", f"{one}, {other}", f"{shared} samples of {one} are in {other}, too")
        for one, other in combinations(splits, 2)
        if (shared := _shared(places[one], places[other]))
    ]
    texts += [("empty_split", name, f"{name} has no sample") for name, size in sizes.items() if size == 0]
    return rows, texts


def length(dataset: Any) -> int | None:
    """Return the length of a data set, ``None`` where it has none."""
    try:
        return len(dataset)
    except TypeError:
        return None


def _dataset(split: Any) -> Any:
    return getattr(split, "dataset", split) if hasattr(split, "batch_sampler") else split


def _chosen(split: Any, dataset: Any) -> Iterable[Any] | None:
    """Return the indices that a loader's sampler chooses from; all, where it is known to take all or the split is no loader.

    ``None`` where nobody knows, as of a sampler of the user's own.
    """
    from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler, SequentialSampler, WeightedRandomSampler

    every = range(length(dataset) or 0)
    if not hasattr(split, "batch_sampler") or isinstance(dataset, IterableDataset):
        return every
    # with a batch sampler the loader's own ``sampler`` is not asked
    batches = split.batch_sampler
    sampler = getattr(split, "sampler", None) if batches is None else getattr(batches, "sampler", None)
    if isinstance(sampler, (SequentialSampler, RandomSampler, DistributedSampler)):  # the last on all ranks together
        return every
    if isinstance(sampler, WeightedRandomSampler):
        return [index for index, weight in enumerate(sampler.weights.tolist()) if weight > 0]
    indices: Iterable[Any] | None = getattr(sampler, "indices", None)
    return indices


def _places(dataset: Any, chosen: Iterable[Any] | None) -> Places | None:
    """Return where the chosen samples are in the data sets that ``Subset`` and ``ConcatDataset`` are made of."""
    from torch.utils.data import ConcatDataset

    if chosen is None:
        return None
    if getattr(dataset, "indices", None) is not None and hasattr(dataset, "dataset"):
        indices = list(dataset.indices)
        if not _is_all(chosen, dataset):
            indices = [indices[_index(one)] for one in chosen]
        return _places(dataset.dataset, indices)
    if isinstance(dataset, ConcatDataset):
        return _places_of_parts(dataset, chosen)
    if _is_all(chosen, dataset):
        return {id(dataset): range(length(dataset) or 0)}
    size, found = length(dataset) or 0, {_index(one) for one in chosen}
    return {id(dataset): {one + size if isinstance(one, int) and one < 0 else one for one in found}}


def _places_of_parts(dataset: Any, chosen: Iterable[Any]) -> Places:
    parts: list[list[int]] = [[] for _ in dataset.datasets]
    for one in chosen:
        index = _index(one)
        index += len(dataset) if index < 0 else 0
        part = bisect_right(dataset.cumulative_sizes, index)
        parts[part].append(index - (dataset.cumulative_sizes[part - 1] if part else 0))
    found: Places = {}
    for part, indices in zip(dataset.datasets, parts, strict=True):
        whole = len(indices) == len(part) and len(set(indices)) == len(part)
        for root, places in (_places(part, range(len(part)) if whole else indices) or {}).items():
            found[root] = places if root not in found else set(found[root]) | set(places)
    return found


def _is_all(chosen: Iterable[Any], dataset: Any) -> bool:
    return isinstance(chosen, range) and chosen == range(length(dataset) or 0)


def _index(one: Any) -> Any:
    """Return an index, which may be a tensor's or an array's element, as a plain number; a key as it is."""
    return int(one) if hasattr(one, "__index__") else one


def _size(dataset: Any, chosen: Iterable[Any] | None) -> int | None:
    if chosen is None or _is_all(chosen, dataset):
        return length(dataset)
    return len({_index(one) for one in chosen})


def _shared(one: Places | None, other: Places | None) -> int:
    if one is None or other is None:
        return 0
    return sum(_common(places, other[root]) for root, places in one.items() if root in other)


def _common(one: range | set[Hashable], other: range | set[Hashable]) -> int:
    if isinstance(one, range) and isinstance(other, range):
        return min(len(one), len(other))
    return sum(each in other for each in one) if isinstance(one, set) else sum(each in one for each in other)
