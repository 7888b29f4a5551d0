"""Samples, tokens and FLOPs of trainings: inferred for each batch until a script gives them, and their share of a peak."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import torchobs
from tests.training import Recording, StepFlag, has, mlp, recording
from torchobs.flight.throughput import pace
from torchobs.probes.flops import FlopsProbe

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


FEATURES, VOCABULARY, LENGTH = 8, 11, 6


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Token ids with an attention mask, as a tokenizer gives them."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.full((LENGTH,), index % VOCABULARY)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class Stream(IterableDataset[torch.Tensor]):
    """Without a length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.ones(12, FEATURES)


def pairs(number: int = 12) -> TensorDataset:
    """Inputs and targets."""
    return TensorDataset(torch.ones(number, FEATURES), torch.zeros(number, 1))


class Training:
    """A model of its own for each, and a step for any batch."""

    def __init__(self, *, text: bool = False) -> None:
        self.model: torch.nn.Module = mlp()
        if text:
            self.model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, FEATURES), torch.nn.Linear(FEATURES, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def backward(self, batch: Any) -> None:
        inputs = batch["input_ids"] if isinstance(batch, dict) else batch[0] if isinstance(batch, list) else batch
        self.model(inputs).square().mean().backward()

    def step(self, batch: Any) -> None:
        self.backward(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()


def counted(run: Recording) -> tuple[list[int], list[int]]:
    """Tokens and samples of each step; those of late records (``log`` after the step) are added to it."""
    tokens, samples = dict[int, int](), dict[int, int]()
    for record in run.records():
        tokens[record.step] = tokens.get(record.step, 0) + record.tokens
        samples[record.step] = samples.get(record.step, 0) + record.samples
    return list(tokens.values()), list(samples.values())


@pytest.mark.parametrize(
    ("dataset", "tokens", "samples"),
    [(torch.ones(12, FEATURES), 0, 4), (pairs(), 0, 4), (Texts(), 4 * LENGTH, 4), (Stream(), 0, 4)],
    ids=["tensor", "tuple", "dictionary", "stream"],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_every_batch_counts(run: Recording, dataset: Any, tokens: int, samples: int, workers: int) -> None:
    """From the first step on, whatever the loader gives; the rates that the page shows are there."""
    training = Training(text=tokens > 0)
    for _ in range(2):
        for batch in DataLoader(dataset, batch_size=4, num_workers=workers):
            training.step(batch)
    assert counted(run) == ([tokens] * 6, [samples] * 6)
    values = run.look()
    assert (values["torchobs.tokens",], values["torchobs.samples",]) == (6 * tokens, 6 * samples)
    speed = pace(run.records())
    assert speed is not None
    assert (speed.samples_per_s or 0) > 0
    assert (speed.tokens_per_s is None) == (tokens == 0)


def test_accumulated_batches_count_together(run: Recording) -> None:
    """A step of three backward passes has three batches, also if they are fetched ahead."""
    training = Training()
    batches = iter(DataLoader(pairs(48), batch_size=4))
    for _ in range(2):
        for _ in range(3):
            training.backward(next(batches))
        training.optimizer.step()
    for _ in range(2):
        for batch in [next(batches) for _ in range(3)]:
            training.backward(batch)
        training.optimizer.step()
    assert counted(run)[1] == [12] * 4


@pytest.mark.parametrize("how", ["no_grad", "no_grad inside", "eval"])
def test_evaluations_do_not_count(run: Recording, how: str) -> None:
    """Wherever gradients are disabled, or only the mode is set: a batch counts that a backward pass follows."""
    training, loader, held_out = Training(), DataLoader(pairs(), batch_size=4), DataLoader(pairs(40), batch_size=10)
    for _ in range(3):
        training.model.train()
        for batch in loader:
            training.step(batch)
        training.model.eval()
        with torch.set_grad_enabled(how != "no_grad"):
            for batch in held_out:
                with torch.set_grad_enabled(how == "eval"):
                    training.model(batch[0])
    assert counted(run)[1] == [4] * 9


def test_a_batch_in_ten_seconds_is_looked_at(run: Recording) -> None:
    """Batches that grow within an epoch are seen at the sampler's next look, and cost nothing until then."""
    lengths = [2, 2, 5, 5, 5]
    training = Training()
    for number, batch in enumerate(DataLoader([torch.ones(n, FEATURES) for n in lengths], batch_size=None)):  # type: ignore[arg-type]
        training.step(batch)
        if number == 2:
            run.look()
    assert counted(run)[1] == [2, 2, 2, 5, 5]


def test_each_loader_s_batches_have_its_own_size(run: Recording) -> None:
    """Two loaders of one step (labelled and unlabelled) add up; two that take turns do not mix."""
    training = Training()
    first, second = DataLoader(pairs(), batch_size=4), DataLoader(pairs(30), batch_size=10)
    for labelled, unlabelled in zip(first, second, strict=True):
        training.step([torch.cat([labelled[0], unlabelled[0]])])
    turns = iter(first), iter(second)
    for _ in range(3):
        training.step(next(turns[0]))
        training.step(next(turns[1]))
    assert counted(run)[1] == [14] * 3 + [4, 10] * 3


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("first", [0, 3])
def test_what_the_script_gives_counts_instead(run: Recording, first: int, *, after: bool) -> None:
    """From its first call on, before or after the optimizer's step, at the first step or later, and nothing twice."""
    training = Training(text=True)
    for number, batch in enumerate(DataLoader(Texts(), batch_size=2)):
        training.backward(batch)
        if number >= first and not after:
            torchobs.log(tokens=9)
        training.optimizer.step()
        if number >= first and after:
            torchobs.log(tokens=9, loss=torch.tensor(float(number)))
    tokens, samples = counted(run)
    inferred = 2 * LENGTH
    expected = [inferred] * first + [9] * (6 - first)
    if after and first:
        expected[first] = inferred  # it was counted before the script gave less
    assert tokens == expected
    assert samples == [2] * 6  # not given
    assert not after or run.values()["torchobs.loss",] == 5.0


def test_it_can_be_turned_off(flight_dir: Path) -> None:
    """By a setting; then no batch is looked at."""
    for run in recording(flight_dir, infer_throughput=False):
        training = Training()
        iterator = iter(DataLoader(pairs(), batch_size=4))
        assert "_next_data" not in vars(iterator)
        for batch in iterator:
            training.step(batch)
        assert counted(run)[1] == [0] * 3


WORDS, WIDTH, SENTENCE, BATCH = 13, 8, 6, 2
OWN = WORDS * WIDTH + WORDS
"""Parameters of the output layer: the embedding is only looked up"""
FLOPS, MFU = ("torchobs.model.flops",), ("torchobs.mfu",)


def train(steps: int, dtype: torch.dtype | None = None) -> None:
    """A language model, perhaps under autocast."""
    model = torch.nn.Sequential(torch.nn.Embedding(WORDS, WIDTH), torch.nn.Linear(WIDTH, WORDS))
    optimizer = torch.optim.AdamW(model.parameters())
    for (ids,) in DataLoader(TensorDataset(torch.zeros(steps * BATCH, SENTENCE, dtype=torch.int64)), batch_size=BATCH):
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(ids).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    MODELS[:] = [model, optimizer]


MODELS: list[Any] = []
"""Keeps what was trained last: a run's estimate is about models that are there"""


def test_a_language_model_s_operations_are_estimated(run: Recording) -> None:
    """Six for each token and parameter that multiplies; on a CPU there is no peak to compare them with."""
    train(5)
    values = run.look()
    assert values[FLOPS] == 6 * OWN * BATCH * SENTENCE
    assert MFU not in values


def test_without_tokens_there_is_no_estimate(run: Recording) -> None:
    """A model of other inputs has operations only where the script gives them, and what it gives counts before any estimate."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (inputs,) in DataLoader(TensorDataset(torch.ones(8, 8)), batch_size=4):
        model(inputs).sum().backward()
        optimizer.step()
    assert FLOPS not in run.values()
    estimated(run)
    assert FLOPS not in run.values()
    torchobs.log(flops=1e9)
    estimated(run)
    assert run.values()[FLOPS] == 1e9


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312e12),
        ("NVIDIA A100-SXM4-80GB", None, 19.5e12),
        ("Tesla T4", torch.bfloat16, None),
        ("NVIDIA A999", None, None),
    ],
)
def test_the_utilization_is_the_share_of_the_device_s_peak(
    run: Recording, name: str, dtype: torch.dtype | None, peak: float | None
) -> None:
    """By the steps' durations alone, and the type of autocast or of the parameters; absent where that has no peak."""
    train(6, dtype)
    estimated(run, name)  # as if the CPU were one
    values = run.values()
    assert (MFU in values) == (peak is not None)
    if peak is not None:
        mean_s = fmean(step.duration_s for step in run.steps() if not has(step, StepFlag.UNTIMED))
        assert values[MFU] == pytest.approx(6 * OWN * BATCH * SENTENCE / mean_s / peak, rel=1e-6)


def estimated(run: Recording, device: str | None = None) -> FlopsProbe:
    """Another probe, which has estimated the operations so far, perhaps for a device."""
    context = run.context
    probe = FlopsProbe() if device is None else FlopsProbe(lambda _: device)
    probe.install(context)
    run.look()
    probe.observe()
    context.writer.publish()
    return probe
