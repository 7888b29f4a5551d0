"""`torchobs inspect` on runs that really died, on copies, on rubbish, and what it promises to programs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.rank_files import BOOT, BORN_WALL_NS, File
from torchobs import catalog
from torchobs.cli import __main__ as dispatch
from torchobs.flight.artifacts import named
from torchobs.flight.layout import DEFAULT_SIZE, SLOT_SIZE, Exit, Live, Region, plan
from torchobs.ranks import runs as load

GOLDEN = Path(__file__).parent / "golden" / "inspect.json"
HOSTILE = "h.3\x1b]0;owned\x07\x1b[2J\r\n\u202eevil"
EXIT_WORD = 4096 // 8 + Live.EXIT


def inspected(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    """Exit status and what was printed."""
    status = dispatch.main(["inspect", *map(str, arguments)])
    return status, capsys.readouterr().out


def document(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    """The report for programs."""
    _, out = inspected(capsys, *arguments, "--json")
    parsed: dict[str, Any] = json.loads(out)
    return parsed


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("memory", [True, False])
def test_how_far_a_rank_came_that_was_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *, memory: bool, recorded: bool
) -> None:
    """Promise: off a tmpfs the file need not have the last steps, and nothing is said that rests on their absence.

    Where the file lies now counts only if it does not say where it was written: it may have been copied since.
    """
    monkeypatch.setattr(load, "in_memory", lambda _: memory is not recorded)
    dead(tmp_path, in_memory=memory if recorded else None).save()
    (report,), _ = load.load(sorted(tmp_path.glob("*.flight")))
    assert report.unwritten is not memory
    text = inspected(capsys, tmp_path)[1]
    assert ("after step 50 at least" in text, "50 steps at least" in text) == (not memory, not memory)


def dead(directory: Path, **fields: Any) -> File:
    """A rank of another boot with fifty steps, a gradient that was not finite, and a full cgroup."""
    assert bytes(16) != BOOT, "another boot"
    file, born_s = File(directory, boot=bytes(16), **fields), fields.get("born_s", 0.0)
    for number in range(1, 51):
        file.step(number, born_s + number / 10)
    file.set(catalog.MEMORY_HOST_UTILIZATION, 0.99, limit="cgroup")
    file.set(catalog.MEMORY_HOST_RSS, 3.5 * 2**30)
    file.beat(born_s + 5.0)
    file.writer.event(catalog.EVENT_NONFINITE_GRADIENT.name, {"layers": [HOSTILE], "layers_affected": 1, "kinds": ["nan"]}, 50)
    return file


@pytest.mark.parametrize("which", ["file", "directory"])
def test_a_rank_that_hung_is_told_with_its_stacks(tmp_path: Path, which: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that lie beside the file; empty ones, another rank's, and links are not."""
    file = dead(tmp_path)
    file.beat(75.0)
    file.save()
    names = [named(file.path.name, "stacks", BORN_WALL_NS // 1_000_000 + at).name for at in (65_000, 66_000, 67_000)]
    (tmp_path / names[0]).write_text("MainThread")
    (tmp_path / names[1]).touch()
    (tmp_path / names[2]).symlink_to(tmp_path / names[0])
    (tmp_path / named(f"r1-{9:032x}.flight", "stacks", 9).name).write_text("MainThread")
    (rank,) = document(capsys, file.path if which == "file" else tmp_path)["ranks"]
    assert (rank["stall"]["seconds"], rank["stall"]["usual_step"], rank["stall"]["hung"]) == (70.0, 0.1, True)
    assert rank["stall"]["stacks"] == [artifact["file"] for artifact in rank["evidence"]] == names[:1]
    assert "No step ended in the last 1 min 10 s" in " ".join(inspected(capsys, tmp_path)[1].split())


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(
    tmp_path: Path, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no layer's name sends a command to it."""
    for rank in range(3):
        dead(tmp_path, seed=rank + 1, rank=rank, job_name=HOSTILE).save()
    monkeypatch.setenv("COLUMNS", str(width))
    _, out = inspected(capsys, tmp_path)
    assert max(map(len, out.splitlines())) <= width
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert "owned" in out, "the name itself is shown"


def test_the_document_s_form_does_not_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pytestconfig: pytest.Config
) -> None:
    """Programs read it: a change is one of its version, too."""
    file = dead(tmp_path)
    file.memory.word(EXIT_WORD, 1 << 63 | Exit.EXIT_CODE << 32 | 3)
    file.save()
    report = document(capsys, tmp_path, "--steps", "2")
    for event in report["ranks"][0]["events"]:
        event["time"] = 0.0  # dated by the machine's clock
    text = json.dumps(report, indent=2) + "\n"
    if pytestconfig.getoption("--update-golden"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_of_several_runs_the_last_one_is_told_and_the_others_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And of a restarted rank the last attempt. `--run` takes a job's name, too, and its latest run."""
    dead(tmp_path, run_id="early", seed=1).save()
    first = dead(tmp_path, run_id="late", seed=2, born_s=100.0).save()
    dead(tmp_path, run_id="late", seed=3, born_s=200.0, restart=1).save()
    assert [rank["run_id"] for rank in document(capsys, tmp_path)["ranks"]] == ["late"]
    assert [rank["run_id"] for rank in document(capsys, tmp_path, "--run", "ear")["ranks"]] == ["early"]
    assert [rank["run_id"] for rank in document(capsys, tmp_path, "--run", "gpt")["ranks"]] == ["late"]
    assert [rank["restart"] for rank in document(capsys, tmp_path)["ranks"]] == [1]
    out = inspected(capsys, tmp_path)[1]
    assert f"1 earlier attempt of these ranks: inspect {first.path.name}"[:60] in out
    assert "1 other run in this directory: --run early" in out
    assert dispatch.main(["inspect", str(tmp_path), "--run", "none"]) == 2
    missing = capsys.readouterr().err
    assert "no run 'none'" in missing
    assert [line.split()[0] for line in missing.splitlines()[1:]] == ["late", "early"]


def finished(directory: Path) -> File:
    """A rank of another boot: finished at step 40, with a loss that is not finite from step 20 on, its totals folded."""
    file = File(directory, boot=bytes(16))
    for number in range(1, 41):
        file.step(number, number / 10, loss=2.0 if number < 20 else float("nan"))
    file.writer.fold()
    file.beat(4.0)
    file.writer.exit(Exit.FINISHED, 0)
    return file


REGIONS = plan(DEFAULT_SIZE)
LIVE_END, SERIES_END, STEPS_AT = (REGIONS[region].offset for region in (Region.SERIES, Region.BLOCKS, Region.STEPS))
CORE_END = SERIES_END + 2 * SLOT_SIZE
FALSE = ("without a step", "recovered.", "before its first step", "vanished")


@pytest.mark.parametrize("how", ["cut", "zeroed"])
@pytest.mark.parametrize(
    ("kept", "says", "problem"),
    [
        (4096, "How rank 0 ended is not in this part of the file.", "its last signs of life are"),
        (LIVE_END, "Rank 0 finished in order; it ran for", "its totals are"),
        (SERIES_END, "Rank 0 finished in order; it ran for", "its totals are"),
        (CORE_END, "Rank 0 finished in order after step 40;", "40 step records are"),
        (STEPS_AT + 128 * 10, "Rank 0 finished in order after step 40;", "30 step records are"),
    ],
)
def test_nothing_is_asserted_of_what_is_missing(
    tmp_path: Path, how: str, kept: int, says: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A download that broke off, and a file of the right size without its end."""
    path = finished(tmp_path).save().path
    raw = path.read_bytes()
    path.write_bytes(raw[:kept].ljust(len(raw) if how == "zeroed" else kept, b"\0"))
    (rank,) = document(capsys, path)["ranks"]
    sentences = " ".join(finding["text"] for finding in rank["findings"])
    assert says in sentences
    assert not [text for text in FALSE if text in sentences]
    assert f"{problem} damaged or missing" in " ".join(rank["problems"])
    assert rank["partial"]


def test_records_with_bad_bytes_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each has its checksum; the rest is reported as it is."""
    path = finished(tmp_path).save().path
    assert document(capsys, path)["ranks"][0]["problems"] == []
    with path.open("r+b") as damaged:
        for number in (3, 17, 39):
            damaged.seek(STEPS_AT + 128 * number + 40)
            damaged.write(b"\xff" * 3)
    (rank,) = document(capsys, path)["ranks"]
    assert (rank["problems"], rank["partial"], rank["last_step"]) == (["3 step records are damaged or missing"], True, 40)
    assert len(document(capsys, path, "--steps", "100")["ranks"][0]["steps"]) == 37


@pytest.mark.parametrize("rubbish", [b"", b"x" * 5000, bytes(1 << 20), os.urandom(1 << 20)])
def test_rubbish_is_refused_with_the_reason(tmp_path: Path, rubbish: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    """By a path, and in a directory beside a good file, which is reported all the same."""
    bad = tmp_path / f"r9-{0:032x}.flight"
    bad.write_bytes(rubbish)
    assert dispatch.main(["inspect", str(bad)]) == 2
    assert f"nothing readable: {bad.name}: " in capsys.readouterr().err
    dead(tmp_path).save()
    status, out = inspected(capsys, tmp_path)
    assert status == 1
    assert f"Not read: {bad.name}"[:40] in out


def test_what_is_not_there_is_told_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty directory, a missing path, no directory at all."""
    assert dispatch.main(["inspect", str(tmp_path)]) == 2
    assert "torchobs run train.py" in capsys.readouterr().err
    assert dispatch.main(["inspect", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_no_damage_makes_it_raise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes changed anywhere: it reports, or refuses."""
    file = dead(tmp_path)
    header, random = file.header, Random(7)
    for event in catalog.EVENTS:
        file.writer.event(event.name, {"kind": "\x1b[2J"}, 7)
    file.save()
    whole = bytearray(file.path.read_bytes())
    target = tmp_path / "target"
    for _ in range(25):
        damaged = bytearray(whole)
        for _ in range(random.choice((0, 1, 100, 5000))):
            damaged[random.randrange(4096, len(damaged))] = random.randrange(256)
        target.write_bytes(damaged)
        assert dispatch.main(["inspect", str(target)]) in {0, 1, 2}
        assert dispatch.main(["inspect", str(target), "--json"]) in {0, 1, 2}
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert header.incarnation.hex() in shown
