"""The integrations' own logic, without their frameworks; with them: tests/integration/test_frameworks.py."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections import UserDict
from typing import TYPE_CHECKING

import pytest
import torch

import torchobs
from tests import support
from tests.training import Recording
from torchobs.integrations.batches import samples_in, tokens_in
from torchobs.integrations.hooks import Hooks, record_trainer, scalars

if TYPE_CHECKING:
    from pathlib import Path

EXTRAS = ("lightning", "transformers", "accelerate", "instrumentor")


def shown(run: Recording, expected: dict[tuple[str, ...], float]) -> None:
    """Wait for the sampler to show these values."""
    support.wait_until(lambda: expected.items() <= run.values().items())


@pytest.mark.parametrize(
    ("batch", "samples", "tokens"),
    [
        (torch.zeros(4, 3), 4, 0),
        ([torch.zeros(4, 3), torch.zeros(4)], 4, 0),
        ({"input_ids": torch.zeros(2, 8), "labels": torch.zeros(2, 8)}, 2, 16),
        (UserDict(input_ids=torch.zeros(2, 8)), 2, 16),
        ({"text": ["a", "b"], "image": {"pixels": torch.zeros(5, 3, 2, 2)}}, 5, 0),
        (("a", 3, torch.zeros(()), torch.zeros(6)), 6, 0),
        (list(range(1_000_000)), 0, 0),
        ({"input_ids": [1, 2, 3]}, 0, 0),
        (None, 0, 0),
    ],
    ids=range(9),
)
def test_samples_and_tokens_are_found_in_whatever_a_loader_gives(batch: object, samples: int, tokens: int) -> None:
    """The first tensor's first dimension; the elements of `input_ids`; 0 where there is neither."""
    assert (samples_in(batch), tokens_in(batch)) == (samples, tokens)


def test_only_numbers_become_scalars_and_none_of_them_the_step_s_own() -> None:
    """A logged `loss` is an average over steps: it must not replace what each step's backward passes began from."""
    values = {"loss": 1.0, "tokens": 5, "total_steps": 2, "val/loss": torch.tensor(0.5), "acc": 0.25, "note": "x", "z": 1j}
    assert scalars(values) == {"val/loss": torch.tensor(0.5), "acc": 0.25}
    assert scalars({"acc": 1, "grad_norm": 2.0, "confusion": torch.zeros(2, 2)}, frozenset({"grad_norm"})) == {"acc": 1}


def test_settings_that_could_hold_a_secret_or_a_path_are_left_out(run: Recording) -> None:
    """Numbers, yes or no, and single words go on record, at most 32 of them."""
    record_trainer(
        "ours",
        "1.0",
        {
            "lr": 0.1,
            "bf16": True,
            "optim": "adamw_torch",
            "precision": "16-mixed",
            "none": None,
            "output_dir": "/home/someone/run",
            "prompt": "two words",
            "hub_token": "hf_" + 64 * "x",
            "nested": {"a": 1},
        },
    )
    record_trainer("ours", "1.0", {f"setting{number}": number for number in range(100)})
    first, second = run.attributes("torchobs.trainer")
    assert first == {
        "lr": 0.1, "bf16": True, "optim": "adamw_torch", "precision": "16-mixed", "framework": "ours", "version": "1.0"
    }  # fmt: skip
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


def test_a_phase_follows_another_and_ends_once(run: Recording) -> None:
    """Frameworks leave hooks out; what is open then is closed by whichever comes next."""
    hooks = Hooks("ours")
    hooks.end()
    seen = [hooks.phase]
    for name in ("evaluation", "checkpoint"):
        hooks.begin(name)
        seen.append(hooks.phase)
    for _ in range(2):
        hooks.end()
        seen.append(hooks.phase)
    assert seen == [None, "evaluation", "checkpoint", None, None]
    assert run.session.context is not None
    assert run.session.context.recorder.phase()[0] == 4  # other


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_missing_framework_is_one_clear_line(extra: str) -> None:
    """The last line of the traceback, and the only one that is not a place in the code, names the command that helps."""
    hide = "import sys; sys.modules.update(dict.fromkeys(('lightning', 'pytorch_lightning', 'transformers', 'accelerate')))"
    code = f"{hide}; sys.modules['opentelemetry.instrumentation'] = None; import torchobs.integrations.{extra}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == f"ModuleNotFoundError: the {extra} integration needs: pip install 'torchobs[{extra}]'"
    assert "During handling" not in done.stderr


def test_a_value_that_is_no_number_spoils_nothing(run: Recording) -> None:
    """What is logged beside it counts, and so does the next call."""
    torchobs.log(note="text", accuracy=0.5, shape=(1, 2), grid=torch.zeros(2, 2))
    torchobs.log(precision=torch.tensor(0.25))
    shown(run, {("torchobs.scalar", "accuracy"): 0.5, ("torchobs.scalar", "precision"): 0.25})
    assert {name[1] for name in run.values() if name[0] == "torchobs.scalar"} == {"accuracy", "precision"}


def test_numpy_s_numbers_are_numbers(run: Recording) -> None:
    """They have a `device` as tensors do, but it is a string."""
    numpy = pytest.importorskip("numpy")
    torchobs.log(loss=numpy.float32(0.5), accuracy=numpy.float64(0.75), count=numpy.array(3))
    shown(run, {("torchobs.scalar", "accuracy"): 0.75, ("torchobs.scalar", "count"): 3})


def test_what_fails_in_one_public_function_leaves_the_others(flight_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each has its own fuse; it is counted, and told once."""
    with caplog.at_level(logging.WARNING, "torchobs"), torchobs.init(flight_dir=flight_dir) as session:
        torchobs.watch(object())
        torchobs.log(accuracy=0.5)
        found = Recording(session)
        assert found.errors()[0].startswith("watch: ")
        shown(found, {("torchobs.scalar", "accuracy"): 0.5})
    support.wait_until(lambda: "probe 'watch' failed with AttributeError" in caplog.text)
