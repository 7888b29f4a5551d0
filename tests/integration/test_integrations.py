"""The integrations: their own logic, the real frameworks, and OpenTelemetry's command."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import torchobs
from tests import flights, support
from tests.fork_server import Python
from tests.support import ROOT, clean_environment
from tests.training import Recording
from torchobs.flight import reader
from torchobs.flight.step_record import RecordKind, StepRecord
from torchobs.integrations.hooks import Hooks, record_trainer, samples_in, scalars, tokens_in
from torchobs.support.command_line import starts_others

EXTRAS = ("lightning", "transformers", "accelerate", "instrumentor")


BATCHES: tuple[tuple[object, int, int], ...] = (
    (torch.zeros(4, 3), 4, 0),
    ([torch.zeros(4, 3), torch.zeros(4)], 4, 0),
    (UserDict(input_ids=torch.zeros(2, 8), labels=torch.zeros(2, 8)), 2, 16),
    ({"text": ["a", "b"], "image": {"pixels": torch.zeros(5, 3, 2, 2)}}, 5, 0),
    (("a", 3, torch.zeros(()), torch.zeros(6)), 6, 0),
    (list(range(1_000_000)), 0, 0),
    ({"input_ids": [1, 2, 3]}, 0, 0),
    (None, 0, 0),
)


def test_samples_and_tokens_are_found_in_whatever_a_loader_gives() -> None:
    """The first tensor's first dimension; the elements of `input_ids`; 0 where there is neither."""
    counts = [(samples_in(batch), tokens_in(batch)) for batch, _, _ in BATCHES]
    assert counts == [(samples, tokens) for _, samples, tokens in BATCHES]


def test_only_numbers_become_scalars_and_none_of_them_the_step_s_own() -> None:
    """A logged `loss` is an average over steps: it must not replace what each step's backward passes began from."""
    values = {"loss": 1.0, "tokens": 5, "total_steps": 2, "val/loss": torch.tensor(0.5), "acc": 0.25, "note": "x", "z": 1j}
    assert scalars(values) == {"val/loss": torch.tensor(0.5), "acc": 0.25}
    assert scalars({"acc": 1, "grad_norm": 2.0, "confusion": torch.zeros(2, 2)}, frozenset({"grad_norm"})) == {"acc": 1}


def test_settings_that_could_hold_a_secret_or_a_path_are_left_out(run: Recording) -> None:
    """Numbers, yes or no, and single words go on record, at most 32 of them."""
    kept = {"lr": 0.1, "bf16": True, "optim": "adamw_torch", "precision": "16-mixed"}
    secret = {"output_dir": "/home/someone/run", "prompt": "two words", "hub_token": "hf_" + 64 * "x", "nested": {"a": 1}}
    record_trainer("ours", "1.0", {**kept, **secret, "none": None})
    record_trainer("ours", "1.0", {f"setting{number}": number for number in range(100)})
    first, second = run.attributes("torchobs.trainer")
    assert first == {**kept, "framework": "ours", "version": "1.0"}
    assert len(second) == 34


def test_a_hook_that_fails_is_told_once_and_goes_no_further(run: Recording, caplog: pytest.LogCaptureFixture) -> None:
    """The training goes on; later hooks do nothing; one warning and one event say so."""
    hooks, calls = Hooks("ours"), []

    def fail() -> None:
        calls.append(1)
        raise ZeroDivisionError

    with caplog.at_level(logging.WARNING, "torchobs"):
        for _ in range(3):
            hooks.call(fail)
    assert calls == [1]
    (message,) = [record.getMessage() for record in caplog.records]
    assert "the ours integration failed with ZeroDivisionError" in message
    (event,) = run.attributes("torchobs.probe.disabled")
    assert (event["probe"], event["exception.type"]) == ("ours", "ZeroDivisionError")


def test_a_missing_framework_is_one_clear_line() -> None:
    """The last line of the traceback, and the only one that is not a place in the code, names the command that helps."""
    hide = "import sys; sys.modules.update(dict.fromkeys(('lightning', 'pytorch_lightning', 'transformers', 'accelerate')))"
    code = f"""{hide}; sys.modules['opentelemetry.instrumentation'] = None
import importlib, traceback
for extra in {EXTRAS}:
    try:
        importlib.import_module("torchobs.integrations." + extra)
    except ModuleNotFoundError:
        traceback.print_exc()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said = [line for line in done.stderr.splitlines() if line.startswith("ModuleNotFoundError")]
    assert said == [f"ModuleNotFoundError: the {extra} integration needs: pip install 'torchobs[{extra}]'" for extra in EXTRAS]
    assert "During handling" not in done.stderr


def test_what_fails_in_one_public_function_leaves_the_others(flight_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each has its own fuse; its failure is counted, and reported once."""
    with caplog.at_level(logging.WARNING, "torchobs"), torchobs.init(flight_dir=flight_dir) as session:
        torchobs.watch(object())
        torchobs.log(accuracy=0.5)
        recording = Recording(session)
        assert recording.errors()[0].startswith("watch: ")
        support.wait_until(lambda: recording.values().get(("torchobs.scalar", "accuracy")) == 0.5)
    support.wait_until(lambda: "probe 'watch' failed with AttributeError" in caplog.text)


SCRIPTS = ROOT / "tests" / "scripts"
RUN = ("-m", "torchobs", "run", "--no-exporter")
DATA, FORWARD, BACKWARD, OPTIMIZER, OTHER, EVALUATION, CHECKPOINT = range(7)


@dataclass(frozen=True)
class Seen:
    """What a rank's flight file holds after its end."""

    resource: dict[str, Any]
    values: dict[tuple[str, ...], Any]
    steps: list[StepRecord]
    events: list[dict[str, Any]]

    def event(self, name: str) -> dict[str, Any]:
        """The attributes of the one event of that name."""
        (match,) = (event["attrs"] for event in self.events if event["name"] == name)
        return dict(match)


def seen(flight_dir: Path) -> list[Seen]:
    """One for each rank."""
    ranks = []
    for path in flight_dir.glob("*.flight"):
        file = reader.open_path(str(path))
        view = file.read(final=True)
        values = {
            (point.series.name, *(str(value) for _, value in point.series.attributes)): point.value for point in view.points
        }
        steps = [record for record in file.steps() if record.kind == RecordKind.STEP]
        ranks.append(Seen(dict(file.header.resource), values, steps, flights.frames(file)))
        file.close()
    return sorted(ranks, key=lambda rank: int(rank.resource["rank"]))


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


def both(name: str, flight_dir: Path, tmp_path: Path) -> tuple[Seen, Seen, dict[str, Any]]:
    """Run a framework's script plain, under `torchobs run` and with the integration; all train the same to the last bit."""
    without, with_it = flight_dir / "without", tmp_path / "with"
    for folder in (without, with_it):
        folder.mkdir()
    observed = start(*RUN, script(name), "plain", flight_dir=without)
    plain, integrated = reports(start(script(name), "plain", "integration", flight_dir=with_it))
    assert reports(observed) == [plain]
    assert integrated == plain
    (automatic,), (integrated_rank,) = seen(without), seen(with_it)
    return automatic, integrated_rank, plain


def signals(rank: Seen, expected: dict[str, Any], evaluations: list[int]) -> None:
    """What every framework's run shows by itself: `evaluations` are the steps before an evaluation."""
    assert rank.values["torchobs.steps",] == len(rank.steps) == expected["steps"]
    assert {step.losses for step in rank.steps} == {2}
    assert all(step.grad_norm > 0 and step.learning_rate > 0 for step in rank.steps)
    assert all(min(step.phase_s[FORWARD : OPTIMIZER + 1]) > 0 for step in rank.steps)
    assert all(step.duration_s == pytest.approx(sum(step.phase_s[:5]), abs=1e-5) for step in rank.steps)
    evaluated = [step.step - 1 for step in rank.steps if step.phase_s[EVALUATION] > 0]
    assert evaluated == [step for step in evaluations if step < expected["steps"]]
    assert rank.values["torchobs.goodput.time", "evaluation"] > 0


def test_lightning(flight_dir: Path, tmp_path: Path) -> None:
    """Its Trainer: the signals without a word; with the callback also epochs, steps to come, metrics, samples, evaluation."""
    automatic, informed, expected = both("with_lightning", flight_dir, tmp_path)
    for rank in (automatic, informed):
        signals(rank, expected, evaluations=[0, 2, 4, 6, 8, 10, 12])
    assert informed.values["torchobs.steps.planned",] == 12
    assert informed.values["torchobs.steps.resumed_from",] == 0
    assert informed.values["torchobs.samples",] == 2 * 12 * 4
    assert informed.values["torchobs.scalar", "val_loss"] == expected["metrics"]["val_loss"]
    assert informed.values["torchobs.scalar", "train_loss"] == expected["metrics"]["train_loss"]
    assert informed.values["torchobs.scalar", "epoch"] == 2
    assert informed.event("torchobs.trainer")["framework"] == "lightning"
    assert informed.event("torchobs.model") == {"name": "Characters", "parameters": 14528, "trainable": 14528}
    assert ("torchobs.steps.planned",) not in automatic.values


def test_lightning_s_own_ranks(flight_dir: Path) -> None:
    """Lightning starts the other ranks by repeating the command; the callback makes each of them a rank of one run."""
    lines = reports(start(script("with_lightning"), "ranks", flight_dir=flight_dir))
    assert sorted(line["rank"] for line in lines) == [0, 1]
    ranks = seen(flight_dir)
    assert [(rank.resource["rank"], rank.resource["world_size"]) for rank in ranks] == [(0, 2), (1, 2)]
    assert len({rank.resource["run_id"] for rank in ranks}) == 1
    assert [len(rank.steps) for rank in ranks] == [6, 6]
    assert [rank.values["torchobs.samples",] for rank in ranks] == [48, 48]


def test_transformers(flight_dir: Path, tmp_path: Path) -> None:
    """Its Trainer: losses and norms are those it logs; with the callback also epochs, metrics, tokens, checkpoints."""
    automatic, informed, expected = both("with_transformers", flight_dir, tmp_path)
    for rank in (automatic, informed):
        signals(rank, expected, evaluations=[2, 4, 6, 8, 10])
        assert [step.loss for step in rank.steps] == pytest.approx(expected["losses"], rel=1e-5)
        assert [step.grad_norm for step in rank.steps] == pytest.approx(expected["norms"], rel=1e-5)
        assert rank.values["torchobs.epochs",] == 2
        assert rank.values["torchobs.samples",] == 2 * 10 * 4  # inferred, where nobody gives them
        assert rank.values["torchobs.tokens",] == expected["tokens"]
        assert [step for step in rank.steps if not step.phase_s[DATA] > 0] == []  # that of the step after an evaluation, too
    assert [step.step - 1 for step in informed.steps if step.phase_s[CHECKPOINT] > 0] == [4, 8]
    assert informed.values["torchobs.steps.planned",] == 10
    assert informed.values["torchobs.steps.resumed_from",] == 0
    assert [step.tokens for step in informed.steps] == [128] * 10
    assert informed.values["torchobs.scalar", "eval_loss"] == expected["eval_loss"]
    assert informed.values["torchobs.scalar", "epoch"] == 2
    trainer = informed.event("torchobs.trainer")
    assert (trainer["framework"], trainer["run_name"], trainer["max_grad_norm"]) == ("transformers", "small", 0.5)
    assert not {"output_dir", "hub_token"} & trainer.keys()


def test_accelerate(flight_dir: Path, tmp_path: Path) -> None:
    """A loop of its own; with the tracker also what the loop gives to `accelerator.log`, and the steps to come."""
    automatic, informed, expected = both("with_accelerate", flight_dir, tmp_path)
    for rank in (automatic, informed):
        signals(rank, expected, evaluations=[4, 8])
        assert rank.steps[-1].losses == 2
    scalars = {name[1]: value for name, value in informed.values.items() if name[0] == "torchobs.scalar"}
    assert scalars == {"validation_loss": expected["validation_loss"], "epoch": 1}
    assert informed.values["torchobs.steps.planned",] == 8
    trainer = informed.event("torchobs.trainer")
    assert (trainer["learning_rate"], trainer["max_train_steps"]) == (0.01, 8)
    assert "data" not in trainer


COMMAND = Path(sys.executable).parent / "opentelemetry-instrument"

SCRIPT = """
import multiprocessing

if __name__ == "__main__":
    import torch
    from opentelemetry import trace

    weight = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with multiprocessing.get_context("spawn").Pool(1) as workers:
        for factor in workers.map(float, ["1", "2", "3"]):
            (weight * factor).sum().backward()
            optimizer.step()
    print(type(trace.get_tracer_provider()).__module__)
"""


def test_the_command_switches_it_on_in_the_trainer_alone(flight_dir: Path, tmp_path: Path) -> None:
    """The script knows nothing; its workers, which inherit the command's environment, are no ranks; the SDK stays in place."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    quiet = {f"OTEL_{signal}_EXPORTER": "none" for signal in ("TRACES", "METRICS", "LOGS")}
    done = subprocess.run(
        [str(COMMAND), sys.executable, str(script)], check=False, capture_output=True, text=True, cwd=tmp_path,
        env=clean_environment() | quiet | {"TORCHOBS_DIR": str(flight_dir), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "opentelemetry.sdk.trace\n"), done.stderr
    assert "Attempting" not in done.stderr
    (path,) = flight_dir.glob("*.flight")
    file = reader.open_path(str(path))
    values = {point.series.name: point.value for point in file.read(final=True).points}
    assert (values["torchobs.steps"], file.header.resource["script"]) == (3, "train.py")
    file.close()


def test_what_only_starts_or_helps_a_training_is_left_alone() -> None:
    """A launcher would be a second rank 0 that never steps."""
    trainings = (
        *("python train.py", "python -m package.train --c 3", "python -W ignore -X dev -u train.py", "python -c train()"),
        *("python", "python accelerate_me.py"),
    )
    launchers = (
        "/usr/bin/python3 /opt/venv/bin/torchrun --nproc-per-node 8 train.py",
        "python -m torch.distributed.run train.py",
        "python -W error -m torch.distributed.launch train.py",
        "python /opt/venv/bin/accelerate launch train.py",
        "python -m accelerate.commands.launch train.py",
        "python -c from\u00a0multiprocessing.spawn\u00a0import\u00a0spawn_main;\u00a0spawn_main()",
        "python -m torch._inductor.compile_worker",
        "python /opt/venv/lib/torch/_inductor/compile_worker/__main__.py --pickler=x",
    )
    assert [command for command in trainings if starts_others(command.split(" "))] == []
    assert [command for command in launchers if not starts_others(command.split(" "))] == []
