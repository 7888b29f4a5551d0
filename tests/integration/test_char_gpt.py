"""The example trains what it says it trains, and its own figures are right: other tests compare torchobs with them."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.char_gpt import Options
from tests import fork_server

PHASES = ["data", "forward", "backward", "optimizer"]
TINY = [
    *("--layers", "1", "--heads", "2", "--width", "32", "--block-size", "32", "--characters", "100000"),
    *("--threads", "1", "--device", "cpu", "--sample", "20"),
]
Run = Callable[..., tuple[str, list[dict[str, float]]]]


@pytest.fixture
def run(checkout: Path, tmp_path: Path) -> Run:
    """Run a tiny example to its end; return what it printed and the lines of its timings."""
    script = checkout / "examples/char_gpt.py"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]

    def run(*options: str, ranks: int = 1) -> tuple[str, list[dict[str, float]]]:
        timings = tmp_path / "timings.jsonl"
        timings.unlink(missing_ok=True)
        start = [*launcher, str(ranks)] if ranks > 1 else [sys.executable, "-W", "error"]
        argv = [*start, str(script), *TINY, "--timings", str(timings), *options]
        ended = fork_server.run(argv, capture_output=True, text=True, timeout=100, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout, [json.loads(line) for line in timings.read_text().splitlines()]

    return run


def test_training_lowers_the_loss_and_every_step_is_accounted_for(run: Run) -> None:
    """One line of timings per step, with the loss that is printed; validation agrees; the model writes at the end."""
    printed, lines = run("--steps", "60", "--batch-size", "16", "--log-every", "30", "--eval-every", "60")

    assert [line["step"] for line in lines] == list(range(1, 61))
    assert lines[0]["loss"] == pytest.approx(math.log(128), rel=0.05)  # at first every character is equally likely
    assert lines[-1]["loss"] < lines[0]["loss"] - 1
    assert all(0 < line[phase] < 5 for line in lines for phase in PHASES)
    steps = [line.split() for line in printed.splitlines() if "gradient norm" in line]
    assert [(int(words[1]), float(words[3])) for words in steps] == [
        (step, round(lines[step - 1]["loss"], 4)) for step in (30, 60)
    ]
    (validation,) = [line for line in printed.splitlines() if "validation" in line]
    assert float(validation.split()[-1]) == pytest.approx(lines[-1]["loss"], rel=0.2)
    assert "def " in printed


def test_accumulation_and_ranks_give_the_gradients_of_one_large_batch(run: Run) -> None:
    """One pass over 8 sequences, two over 4, and two ranks with 4 each are the same training, to rounding."""
    _, large = run("--steps", "3", "--batch-size", "8")
    _, accumulated = run("--steps", "3", "--batch-size", "4", "--accumulate", "2")
    _, distributed = run("--steps", "3", "--batch-size", "4", ranks=2)

    assert sorted((line["step"], line["rank"]) for line in distributed) == [(s, r) for s in (1, 2, 3) for r in (0, 1)]
    for line in large:
        same_step = [other for other in (*accumulated, *distributed) if other["step"] == line["step"]]
        assert [other["grad_norm"] for other in same_step] == pytest.approx([line["grad_norm"]] * 3, rel=1e-4)
        own, *shares = (other["loss"] for other in same_step)
        assert own == pytest.approx(line["loss"], rel=1e-5)
        assert sum(shares) / 2 == pytest.approx(line["loss"], rel=1e-5)


def test_workers_bf16_and_the_blow_up_are_only_options(run: Run) -> None:
    """With worker processes and bf16 it trains as well, and from the given step on the learning rate is blown up."""
    _, lines = run(
        *("--steps", "5", "--batch-size", "4", "--workers", "1", "--precision", "bf16"),
        *("--blow-up-at", "4", "--blow-up-factor", "1000"),
    )

    rates = [line["learning_rate"] for line in lines]
    assert all(rate <= Options().learning_rate for rate in rates[:3])
    assert rates[3] > 100 * rates[2]
    assert len(lines) == 5
    assert all(math.isfinite(line["loss"]) for line in lines)
