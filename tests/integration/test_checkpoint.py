"""Checkpoints of every kind: what training waited, what was written, and that nothing was changed by looking."""

from __future__ import annotations

import hashlib
import importlib
import io
import os
import statistics
import threading
import time
import types
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support import wait_until
from tests.training import Recording, loss_of, mlp, recording
from torchobs import catalog

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NAP_S = 0.15
"""longer than a step lasts, on a busy machine, too"""
BIG = 64 * 1024 // 4
"""float32 elements that make a checkpoint of what is saved to memory"""


class Sleepy:
    """Takes its time to be pickled, and says how long that was."""

    napped_s = 0.0

    def __getstate__(self) -> dict[str, int]:
        begun = time.perf_counter()
        time.sleep(NAP_S)
        self.napped_s = time.perf_counter() - begun
        return {"state": 1}


def train(between: Callable[[int], None], steps: int = 3) -> list[float]:
    """Train, doing something after every step but the last; return how long each but the first took with that, at most."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    begun, most = 0.0, []
    for step in range(1, steps + 1):
        loss_of(model, step).backward()  # type: ignore[no-untyped-call]
        before, begun = begun, time.perf_counter()
        optimizer.step()
        most.append(time.perf_counter() - before)
        if step < steps:
            between(step)
    return most[1:]


def saved(run: Recording) -> dict[str, float]:
    """What the metrics say."""
    values = run.look()
    return {
        "saved": values[("torchobs.checkpoints", "saved")],
        "failed": values[("torchobs.checkpoints", "failed")],
        "duration": values.get(("torchobs.checkpoint.duration",), 0.0),
        "size": values.get(("torchobs.checkpoint.size",), 0.0),
        "timestamp": values.get(("torchobs.checkpoint.timestamp",), 0.0),
    }


def checkpoint_s(run: Recording) -> list[float]:
    """Seconds of the phase checkpoint by step."""
    return [record.phase_s[6] for record in run.steps()]


def alike(recorded: list[float], timed: list[float]) -> bool:
    """Whether the times of most saves are within 5 %: another process may take the processor in between."""
    assert len(recorded) == len(timed)
    return statistics.median(abs(first - second) / second for first, second in zip(recorded, timed, strict=True)) < 0.05


@pytest.mark.serial
def test_a_save_is_timed_and_sized_and_no_part_of_the_step(run: Recording, tmp_path: Path) -> None:
    """At most what the loop waited, at least what a part of that took; the step's own duration is without it; a span each."""
    napped: list[float] = []
    waited: list[float] = []

    def save(step: int) -> None:
        sleepy = Sleepy()
        begun = time.perf_counter()
        torch.save({"model": torch.nn.Parameter(torch.zeros(1000)), "sleepy": sleepy}, tmp_path / f"{step}.pt")
        waited.append(time.perf_counter() - begun)
        napped.append(sleepy.napped_s)

    lasted = train(save)
    assert checkpoint_s(run)[0] == 0.0
    phases, spans = checkpoint_s(run)[1:], run.frames("torchobs.checkpoint")
    lengths = [(span["t1"] - span["t0"]) / 1e9 for span in spans]
    rounding_s = 1e-4
    for least, phase, length, most in zip(napped, phases, lengths, waited, strict=True):
        assert least - rounding_s <= phase <= most + rounding_s
        assert least - rounding_s <= length <= most + rounding_s
    for record, most, nap in zip(run.steps()[1:], lasted, napped, strict=True):
        assert record.duration_s <= most - nap + rounding_s
    metrics = saved(run)
    assert (metrics["saved"], metrics["failed"]) == (2, 0)
    assert napped[-1] - rounding_s <= metrics["duration"] <= waited[-1] + rounding_s
    assert metrics["size"] == (tmp_path / "2.pt").stat().st_size
    assert metrics["timestamp"] == pytest.approx(time.time(), abs=60)
    assert [span["attrs"]["step"] for span in spans] == [1, 2]


def test_the_bytes_are_those_of_a_save_without_torchobs(flight_dir: Path, tmp_path: Path) -> None:
    """Same hash, to a path, to a file, to memory, old format and new."""
    state = {"model": mlp().state_dict(), "step": 7}

    def hashes() -> list[str]:
        path, buffer = tmp_path / "model.pt", io.BytesIO()
        contents = []
        for options in ({}, {"_use_new_zipfile_serialization": False}):
            torch.save(state, path, **options)
            contents.append(path.read_bytes())
            with path.open("wb") as file:
                torch.save(state, file, **options)
            contents.append(path.read_bytes())
        torch.save(state, buffer)
        return [hashlib.sha256(content).hexdigest() for content in (*contents, buffer.getvalue())]

    before = hashes()
    for run in recording(flight_dir):
        assert hashes() == before
        train(lambda _: None, steps=1)
        assert hashes() == before
        assert saved(run)["saved"] == 1
    assert hashes() == before


def test_what_is_saved_between_two_steps_is_one_checkpoint(run: Recording, tmp_path: Path) -> None:
    """Model, optimizer and random states are files of one checkpoint: sizes and times add up; also as safetensors."""
    safetensors = pytest.importorskip("safetensors.torch")

    def save(step: int) -> None:
        for name in ("model", "optimizer", "rng"):
            torch.save({name: torch.nn.Parameter(torch.zeros(step * 1000))}, tmp_path / name)
        safetensors.save_file(
            {"weight": torch.nn.Parameter(torch.zeros(step * 1000))}, tmp_path / "safe"
        )  # as Transformers does

    train(save)
    metrics = saved(run)
    assert metrics["saved"] == 2
    assert metrics["size"] == sum((tmp_path / name).stat().st_size for name in ("model", "optimizer", "rng", "safe"))
    assert "safetensors" in str([span["attrs"]["format"] for span in run.frames("torchobs.checkpoint")])


@pytest.mark.parametrize(("elements", "checkpoints"), [(BIG, 1), (BIG // 2, 0)])
def test_what_is_saved_to_memory_is_a_checkpoint_if_it_is_large(run: Recording, elements: int, checkpoints: int) -> None:
    """From 64 KiB on; a random state, or an object on its way to another rank, is none. Its time is the step's."""
    buffer = io.BytesIO()
    buffer.write(b"before")

    def save(step: int) -> None:
        if step == 1:
            torch.save([torch.nn.Parameter(torch.zeros(elements)), Sleepy()], buffer)

    train(save)
    assert saved(run)["saved"] == checkpoints
    assert saved(run)["size"] == (len(buffer.getvalue()) - 6) * checkpoints
    assert (checkpoint_s(run)[1] > NAP_S) == bool(checkpoints)


def test_a_save_in_another_thread_is_a_checkpoint_but_not_the_loop_s_time(run: Recording, tmp_path: Path) -> None:
    """An asynchronous save of the script's own making."""

    def save(step: int) -> None:
        state = {"model": torch.nn.Parameter(torch.zeros(step)), "sleepy": Sleepy()}
        thread = threading.Thread(target=torch.save, args=(state, tmp_path / f"{step}.pt"))
        thread.start()
        thread.join()

    train(save)
    assert saved(run)["saved"] == 2
    assert checkpoint_s(run) == [0.0, 0.0, 0.0]


def test_a_failed_save_raises_as_ever_and_is_an_event(run: Recording, tmp_path: Path) -> None:
    """The script gets its own exception; the failure is counted, its class on record, and the step goes on.

    The event has the last good checkpoint, what another one takes, and what the target's file system has left.
    """

    def save(step: int) -> None:
        if step == 1:
            torch.save(mlp().state_dict(), tmp_path / "model.pt")
            return
        with pytest.raises(RuntimeError, match="does not exist"):
            torch.save(mlp().state_dict(), tmp_path / "no such folder" / "model.pt")

    train(save)
    metrics = saved(run)
    assert (metrics["saved"], metrics["failed"]) == (1, 1)
    (attributes,) = run.attributes("torchobs.checkpoint.failed")
    assert attributes["exception.type"] == "builtins.RuntimeError"
    assert str(tmp_path) not in str(attributes)
    assert (attributes["saved_step"], attributes["needed"]) == (1, (tmp_path / "model.pt").stat().st_size)
    assert "free" not in attributes  # of a folder that is not there
    assert run.frames("torchobs.checkpoint")[-1]["status"] == "error"
    (tmp_path / "taken").mkdir()
    with suppress(RuntimeError):
        torch.save(mlp().state_dict(), tmp_path / "taken")
    there = os.statvfs(tmp_path)
    assert run.attributes("torchobs.checkpoint.failed")[-1]["free"] == pytest.approx(there.f_bavail * there.f_frsize, rel=0.5)


def test_a_save_that_succeeds_ends_a_streak_of_failures(run: Recording, tmp_path: Path) -> None:
    """Promise: whoever looks later sees whether checkpoints can be saved now, also by a retry before the first step."""
    streak = catalog.CHECKPOINT_FAILURE_STREAK.name

    def save(name: str) -> float:
        with suppress(RuntimeError):
            torch.save(mlp().state_dict(), tmp_path / name / "model.pt")
        return float(run.look()[(streak,)])

    (tmp_path / "there").mkdir()
    assert [save(name) for name in ("gone", "gone", "there")] == [1, 2, 0]
    train(lambda _: None, steps=2)
    assert [save(name) for name in ("gone", "there", "there")] == [1, 0, 0]


@pytest.mark.serial
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_distributed_checkpoint_is_one(run: Recording, tmp_path: Path, *, asynchronous: bool) -> None:
    """Its shards are saved by ``torch.save`` in other threads; the size is this rank's, the bytes are what they were.

    Where it is asynchronous the loop waits while it is copied; the checkpoint lasts until it is written, and counts then.
    """
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")  # its stubs hide what everybody calls
    waited = []

    def save(step: int) -> None:
        state = {"model": torch.ones(200_000), "step": step}
        begun = time.perf_counter()
        result = (dcp.async_save if asynchronous else dcp.save)(state, checkpoint_id=tmp_path / str(step))
        waited.append(time.perf_counter() - begun)
        assert asynchronous or result.state_dict_metadata.keys() == {"model", "step"}
        if asynchronous:
            result.result()

    train(save, steps=6)
    # who waits for a future goes on before the future's callbacks have run, which are in torch's thread
    wait_until(lambda: len(run.frames("torchobs.checkpoint")) == 5)
    assert alike(checkpoint_s(run)[1:], waited)
    metrics = saved(run)
    assert (metrics["saved"], metrics["size"]) == (5, sum(path.stat().st_size for path in (tmp_path / "5").glob("*.distcp")))
    if asynchronous:
        spans = run.frames("torchobs.checkpoint")
        assert alike([span["attrs"]["blocked_s"] for span in spans], waited)
        assert all((span["t1"] - span["t0"]) / 1e9 >= span["attrs"]["blocked_s"] for span in spans)
    loaded = {"model": torch.zeros(200_000), "step": 0}
    dcp.load(loaded, checkpoint_id=tmp_path / "5")
    assert loaded["step"] == 5
    assert float(torch.as_tensor(loaded["model"]).sum()) == 200_000


def states(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What trainers save of a model that they train."""
    state = model.state_dict()
    return {
        "state_dict": state,
        "optimizer": optimizer.state_dict(),
        "whole model": model,
        "in a dictionary": {"epoch": 1, "net": dict(state)},
        "weights in a list": [parameter.detach() for parameter in model.parameters()],
        "copies of other precision": {name: value.half() for name, value in state.items()},
        "NumPy's": {name: value.numpy() for name, value in state.items()},
        "an object's": types.SimpleNamespace(best=state, score=1.0),
    }


CACHES: dict[str, Any] = {
    "tensors": {"images": torch.zeros(100, 3, 32), "labels": torch.zeros(100)},
    "a list": [(torch.zeros(3, 32), index) for index in range(10)],
    "a tensor": torch.zeros(100, 7),
    "transitions": [{"state": torch.zeros(100, 7), "action": torch.zeros(100)}],
    "a table": {"losses": [1.0, 0.5], "config": {"model": "resnet", "lr": 0.1}},
}


def test_state_of_a_model_or_an_optimizer_is_a_checkpoint(run: Recording, tmp_path: Path) -> None:
    """However it is arranged. The first one after a step is counted: each has its own."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    expected = 0.0
    for step in range(20):
        loss_of(model, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        kinds = states(model, optimizer)
        if 0 < step <= len(kinds):
            kind = list(kinds)[step - 1]
            torch.save(kinds[kind], tmp_path / "state.pt")
            expected += 1
            assert saved(run)["saved"] == expected, kind


def test_a_cache_of_data_is_no_checkpoint(run: Recording, tmp_path: Path) -> None:
    """Before training or amid it: a run that saves nothing else has saved nothing that it could go on from."""

    def save(step: int) -> None:
        for kind, cache in CACHES.items():
            torch.save(cache, tmp_path / f"{kind}-{step}.pt")

    save(0)
    train(save)
    assert saved(run)["saved"] == 0
    torch.load(tmp_path / "a list-0.pt")
    assert run.frames("torchobs.checkpoint") == []
    assert checkpoint_s(run) == [0.0, 0.0, 0.0]
    assert run.session.context is not None
    assert not run.session.context.breakers["checkpoint"].is_open


def _wrapped(state: dict[str, Any]) -> dict[str, Any]:
    return {f"module.{name}": value for name, value in state.items()}


LOADS: dict[str, tuple[Callable[..., object], list[tuple[object, ...]]]] = {
    "all": (lambda model, optimizer, of: (model.load_state_dict(of[0]), optimizer.load_state_dict(of[1])), []),
    "no optimizer": (lambda model, _, of: model.load_state_dict(of[0]), [("optimizer", None, 4)]),
    "a prefix": (lambda model, _, of: model.load_state_dict(_wrapped(of[0]), strict=False), [("keys", 0, None)]),
    "a part of a larger one": (lambda model, _, of: model.load_state_dict(_wrapped(of[0]) | of[0], strict=False),
                               [("optimizer", None, 4)]),
    "a teacher": (lambda *arguments: mlp().load_state_dict(arguments[2][0]), []),
    "read only": (lambda *_: None, []),
}  # fmt: skip


@pytest.mark.parametrize("how", LOADS)
def test_what_is_left_of_a_checkpoint_is_told_at_once(flight_dir: Path, tmp_path: Path, how: str, caplog: Any) -> None:
    """Keys that fit nowhere, at the call; and an optimizer's state that stays in the file, at the first step."""

    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = mlp()
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss_of(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    before, (loads, said) = made(), LOADS[how]
    step(*before)
    torch.save({"states": [part.state_dict() for part in before]}, tmp_path / "last.pt")
    for run in recording(flight_dir):
        now = made()
        loads(*now, torch.load(tmp_path / "last.pt")["states"])
        step(*now)
        step(*now)
        events = run.attributes(catalog.EVENT_CHECKPOINT_UNUSED.name)
        assert [(event["kind"], event.get("matched"), event.get("parameters")) for event in events] == said
    assert len([line for line in caplog.messages if "checkpoint" in line]) == len(said)
