"""What is inferred of a batch: its samples and tokens, by shapes and types alone."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import default_collate

from torchobs.probes.step_recorder import MOST_LOADERS, uncounted, with_sizes
from torchobs.tensors.batches import batch_sizes

IDS = torch.zeros(4, 16, dtype=torch.int64)
MASK = torch.ones(4, 16, dtype=torch.int64)
IMAGES, LABELS = torch.zeros(8, 3, 5, 5), torch.zeros(8, dtype=torch.int64)
Pair = namedtuple("Pair", "x y")  # noqa: PYI024  # what default_collate keeps as it is


@dataclass
class Sentences:
    """A batch of a class of its own."""

    tokens: torch.Tensor
    length: int


BATCHES: dict[str, tuple[object, int, int]] = {
    "tensor": (torch.zeros(8, 3), 8, 0),
    "scalar": (torch.zeros(()), 0, 0),
    "image and label": ([IMAGES, LABELS], 8, 0),
    "nested collation": (default_collate([((torch.zeros(3), torch.zeros(2)), 1), ((torch.zeros(3), torch.zeros(2)), 0)]), 2, 0),
    "dictionary": ({"image": IMAGES, "label": LABELS, "path": ["a"] * 8, "epoch": 3}, 8, 0),
    "text model": ({"input_ids": IDS, "attention_mask": MASK, "labels": IDS}, 4, 64),
    "encoding": (UserDict(input_ids=IDS, attention_mask=MASK), 4, 64),
    "encoder and decoder": ({"input_ids": IDS, "decoder_input_ids": torch.zeros(4, 9, dtype=torch.int64)}, 4, 64),
    "text and image": ({"pixel_values": torch.zeros(4, 3, 5, 5), "input_ids": IDS.int()}, 4, 64),
    "multiple choice": ({"input_ids": torch.zeros(2, 4, 8, dtype=torch.int64), "labels": torch.zeros(2)}, 2, 64),
    "dataclass": (Sentences(IDS, 16), 4, 64),
    "inputs and targets": ([IDS, IDS], 4, 64),
    "ids and a class": ([IDS, torch.zeros(4, dtype=torch.int64)], 4, 64),
    "image and several labels": ([IMAGES, torch.zeros(8, 20, dtype=torch.int64)], 8, 0),
    "categories and numbers": ([torch.zeros(8, 26, dtype=torch.int64), torch.zeros(8, 13), torch.zeros(8)], 8, 0),
    "labels of several classes by name": ({"x": torch.zeros(8), "label": torch.zeros(8, 20, dtype=torch.int64)}, 8, 0),
    "source and target of two lengths": ([IDS, torch.zeros(4, 9, dtype=torch.int64)], 4, 0),
    "bytes": (torch.zeros(4, 16, dtype=torch.uint8), 4, 0),
    "a causal mask beside it": ([torch.zeros(8, 5), torch.zeros(8, 5), torch.zeros(5, 5)], 8, 0),
    "detection, targets as dictionaries": (
        (tuple(torch.zeros(3, 9, 9) for _ in range(5)), tuple({"boxes": torch.zeros(n, 4)} for n in range(5))), 5, 0,
    ),
    "list of samples": ([(torch.zeros(3, 9, 9), 1)] * 6, 6, 0),
    "list of dictionaries": ([{"image": torch.zeros(3, 9, n), "label": torch.tensor(1)} for n in range(6)], 6, 0),
    "packed": (pack_sequence([torch.zeros(5, 2), torch.zeros(3, 2)]), 2, 0),
    "ragged": (torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)], layout=torch.jagged), 2, 0),
    "numbers": (list(range(1_000_000)), 0, 0),
    "text": ("abc", 0, 0),
    "too deep": ([[[[[torch.zeros(8)]]]]], 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHES)
def test_sizes_are_those_of_the_batch(name: str) -> None:
    """Samples: the dimension that the tensors share, or the number of those that were not stacked; tokens: only of ids."""
    batch, samples, tokens = BATCHES[name]
    assert batch_sizes(batch) == (tokens, samples)


def test_what_a_script_gives_first_is_counted_once() -> None:
    """A step's amount replaces that of this step, an amount of many steps all that were inferred; nothing is taken back."""
    assert uncounted(32, 0, 0, ended=False) == 32  # in the first step
    assert uncounted(32, 32, 1, ended=True) == 0  # after it
    assert uncounted(30, 32, 1, ended=True) == 0  # without padding
    assert uncounted(40, 32, 1, ended=True) == 8
    assert uncounted(32, 32 * 9, 9, ended=False) == 32  # in the tenth step alone
    assert uncounted(320, 32 * 9, 9, ended=False) == 32  # at the tenth step, for all ten
    assert uncounted(320, 32 * 10, 10, ended=True) == 0
    assert uncounted(300, 32 * 10, 10, ended=True) == 0


def test_sizes_are_kept_of_the_last_loaders_only() -> None:
    """A loop that makes a loader for every epoch keeps no more; a loader without sizes is left out."""
    known: dict[int, tuple[int, int]] = {}
    for loader in range(3 * MOST_LOADERS):
        known = with_sizes(known, loader, (loader, 1))
    assert list(known) == list(range(2 * MOST_LOADERS, 3 * MOST_LOADERS))
    assert with_sizes({1: (2, 3)}, 1, (0, 0)) == {}
