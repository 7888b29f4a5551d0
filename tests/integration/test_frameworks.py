"""Code that knows nothing of torchobs: run once plain and once under `torchobs run`; and what the integrations add."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.fork_server import Python
from tests.support import ROOT, clean_environment, free_port
from torchobs.flight.format.step_record import RecordKind, StepRecord
from torchobs.flight.reader import reader

if TYPE_CHECKING:
    from pathlib import Path

SCRIPTS = ROOT / "tests" / "scripts"
RUN = ("-m", "torchobs", "run", "--no-exporter")
DATA, FORWARD, BACKWARD, OPTIMIZER, OTHER, EVALUATION, CHECKPOINT = range(7)


@dataclass(frozen=True)
class Seen:
    """What a rank's flight file tells after its end."""

    resource: dict[str, Any]
    values: dict[tuple[str, ...], Any]
    steps: list[StepRecord]
    events: list[dict[str, Any]]

    def event(self, name: str) -> dict[str, Any]:
        """The attributes of the one event of that name."""
        (found,) = (event["attrs"] for event in self.events if event["name"] == name)
        return dict(found)

    def spans(self, phase: str) -> int:
        """How many spans of that phase there are."""
        return sum(event["name"] == "torchobs.phase" and event["attrs"]["phase"] == phase for event in self.events)


def seen(flight_dir: Path) -> list[Seen]:
    """One for each rank."""
    found = []
    for path in flight_dir.glob("*.flight"):
        file = reader.open_path(str(path))
        view = file.read(final=True)
        values = {
            (point.series.name, *(str(value) for _, value in point.series.attributes)): point.value for point in view.points
        }
        steps = [record for record in file.steps() if record.kind == RecordKind.STEP]
        found.append(Seen(dict(file.header.resource), values, steps, [fields for _, fields in file.events()]))
        file.close()
    return sorted(found, key=lambda one: int(one.resource["rank"]))


def start(*arguments: str, flight_dir: Path, **environ: str) -> subprocess.Popen[str]:
    """Python with these arguments, its threads and the measured steps fixed."""
    fixed = {"OMP_NUM_THREADS": "1", "TORCHOBS_GRAD_INTERVAL": "1", "TORCHOBS_DIR": str(flight_dir), "PYTHONPATH": str(ROOT)}
    return Python(
        [sys.executable, *arguments], env=clean_environment() | fixed | environ,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def reports(*children: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """What they print, one after the other; they have to end well."""
    lines = []
    for child in children:
        out, err = child.communicate(timeout=240)
        assert child.returncode == 0, err
        lines += [json.loads(line) for line in out.splitlines() if line.startswith('{"name"')]
    return lines


def script(name: str) -> str:
    """Its path."""
    return str(SCRIPTS / f"{name}.py")


def test_unusual_loops_are_left_alone_and_counted(flight_dir: Path) -> None:
    """LBFGS with a closure, a GAN, a frozen base with low-rank updates, both kinds of recomputation, double backward.

    To the last bit the same weights as without torchobs, and each step is one: with its number of backward passes, and, where
    the step has one forward pass, with its loss.
    """
    names = ("lbfgs", "gan", "low_rank", "recomputed", "gradient_penalty")
    plain = start(script("loops"), *names, flight_dir=flight_dir)
    observed = start(*RUN, script("loops"), *names, flight_dir=flight_dir)
    expected, found = reports(plain), reports(observed)
    assert found == expected
    assert [line["name"] for line in expected] == list(names)
    (rank,) = seen(flight_dir)
    counts = [line["steps"] for line in expected]
    passes = (expected[0]["evaluations"] // counts[0], 2, 1, 1, 1)
    assert [step.losses for step in rank.steps] == [
        each for each, count in zip(passes, counts, strict=True) for _ in range(count)
    ]
    assert rank.values["torchobs.steps",] == sum(counts)
    for line, last in zip(expected[2:], (sum(counts[:3]), sum(counts[:4]), sum(counts)), strict=True):
        assert rank.steps[last - 1].loss == float.fromhex(line["loss"])
    assert all(math.isfinite(step.grad_norm) and step.grad_norm > 0 for step in rank.steps)


def test_accumulation_under_no_sync_is_left_alone_and_counted(flight_dir: Path) -> None:
    """Two DDP ranks over gloo: the same weights as without torchobs, a step per optimizer step, the passes' losses summed."""

    def ranks(*how: str) -> list[dict[str, Any]]:
        world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return reports(*(
            start(*how, script("accumulate"), flight_dir=flight_dir, RANK=rank, LOCAL_RANK=rank, **world) for rank in "01"
        ))  # fmt: skip

    expected = ranks()
    assert ranks(*RUN) == expected
    found = seen(flight_dir)
    assert [rank.resource["rank"] for rank in found] == [0, 1]
    for rank, line in zip(found, expected, strict=True):
        assert [step.losses for step in rank.steps] == [3] * line["steps"]
    norms = [[step.grad_norm for step in rank.steps] for rank in found]
    assert norms[0] == pytest.approx(norms[1])


def both(name: str, flight_dir: Path, tmp_path: Path) -> tuple[Seen, Seen, dict[str, Any]]:
    """Run a framework's script plain, under `torchobs run` and with the integration; all train the same to the last bit."""
    without, with_it = flight_dir / "without", tmp_path / "with"
    for folder in (without, with_it):
        folder.mkdir()
    observed = start(*RUN, script(name), "plain", flight_dir=without)
    plain, integrated = reports(start(script(name), "plain", "integration", flight_dir=with_it))
    assert reports(observed) == [plain]
    assert integrated == plain
    (automatic,), (told,) = seen(without), seen(with_it)
    return automatic, told, plain


def signals(rank: Seen, expected: dict[str, Any], evaluations: list[int]) -> None:
    """What every framework's run shows without being told: `evaluations` are the steps after which there was one."""
    assert rank.values["torchobs.steps",] == len(rank.steps) == expected["steps"]
    assert {step.losses for step in rank.steps} == {2}
    assert all(step.grad_norm > 0 and step.learning_rate > 0 for step in rank.steps)
    assert all(min(step.phase_s[FORWARD : OPTIMIZER + 1]) > 0 for step in rank.steps)
    assert all(step.duration_s == pytest.approx(sum(step.phase_s[:5]), abs=1e-5) for step in rank.steps)
    found = [step.step - 1 for step in rank.steps if step.phase_s[EVALUATION] > 0]
    assert found == [step for step in evaluations if step < expected["steps"]]
    assert rank.values["torchobs.goodput.time", "evaluation"] > 0


def test_lightning(flight_dir: Path, tmp_path: Path) -> None:
    """Its Trainer: the signals without a word; with the callback also epochs, steps to come, metrics, samples, evaluation."""
    automatic, told, expected = both("with_lightning", flight_dir, tmp_path)
    for rank in (automatic, told):
        signals(rank, expected, evaluations=[0, 2, 4, 6, 8, 10, 12])
    assert told.values["torchobs.steps.planned",] == 12
    assert told.values["torchobs.steps.resumed_from",] == 0
    assert told.values["torchobs.samples",] == 2 * 12 * 4
    assert told.values["torchobs.scalar", "val_loss"] == expected["metrics"]["val_loss"]
    assert told.values["torchobs.scalar", "train_loss"] == expected["metrics"]["train_loss"]
    assert told.values["torchobs.scalar", "epoch"] == 2
    assert told.event("torchobs.trainer")["framework"] == "lightning"
    assert told.event("torchobs.model") == {"name": "Characters", "parameters": 14528, "trainable": 14528}
    assert ("torchobs.steps.planned",) not in automatic.values


def test_lightning_s_own_ranks(flight_dir: Path) -> None:
    """Lightning starts the other ranks by repeating the command; the callback makes each of them a rank of one run."""
    lines = reports(start(script("with_lightning"), "ranks", flight_dir=flight_dir))
    assert sorted(line["rank"] for line in lines) == [0, 1]
    found = seen(flight_dir)
    assert [(rank.resource["rank"], rank.resource["world_size"]) for rank in found] == [(0, 2), (1, 2)]
    assert len({rank.resource["run_id"] for rank in found}) == 1
    assert [len(rank.steps) for rank in found] == [6, 6]
    assert [rank.values["torchobs.samples",] for rank in found] == [48, 48]


def test_transformers(flight_dir: Path, tmp_path: Path) -> None:
    """Its Trainer: losses and norms are those it logs; with the callback also epochs, metrics, tokens, checkpoints."""
    automatic, told, expected = both("with_transformers", flight_dir, tmp_path)
    for rank in (automatic, told):
        signals(rank, expected, evaluations=[2, 4, 6, 8, 10])
        assert [step.loss for step in rank.steps] == pytest.approx(expected["losses"], rel=1e-5)
        assert [step.grad_norm for step in rank.steps] == pytest.approx(expected["norms"], rel=1e-5)
        assert rank.values["torchobs.epochs",] == 2
        assert rank.values["torchobs.samples",] == 2 * 10 * 4  # inferred, where nobody gives them
        assert rank.values["torchobs.tokens",] == expected["tokens"]
        assert [step for step in rank.steps if not step.phase_s[DATA] > 0] == []  # that of the step after an evaluation, too
    assert [step.step - 1 for step in told.steps if step.phase_s[CHECKPOINT] > 0] == [4, 8]
    assert told.values["torchobs.steps.planned",] == 10
    assert told.values["torchobs.steps.resumed_from",] == 0
    assert [step.tokens for step in told.steps] == [128] * 10
    assert told.values["torchobs.scalar", "eval_loss"] == expected["eval_loss"]
    assert told.values["torchobs.scalar", "epoch"] == 2
    trainer = told.event("torchobs.trainer")
    assert (trainer["framework"], trainer["run_name"], trainer["max_grad_norm"]) == ("transformers", "small", 0.5)
    assert not {"output_dir", "hub_token"} & trainer.keys()


def test_accelerate(flight_dir: Path, tmp_path: Path) -> None:
    """A loop of its own; with the tracker also what the loop gives to `accelerator.log`, and the steps to come."""
    automatic, told, expected = both("with_accelerate", flight_dir, tmp_path)
    for rank in (automatic, told):
        signals(rank, expected, evaluations=[4, 8])
        assert rank.steps[-1].losses == 2
    scalars = {name[1]: value for name, value in told.values.items() if name[0] == "torchobs.scalar"}
    assert scalars == {"validation_loss": expected["validation_loss"], "epoch": 1}
    assert told.values["torchobs.steps.planned",] == 8
    trainer = told.event("torchobs.trainer")
    assert (trainer["learning_rate"], trainer["max_train_steps"]) == (0.01, 8)
    assert "data" not in trainer
