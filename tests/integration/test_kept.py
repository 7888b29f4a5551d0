"""Runs that outlive the machine: what is kept, how much of it, and what becomes of it afterwards."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import stat
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import torchobs
from tests import fork_server
from tests.chromium import Browser, Tab
from tests.diagnosis_files import fact, facts, step, steps
from tests.exporters import Service
from tests.integration.test_report import ran
from tests.integration.test_ui_chromium import CONTRASTS
from tests.support import ROOT, clean_environment, wait_until
from torchobs import catalog
from torchobs.document import kept
from torchobs.document.blocks import HeatMap, LineChart, StripChart
from torchobs.document.files import report_text
from torchobs.document.kept import NotKeptError
from torchobs.document.run import Options, document
from torchobs.exporter.config import ExporterConfig
from torchobs.flight.details import History, HistoryRow
from torchobs.ranks.runs import Chosen, NoRunError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


SCRIPT = ROOT / "tests" / "scripts" / "dying.py"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runs are kept."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "torchobs" / "runs"


def run(run_id: str = "run-1", *, number: int = 60, details: Mapping[str, Any] | None = None, **fields: Any) -> Chosen:
    """A run of one rank that has finished."""
    of = {"state": "finished", "reason": "finished", "resource": {"run_id": run_id}, "details": details or {}}
    return Chosen([facts(fields.pop("history", steps(number)), **{**of, **fields})], [], [], [])


def test_a_reboot(flight_dir: Path, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs that the node's exporter and `torchobs run` have kept are listed, inspected, reported and compared as before."""
    environ = {
        **clean_environment(), "TORCHOBS_DIR": str(flight_dir), "TORCHOBS_KEEP_RUNS": "200", "PYTHONPATH": str(ROOT),
        "XDG_STATE_HOME": str(tmp_path / "state"), "TORCHOBS_EXPORTER_ADDRESS": "127.0.0.1:0",
    }  # fmt: skip

    def train(run_id: str, how: str, *options: str) -> None:
        argv = [sys.executable, "-m", "torchobs", "run", "--quiet", *options, str(SCRIPT), how]
        fork_server.Python(argv, env={**environ, "TORCHOBS_RUN_ID": run_id}, cwd=tmp_path).wait(timeout=120)

    train("untold", "finish", "--no-exporter", "--no-keep")
    assert not place.exists()
    train("by-itself", "finish", "--no-exporter", "--tag", "base")
    assert len([*place.iterdir()]) == 1
    train("unasked", "finish", "--no-keep")
    (tmp_path / "interrupted.py").write_text("raise KeyboardInterrupt")
    argv = [sys.executable, "-m", "torchobs", "run", "--no-exporter", str(tmp_path / "interrupted.py")]
    elsewhere = environ | {"TORCHOBS_KEEP_DIR": str(tmp_path / "elsewhere"), "TORCHOBS_DIR": str(tmp_path / "flights")}
    assert fork_server.run(argv, env=elsewhere, capture_output=True).returncode == -signal.SIGINT
    assert len([*(tmp_path / "elsewhere").iterdir()]) == 1
    train("by-exporter", "raise")
    wait_until(lambda: len([*place.glob("*.run.gz")]) == 2, 60)
    assert {stat.S_IMODE(path.stat().st_mode) for path in place.iterdir()} == {0o600}
    where = ("--dir", flight_dir)
    living = json.loads(ran(capsys, "runs", *where, "--json")[1])["runs"]
    names = {"by-itself": True, "by-exporter": True, "untold": False, "unasked": False}
    assert {summary["run_id"]: bool(summary["kept"]) for summary in living} == names
    assert ran(capsys, "report", "--dir", tmp_path / "flights", "-o", tmp_path / "latest.json")[0] == 0
    (latest,) = json.loads((tmp_path / "latest.json").read_text())["ranks"]
    assert latest["job_name"] == "interrupted"  # of this directory, though others that are kept ended later
    before = [*ran(capsys, "inspect", flight_dir, "--run", "by-exporter")[1].splitlines()]
    assert ran(capsys, "report", "by-itself", *where, "-o", tmp_path / "before.html")[0] == 0
    assert ran(capsys, "report", "by-itself", *where, "-o", tmp_path / "before.json")[0] == 0
    compared = ran(capsys, "compare", "by-itself", "by-exporter", "--json", *where)[1]

    shutil.rmtree(flight_dir)
    flight_dir.mkdir()
    status, after, _ = ran(capsys, "inspect", "--run", "by-exporter")
    assert status == 1
    assert after.splitlines()[:-1] == [line for line in before if "other runs in this directory" not in line]
    assert after.splitlines()[-1].startswith("kept in ")
    for suffix in ("html", "json"):
        assert ran(capsys, "report", "by-itself", *where, "-o", tmp_path / f"after.{suffix}")[0] == 0
        assert (tmp_path / f"after.{suffix}").read_text() == (tmp_path / f"before.{suffix}").read_text()
    assert ran(capsys, "compare", "by-itself", "by-exporter", "--json", *where)[1] == compared
    status, table, _ = ran(capsys, "runs", *where)
    first, second = (line.split() for line in table.splitlines()[1:])
    assert (first[0], first[3:5], second[0]) == ("by-exporter", ["failed", "exception"], "by-itself")
    (base,) = json.loads(ran(capsys, "runs", *where, "--tag", "base", "--json")[1])["runs"]
    assert (base["run_id"], base["state"], base["steps"], base["tag"]) == ("by-itself", "finished", 60, "base")
    assert base["kept"]
    assert base["best_loss"] <= base["loss"]
    assert len(base["commit"]) == 40, "that of the script, which runs elsewhere"
    assert ran(capsys, "runs", *where, "--job", "another")[0] == 2
    (plain,) = json.loads(ran(capsys, "inspect", base["kept"], "--json")[1])["ranks"]
    assert (plain["run_id"], len(plain["steps"])) == ("by-itself", 60)


def test_a_report_comes_back_as_it_was(place: Path) -> None:
    """Every kind of block, as HTML, Markdown and JSON; nothing but JSON is in the file, which has no NaN."""
    odd = [*steps(40), step(41, float("nan"), float("inf")), step(42, float("-inf"), None)]
    rows = tuple(HistoryRow(float(at), at, (1e9 + at, 0.5 * at)) for at in range(1, 5))
    names = (catalog.MEMORY_HOST_RSS.name, f"{catalog.GRAD_LAYER_NORM.name}{{layer.0}}")
    events = [fact(catalog.EVENT_ANOMALY, 4.0, 40, kind="loss_spike")]
    values = {(catalog.GOODPUT_TIME, "productive"): 4.0, (catalog.ANOMALIES, "loss_spike"): 1, catalog.GRAD_CLIP_MAX_NORM: 1.0}
    first = replace(facts(odd, events=events, values=values, details={"command": ["train.py"]}), history=History(names, rows))
    second = facts(steps(30), resource={"rank": 1}, state="finished", reason="finished")
    chosen = Chosen([first, second], [("r9", "damaged")], [], [])
    path = kept.keep(chosen, place, 9)
    back = kept.load(path)
    assert {type(chart) for chart in back.report.charts()} == {LineChart, StripChart, HeatMap}
    for suffix in (".html", ".md"):
        assert report_text(back, suffix) == report_text(chosen, suffix)
    assert back.data == document(chosen.ranks, [], chosen.bad, Options(2048, 100, whole=True))
    assert repr(back.side) == repr(kept.side_for(chosen))  # a NaN equals nothing
    for line in gzip.decompress(path.read_bytes()).splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_how_much_is_kept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest runs and so many bytes; a run again is the same file, at most the newest one is larger than the limit."""
    paths = [kept.keep(run(f"run-{at}"), place, 9) for at in range(4)]
    for at, path in enumerate(paths):
        os.utime(path, (at, at))
    (place / ".left.tmp").touch()
    os.utime(place / ".left.tmp", (0, 0))
    assert kept.keep(run("run-3", number=61), place, 3) == paths[3]
    assert sorted(place.iterdir()) == sorted(paths[1:])
    monkeypatch.setattr(kept, "MOST_BYTES", paths[2].stat().st_size * 2 + 100)
    newest = kept.keep(run("run-4"), place, 3)
    assert sorted(place.iterdir()) == sorted([paths[3], newest])
    monkeypatch.setattr(kept, "MOST_BYTES", 1)
    newest = kept.keep(run("run-5"), place, 3)
    assert [*place.iterdir()] == [newest]


def test_nothing_is_written_onto_a_disk_that_is_nearly_full(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flight_dir: Path
) -> None:
    """Nor for a run that still runs, nor in a pod without a volume; and what a person asked for is refused in words."""
    size = os.statvfs("/")
    full = os.statvfs_result((*tuple(size)[:4], int(0.04 * size.f_blocks), *tuple(size)[5:]))
    with monkeypatch.context() as patch:
        patch.setattr(kept, "_ENOUGH", size.f_blocks * size.f_frsize)
        patch.setattr(os, "statvfs", lambda _: full)
        with pytest.raises(NotKeptError, match="is nearly full"):
            kept.keep(run(), place, 9)
    with pytest.raises(NotKeptError, match="still runs"):
        kept.keep(run(up=True, state="alive", reason=""), place, 9)
    assert not place.is_dir() or not [*place.iterdir()]
    place.mkdir(parents=True, exist_ok=True)
    place.chmod(0o700)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    assert kept.directory() is None
    status, _, message = ran(capsys, "keep", "--dir", flight_dir)
    assert (status, "set TORCHOBS_KEEP_DIR" in message) == (1, True)
    monkeypatch.setenv("TORCHOBS_KEEP_DIR", "/volume")
    assert str(kept.directory()) == "/volume"


def test_where_runs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rules of XDG: a relative path does not count."""
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert str(kept.directory()) == "/state/torchobs/runs"
    for path in ("", "state"):
        monkeypatch.setenv("XDG_STATE_HOME", path)
        assert str(kept.directory()) == "/home/ada/.local/state/torchobs/runs"
    monkeypatch.delenv("HOME")
    assert kept.directory() is None


def test_a_file_that_is_none_is_said_to_be_none(
    place: Path, flight_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Damaged, cut, of a later version, of another program or forged: a line each in the list, and no traceback anywhere."""
    path, cut = kept.keep(run(), place, 9), kept.keep(run("run-2"), place, 9)
    cut.write_bytes(cut.read_bytes()[:-20])
    raw, text = path.read_bytes(), gzip.decompress(path.read_bytes()).decode()
    head, body = text.splitlines()
    contents = {
        "empty": b"", "noise": b"\0" * 99, "flipped": raw[:200] + bytes([raw[200] ^ 255]) + raw[201:],
        "later": gzip.compress(text.replace('"version": 1', '"version": 2', 1).encode()),
        "other": gzip.compress(b"[1, 2]\n{}\n"), "nan": gzip.compress(f'{head[:-1]}, "x": NaN}}\n{body}\n'.encode()),
        "forged": gzip.compress(text.replace('"steps": 60', '"steps": {}', 1).encode()),
        "deep": gzip.compress(b"[" * 100_000),
    }  # fmt: skip
    for name, content in contents.items():
        (place / f"{name}.run.gz").write_bytes(content)
    os.mkfifo(place / "pipe.run.gz")
    status, listed, _ = ran(capsys, "runs", "--dir", flight_dir, "--json")
    listing = json.loads(listed)
    assert (status, {row["run_id"] for row in listing["runs"]}) == (0, {"run-1", "run-2"})  # a list reads the first line alone
    assert {row["file"] for row in listing["unreadable"]} == {f"{name}.run.gz" for name in contents}
    said = {row["file"]: row["reason"] for row in listing["unreadable"]}
    assert said["later.run.gz"] == "kept by another version of torchobs: its form is 2, not 1"
    for name in (cut.name, *(f"{name}.run.gz" for name in contents)):
        status, _, message = ran(capsys, "report", place / name, "-o", tmp_path / "r.html")
        assert (status, "cannot be read" in message) == (2, True), name
    assert len(ran(capsys, "runs", "--dir", flight_dir)[1].splitlines()) == 1 + 2 + 5
    report = json.loads(body)
    report["report"]["headline"], report["data"]["ranks"][0]["state"] = "\x1b[2J", "\x1b[2J"
    path.write_bytes(gzip.compress(f"{head}\n{json.dumps(report)}\n".encode()))
    assert "\x1b" not in ran(capsys, "inspect", path)[1] + ran(capsys, "compare", path, path)[1]
    report["report"]["sections"][0]["blocks"][0]["is"] = "Html"
    path.write_bytes(gzip.compress(f"{head}\n{json.dumps(report)}\n".encode()))
    with pytest.raises(NoRunError, match="was to be"):
        kept.load(path)


def test_an_exporter_that_a_person_starts_keeps_where_it_is_told(
    place: Path, flight_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a sidecar, which ends with its pod: what has ended is kept, unless the run did not want it, or hides its details."""
    refusals: tuple[dict[str, object], ...] = ({}, {"keep_runs": 0}, {"run_details": False})
    for number, refusal in enumerate(refusals, 1):
        with torchobs.init(flight_dir=flight_dir, run_id=f"run-{number}", **{"keep_runs": 9} | refusal):
            torchobs.step()
    monkeypatch.setenv("TORCHOBS_KEEP_RUNS", "9")
    for directory, wanted in (("", []), (str(place), ["run-1"])):
        monkeypatch.setenv("TORCHOBS_KEEP_DIR", directory)
        with Service(ExporterConfig(flight_dir=str(flight_dir))) as service:
            service.page()
        assert [run.run_id for run in kept.listed(place)[0]] == wanted


def test_two_writers_at_once(place: Path) -> None:
    """Of one run or of many: each file is whole, the limit holds, and nothing is left over."""
    begin = threading.Barrier(6)

    def write(number: int) -> None:
        begin.wait()
        for at in range(6):
            kept.keep(run(f"run-{at}", number=20 + number), place, 4)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    kept.keep(run("the last"), place, 4)
    assert len([*place.iterdir()]) == 4
    runs, bad = kept.listed(place)
    assert (len(runs), bad) == (4, [])
    assert [kept.load(path).side.steps for path in runs.values()] == [summary.steps for summary in runs]


def test_a_long_run_is_kept_from_its_beginning(place: Path, flight_dir: Path) -> None:
    """What the ring of steps has lost is drawn from what was read of it now and then, and counts for the least loss."""
    names = (catalog.MEMORY_HOST_RSS.name, catalog.LOSS.name, catalog.GRAD_NORM.name)
    rows = (HistoryRow(0.1, 0, (1.0, None, None)), HistoryRow(5.0, 10, (1.0, 0.5, None)), HistoryRow(9.0, 20, (1.0, 3.0, 2.0)))
    chosen = run(history=[step(number, 4.0) for number in range(15, 25)])
    path = kept.keep(chosen._replace(ranks=[replace(chosen.ranks[0], history=History(names, rows))]), place, 9)
    assert kept.summary_in(path).best_loss == 0.5
    loaded = kept.load(path)
    assert loaded.side.curves["loss"][:2] == [(10.0, 0.5), (15.0, 4.0)]
    blocks = (block for section in loaded.report.sections for block in section.blocks)
    (chart,) = (block for block in blocks if isinstance(block, LineChart) and block.name == "Loss")
    assert (chart.series[0].points[0], chart.note) == ((10, 0.5), "Before step 15: as read now and then.")
    with Service(ExporterConfig(flight_dir=str(flight_dir))) as service:
        curves = json.loads(service.get(f"/live/past/curves?run={path.name}").body)
    assert [column[0] for column in curves.values()] == [10, None, 5.0, 0.5, None, None, None]


SECRET = "--a-sentinel-argument"


def test_the_page_of_past_runs(place: Path, flight_dir: Path) -> None:
    """It lists what is kept, and gives the steps of one of them; nothing of how it was started, and no other file."""
    with Service(ExporterConfig(flight_dir=str(flight_dir))) as service:
        assert "No run has been kept here yet" in service.get("/live/past").body.decode()
        assert 'href="./live/past"' in service.get("/").body.decode()
        details = {"command": ["train.py", SECRET], "git": {"commit": "f" * 40}, "settings": {"tag": "base"}}
        history = [step(1, 3.0), step(2, float("nan"), None), step(3, 1.0, float("inf"))]
        values = {catalog.STEPS_RESUMED_FROM: 40.0}
        path = kept.keep(run("<i>run</i>", history=history, details=details, values=values), place, 9)
        (place / "noise.run.gz").write_bytes(b"noise")
        page, got = service.get("/live/past"), service.get(f"/live/past/curves?run={path.name}")
        assert page.headers["content-security-policy"].startswith("default-src 'none'")
        assert "&lt;i&gt;run&lt;/i&gt;" in page.body.decode()
        assert "Not read: noise.run.gz: Not a gzipped file" in page.body.decode()
        assert not [text for text in (SECRET, "f" * 7) if text in page.body.decode() + got.body.decode()]
        curves = json.loads(got.body, parse_constant=pytest.fail)
        assert (curves["step"], curves["loss"], curves["grad_norm"]) == ([41, 42, 43], [3.0, None, 1.0], [1.0, None, None])
        assert curves["time_s"] == pytest.approx([0.1, 0.2, 0.3], abs=1e-6)
        for name in ("", "noise.run.gz", "..%2F..%2Fetc%2Fpasswd", f"..%2Fruns%2F{path.name}"):
            assert service.get(f"/live/past/curves?run={name}").status == 404, name
        assert service.get("/live/past", Host="evil.example").status == 421


LINES, VALUES = "document.querySelectorAll('#chart path.line').length", "document.getElementById('values').innerText"


def until(tab: Tab, script: str, value: object) -> None:
    """Wait until an expression in the page has a value, or a text begins with it."""
    wait_until(lambda: (shown := tab.run(script)) == value or (isinstance(shown, str) and shown.startswith(str(value))))


def test_past_runs_in_a_browser(place: Path, flight_dir: Path, tmp_path: Path, program: Callable[[str], str]) -> None:
    """Six runs at most, over steps or time, smoothed; values by pointer and keyboard on a phone; readable on a desk, too."""
    for at in range(8):
        history = [step(number, 8.0 - at + (number % 2), 1.0) for number in range(1, 101)]
        values = {catalog.STEPS_RESUMED_FROM: 0.0} if at else {}
        kept.keep(run(f"run-{at}", history=history, last_s=history[-1].end_s + at, values=values), place, 9)
    with (
        Service(ExporterConfig(flight_dir=str(flight_dir))) as service,
        Browser(program("chromium"), tmp_path / "profile") as browser,
    ):
        desk, phone = (browser.tab(f"http://{service.address}/live/past", width=w, dark=w < 999) for w in (1280, 390))
        for tab, width in ((desk, 1280), (phone, 390)):
            until(tab, LINES, 3)
            tab.run("document.querySelectorAll('tbody input').forEach((one) => one.checked || one.click())")
            until(tab, LINES, 6)
            assert tab.complaints == []
            assert tab.run("document.documentElement.scrollWidth") <= width
            assert tab.run(CONTRASTS)[0][0] >= 4.5
            assert tab.run("[...document.querySelectorAll('input, select')].every((one) => one.labels.length)")
        assert phone.run(VALUES).splitlines()[0] == "run-7 step 100: 1"
        box = json.loads(phone.run("JSON.stringify(document.getElementById('chart').getBoundingClientRect())"))
        phone.call("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": box["left"] + 64, "y": box["top"] + 50})
        until(phone, VALUES, "run-7 step 1: 2")
        phone.call("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": 1, "y": 1})
        until(phone, VALUES, "run-7 step 100: 1")
        phone.run("document.getElementById('chart').focus()")
        phone.press("ArrowLeft", 37)
        assert phone.run("document.getElementById('chart').ariaValueText").startswith("run-7, step 99: 2; run-6, step 99: 3")
        phone.press("Home", 36)
        assert "step 1:" in phone.run(VALUES)
        phone.run("axis.value = 'time_s'; axis.dispatchEvent(new Event('input'))")
        assert phone.run(VALUES).splitlines()[0] == "run-7 after 10 s: 1"
        phone.run("smooth.value = 0.99; smooth.dispatchEvent(new Event('input'))")
        assert "run-7 after 10 s: 1.49" in phone.run(VALUES)
        assert phone.run("document.querySelectorAll('tbody input:checked').length") == 6
        assert "Six runs are drawn at most" in phone.run("said.textContent")
        phone.run("document.querySelector('tbody input').click()")
        until(phone, LINES, 5)
        phone.run("[...document.querySelectorAll('tbody input')].at(-1).click()")
        until(phone, f"{VALUES}.includes('run-0 (from its own first step)')", True)  # noqa: FBT003  # a value of JavaScript
        assert phone.complaints == []
