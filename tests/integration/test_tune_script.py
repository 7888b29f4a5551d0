"""`torchobs tune`: a script's own steps timed with and without a technique, and nothing of the script changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torchobs.cli import tune
from torchobs.cli.arguments import CommandError
from torchobs.cli.terminal_style import TerminalStyle

AS_IT_IS = tune.AS_IT_IS


def test_a_script_is_tried_and_ended(checkout: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Promise: each technique is measured or skipped with its reason; output goes to stderr; what follows is not done."""
    script = checkout / "tests/scripts/tuned_outside.py"
    before = script.read_bytes()
    assert tune.main(["--modes", "channels_last,tf32", "--rounds", "7", "--warmup", "1", "--json", str(script), "1000"]) == 0
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert "the end of" not in err
    assert script.read_bytes() == before
    modes = {each["mode"]: each for each in found["modes"]}
    assert set(modes) == {AS_IT_IS, "channels_last"}
    assert found["rounds"] == 7
    assert modes["channels_last"]["used"] == ["channels_last"]
    assert modes["channels_last"]["speedup_factor"]["low"] > 0
    assert [each["mode"] for each in found["left_out"]] == ["tf32"]
    assert "waits for the DataLoader, which has 0 workers" in found["hints"][0]


def test_a_script_with_too_few_steps_is_told(checkout: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Promise: how many steps it took, and what to do; the script ran to its end."""
    script = checkout / "tests/scripts/tuned_outside.py"
    with pytest.raises(CommandError, match=r"the script ended after 3 training steps, too few to compare: let it take more"):
        tune.main(["--modes", "channels_last", str(script), "6"])
    assert "the end of ['6']" in capfd.readouterr().err


def result(**times: list[float]) -> dict[str, Any]:
    """What a process found."""
    taken = {AS_IT_IS: [1.0] * 7, **times}
    first = {mode: values[0] for mode, values in taken.items()}
    return {
        "device": "cpu",
        "times": taken,
        "first": first,
        "skipped": {"tf32": "there is none"},
        "waits": [0.2],
        "loader": None,
    }


def test_the_table_tells_gain_noise_and_what_was_left_out() -> None:
    """Promise: a verdict for each mode by its interval, reasons for the others, and the recommendation last."""
    found = result(threads=[0.5] * 7, compile=[0.9, 1.1, 0.8, 1.2, 1.3, 0.7, 1.0])
    shown = "\n".join(tune.lines(tune._benchmark(found, 7), tune._hints(found, asked=False), TerminalStyle(128)))
    assert "threads" in shown
    assert "2 [2, 2]  faster" in shown
    assert "noise" in shown
    assert "tf32 was not tried: there is none" in shown
    assert "no DataLoader" in shown
    assert "recommended: threads" in shown


def test_workers_are_hinted_at_where_data_is_waited_for() -> None:
    """Promise: the share of a step that waits bounds what workers can gain."""
    found = {**result(), "loader": {"workers": 0, "pinned": False}}
    assert tune._hints(found, asked=False)[0].endswith("which has 0 workers: try --loader 2")
    found["waits"] = [0.01]
    assert tune._hints(found, asked=False)[0].endswith("more would gain no more than that")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--modes", "fast", "x.py"], "unknown mode 'fast': use some of autocast"),
        (["--rounds", "3", "x.py"], "so many modes need at least 8 rounds, not 3"),
        (["--warmup", "-1", "x.py"], "at least 0"),
        (["--loud", "x.py"], "unrecognized arguments: --loud"),
        ([], "a script or `-m module` is missing"),
        (["not-there.py"], "can't open file"),
    ],
)
def test_wrong_arguments_end_before_anything_runs(given: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Promise: exit status 2, and what to do."""
    with pytest.raises(SystemExit) as ended:
        tune.main(given)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
