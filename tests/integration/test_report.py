"""torchobs report: one page about a run, complete and safe."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import fork_server
from tests.chromium import Browser
from tests.diagnosis_files import Parsed
from tests.exporters import Service
from tests.integration.test_ui_chromium import CONTRASTS
from tests.otlp import Pushing, Receiver, to
from tests.rank_files import File
from tests.support import ROOT, clean_environment
from torchobs import catalog
from torchobs.cli import __main__ as dispatch
from torchobs.document.files import markdown
from torchobs.document.html import page
from torchobs.document.plots import draw
from torchobs.document.run import run_document
from torchobs.exporter.config import ExporterConfig, PushConfig
from torchobs.flight.details import encode_history
from torchobs.ranks import runs as load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECRET, ARGUMENT = "hunter2-secret", "--a-sentinel-argument"
HOSTILE = "</script><img src=x onerror=document.title='owned'>|`*_"
_CONTRAST = 4.5


@pytest.fixture(scope="module")
def trainings() -> Iterator[Path]:
    """A directory for each run: finished, raised (it diverged), killed, pair (one of two ranks was killed); and every."""
    root = Path(tempfile.mkdtemp(prefix="torchobs-report-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    started = [
        _start(root / "finished", "finish", TORCHOBS_RUN_ID="run-finished"),
        _start(root / "raised", "raise", TORCHOBS_RUN_ID="run-raised"),
        _start(root / "killed", "wait", TORCHOBS_RUN_ID="run-killed", TORCHOBS_RUN_DETAILS="false"),
        *(
            _start(root / "pair", how, TORCHOBS_RUN_ID="run-pair", TORCHOBS_RANK=str(rank), TORCHOBS_WORLD_SIZE="2")
            for rank, how in enumerate(("finish", "wait"))
        ),
    ]
    for process in started:
        if "wait" in process.args:  # type: ignore[operator]  # a list
            assert process.stdout is not None
            assert process.stdout.readline() == "trained\n"
            process.send_signal(signal.SIGKILL)
        process.wait(timeout=120)
        if process.stdout is not None:
            process.stdout.close()
    (root / "every").mkdir()
    for path in root.glob("*/r*"):
        shutil.copy2(path, root / "every")
    yield root
    shutil.rmtree(root)


def _start(directory: Path, how: str, **environ: str) -> subprocess.Popen[Any]:
    directory.mkdir(exist_ok=True)
    env = {**clean_environment(), "TORCHOBS_DIR": str(directory), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ}
    script = ROOT / "tests" / "scripts" / "dying.py"
    more = [ARGUMENT, "--api-key", SECRET, f"--url=https://me:{SECRET}@host/"] if how != "raise" else []
    return fork_server.Python(
        [sys.executable, str(script), how, *more], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )


def ran(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Status and output of a command."""
    status = dispatch.main([str(argument) for argument in arguments])
    return (status, *capsys.readouterr())


def text_of(path: Path) -> str:
    """What can be read on a page, and the texts of its drawings."""
    return Parsed(path.read_text()).text


def test_a_page_of_each_run(trainings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """How it ended and why, and the data behind it."""
    expected = {
        "finished": ("Rank 0 finished in order after step 60", "Learning rate", "Gradient norm by layer and time", "Goodput"),
        "raised": ("The loss turned infinite in step 48", "nonfinite loss", "(dots at the top)"),
        "killed": ("vanished without a word after step 60",),
        "pair": ("Only rank 1 failed", "Times are medians of the last steps", "Step time by rank"),
    }  # fmt: skip
    for name, texts in expected.items():
        output = tmp_path / f"{name}.html"
        assert ran(capsys, "report", trainings / name, "-o", output)[0] == 0
        shown = text_of(output)
        assert [text for text in texts if text not in shown] == [], name


def test_a_run_that_diverged_and_raised(trainings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exception with its line, when the loss went and after what, the layers, the rate."""
    status, out, _ = ran(capsys, "inspect", trainings / "raised")
    text = " ".join(out.split())
    assert status == 1
    assert re.search(r'Rank 0 ended by RuntimeError "[^"]+" at ', text)
    assert "dying.py:24 in <module>, after step 60." in text
    assert "The loss turned infinite in step 48, 1 step after the gradient norm rose" in text
    assert "The learning rate had risen 1e6-fold (from 0.01 to 10,000) in step 46." in text
    assert "Gradients were NaN in step 48" in text


def test_how_it_was_started_without_its_secrets(trainings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Command line, commit, versions, seed: in report, JSON and inspect, and nowhere the secret."""
    for name in ("r.html", "r.md", "r.json"):
        assert ran(capsys, "report", trainings / "finished", "-o", tmp_path / name)[0] == 0
        written = (tmp_path / name).read_text()
        assert SECRET not in written
        assert ARGUMENT.strip("-") in written.replace("\\", "")
    (rank,) = json.loads((tmp_path / "r.json").read_text())["ranks"]
    details = rank["details"]
    assert details["arguments"] == ["finish", ARGUMENT, "--api-key", "***", "--url=https://***@host/"]
    assert details["torch"]["seed"] == "0"
    assert details["torch"]["version"]
    assert details["git"]["commit"] == _commit()
    assert f"git commit {_commit()}" in ran(capsys, "inspect", trainings / "finished")[1]
    raw = b"".join(path.read_bytes() for path in (trainings / "finished").iterdir())
    assert SECRET.encode() not in raw
    assert ARGUMENT.encode() in raw


def _commit() -> str:
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def test_details_can_be_turned_off(trainings: Path) -> None:
    """Then nothing of the command line is in the file."""
    assert ARGUMENT.encode() not in b"".join(path.read_bytes() for path in (trainings / "killed").iterdir())


def test_the_json_is_whole(trainings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every step, every event and the history; there and back it is the same, and it has no number that JSON lacks."""
    assert ran(capsys, "report", trainings / "raised", "-o", tmp_path / "r.json")[0] == 0
    text = (tmp_path / "r.json").read_text()
    report = json.loads(text, parse_constant=pytest.fail)
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    (rank,) = report["ranks"]
    assert (rank["state"], rank["exit"]) == ("failed", {"reason": "exception", "code": 1})
    assert ([step["step"] for step in rank["steps"]], rank["steps"][-1]["loss"]) == ([*range(1, 61)], "NaN")
    assert "torchobs.memory.host.rss" in rank["history"]["names"]
    assert len(rank["history"]["rows"][-1]) == 2 + len(rank["history"]["names"])
    assert report["findings"] is not None


def test_copies_and_parts(trainings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A copy says that it is one; a part is read as far as it goes."""
    (flight,) = (trainings / "killed").glob("*.flight")
    copied = tmp_path / "copy"
    shutil.copy(flight, copied)
    assert ran(capsys, "report", copied, "-o", tmp_path / "r.html")[0] == 0
    assert "a copy: whether its process still runs cannot be seen" in text_of(tmp_path / "r.html")
    copied.write_bytes(flight.read_bytes()[: flight.stat().st_size // 2])
    assert ran(capsys, "report", copied, "-o", tmp_path / "r.html")[0] == 0
    assert "bytes are there" in text_of(tmp_path / "r.html")


def test_names_that_attack(flight_dir: Path, tmp_path: Path) -> None:
    """Of jobs, layers, scalars, events, settings: text in the page, in Markdown, and in file names."""
    file = File(flight_dir, job_name=HOSTILE, run_id=HOSTILE, host=HOSTILE, script=HOSTILE)
    file.step(1, 0.1)
    file.step(2, 0.2)
    file.writer.event(HOSTILE, {HOSTILE: HOSTILE, "kind": HOSTILE}, 2)
    file.writer.event(catalog.EVENT_SCALARS.name, {"names": [HOSTILE], "steps": [1], "values": [1.0]}, 2)
    file.writer.details.replace(json.dumps({"command": [HOSTILE, 3], "git": HOSTILE, "torch": {HOSTILE: HOSTILE}}).encode())
    names = [f"{catalog.GRAD_LAYER_NORM.name}{{{HOSTILE}}}"]
    file.writer.history.replace(encode_history(names, [(0.5, 1, (1.0,)), (1.0, 2, (2.0,))]))
    file.save()
    run = run_document(load.choose([file.path], None))
    written = page(run)
    assert "<img" not in written
    assert "<script" not in written
    assert HOSTILE in Parsed(written).text
    prose = [line for line in markdown(run).splitlines() if not line.startswith("    ")]  # indented: code
    assert "<img" not in "\n".join(prose)
    assert {path.parent for path in draw(run, tmp_path / "figures")} == {tmp_path / "figures"}


def test_a_long_run_says_where_its_steps_begin(flight_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The ring has the last 4,096 records; totals are of all."""
    file = File(flight_dir)
    for number in range(1, 5001):
        file.step(number, number * 0.01, duration_s=0.01)
        if not number % 500:
            file.writer.fold()
    file.save()
    assert ran(capsys, "report", file.path, "-o", tmp_path / "r.html")[0] == 0
    assert "keeps its last 4,096 records: step by step the report begins with step 905" in text_of(tmp_path / "r.html")


def test_runs_by_name(
    trainings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By id, or by its beginning; else what there is."""
    monkeypatch.chdir(tmp_path)
    status, output, _ = ran(capsys, "report", "run-rai", "--dir", trainings / "every")
    assert (status, "run-raised (1 rank) in report.html" in output) == (0, True)
    assert Path("report.html").exists()
    status, _, wrong = ran(capsys, "report", "nosuch", "--dir", trainings / "every")
    assert (status, "no run 'nosuch'" in wrong, "run-pair" in wrong) == (2, True, True)
    status, _, wrong = ran(capsys, "report", "run-pair", "--dir", trainings / "every", "-o", "r.txt")
    assert (status, "end it in .html, .md or .json" in wrong) == (2, True)
    monkeypatch.setattr(load, "find_existing", lambda *_: None)
    status, _, wrong = ran(capsys, "report", "./missing.flight")  # on a machine where nothing was ever trained, too
    assert (status, "no such file or directory" in wrong) == (2, True)


def test_list_of_runs(trainings: Path, flight_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each in a line: ranks, state, how it ended, steps, loss; and as JSON."""
    status, output, _ = ran(capsys, "runs", "--dir", trainings / "every")
    assert status == 0
    rows = {line.split()[0]: line.split() for line in output.splitlines()}
    assert rows["run-raised"][1:5] == ["dying", "1", "failed", "exception"]
    assert rows["run-finished"][3] == "finished"
    assert rows["run-pair"][1:4] == ["dying", "2", "lost"]
    listing = json.loads(ran(capsys, "runs", "--dir", trainings / "every", "--json")[1])
    assert {run["run_id"]: run["steps"] for run in listing["runs"]} == dict.fromkeys(
        ("run-finished", "run-raised", "run-killed", "run-pair"), 60
    )
    assert next(run["loss"] for run in listing["runs"] if run["run_id"] == "run-raised") == "NaN"
    status, output, _ = ran(capsys, "runs", "--dir", flight_dir)
    assert (status, "no runs in" in output) == (2, True)
    status, output, _ = ran(capsys, "runs", "--dir", flight_dir, "--json")
    assert (status, json.loads(output)["runs"]) == (2, [])


def test_two_runs_compared(trainings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was given differently, what came of it; as text, JSON and a page."""
    status, output, _ = ran(capsys, "compare", trainings / "finished", trainings / "raised")
    assert status == 0
    assert ARGUMENT in output
    assert SECRET not in output
    assert "step time" in output
    comparison = json.loads(ran(capsys, "compare", trainings / "finished", trainings / "raised", "--json")[1])
    differences = {entry["name"]: (entry["first"], entry["second"]) for entry in comparison["differences"]}
    assert differences["argument 1"] == ("finish", "raise")
    assert "torch" not in differences
    quantities = {entry["what"]: entry for entry in comparison["quantities"]}
    assert quantities["step time"]["first"] > 0
    assert {"speed", "host memory, greatest RSS", "goodput"} <= quantities.keys()
    assert ran(capsys, "compare", trainings / "finished", trainings / "raised", "-o", tmp_path / "c.html")[0] == 0
    assert "Two runs of dying compared" in text_of(tmp_path / "c.html")


def test_nothing_of_it_is_exported(trainings: Path, flight_dir: Path, receiver: Receiver) -> None:
    """Neither on any page of the exporter nor over OTLP is anything of details and history."""
    file = File(flight_dir)
    file.step(1, 0.5)
    file.writer.details.replace(json.dumps({"command": ["train.py", ARGUMENT]}).encode())
    file.save()
    with Pushing(flight_dir, PushConfig(metrics=to(receiver), traces=to(receiver), logs=to(receiver))) as pushing:
        pushing.look(1.0)
    sent = [request.body for request in receiver.taken]
    assert any(b"torchobs.steps" in body for body in sent)
    assert not any(ARGUMENT.encode() in body for body in sent)
    with Service(ExporterConfig(flight_dir=str(trainings / "finished"))) as service:
        pages = [service.get(path).body.decode() for path in ("/metrics", "/live", "/api/v1/ranks", "/api/v1/runs", "/")]
    assert "torchobs_steps_total" in pages[0]
    assert not [page for page in pages if ARGUMENT in page or SECRET in page]


def test_in_a_browser(
    trainings: Path, program: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No complaint, no request, no sideways scrolling on a phone, enough contrast by day and night; it prints."""
    assert ran(capsys, "report", trainings / "raised", "-o", tmp_path / "raised.html")[0] == 0
    assert ran(capsys, "report", trainings / "pair", "-o", tmp_path / "pair.html")[0] == 0
    assert ran(capsys, "compare", trainings / "finished", trainings / "raised", "-o", tmp_path / "compare.html")[0] == 0
    with Browser(program("chromium"), tmp_path / "profile") as browser:
        urls = [(tmp_path / f"{name}.html").as_uri() for name in ("raised", "pair", "compare")]
        for url in urls:
            for width, dark in ((1200, False), (360, True)):
                tab = browser.tab(url, width=width, dark=dark)
                assert tab.complaints == []
                assert tab.requests == [url]
                assert tab.run("document.documentElement.scrollWidth") <= width
                worst = tab.run(CONTRASTS)[0]
                assert worst[0] >= _CONTRAST, worst
                assert tab.run("document.querySelectorAll('svg:not([aria-label]):not([aria-hidden])').length") == 0
                assert tab.run("[...document.querySelectorAll('table')].every(t => t.caption.textContent && t.tHead)")
        pdf = browser.tab(urls[0]).call("Page.printToPDF", {"printBackground": True})["data"]
        assert pdf.startswith("JVBER")  # %PDF


NOTEBOOK = """
import sys, time
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.display_pub = CapturingDisplayPublisher(parent=shell, shell=shell)
import torch, torchobs
torchobs.init()
torchobs.shutdown()
assert not shell.display_pub.outputs  # of a terminal's shell
shell.kernel = object()  # what a Jupyter kernel's shell has
from torchobs.runtime import notebook
notebook.INTERVAL_S, notebook._QUIET_S = 0.1, 0.5
session = torchobs.init(grad_interval=1, job_name="gpt <x>")
status = dict(session._samples)["notebook"].__self__
status._page = notebook.PageAddress("/nowhere/r0.flight", says=False)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
until = time.monotonic() + 1.5
while time.monotonic() < until:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
status._page.url = "http://127.0.0.1:9/"
time.sleep(1.0)
from torchobs import debug
html = debug.report()._repr_html_()
assert html.startswith("<iframe") and "Gradient norm" in html
assert str(debug.report()).startswith("# ")
assert debug.report("own.md").read_text().startswith("# ")
assert all(path.suffix == ".svg" for path in debug.plots("figures", format="svg"))
torchobs.shutdown()
try:
    debug.report("late.html")
except RuntimeError as error:
    assert "torchobs.init()" in str(error)
for output in shell.display_pub.outputs:
    print(output["transient"]["display_id"], output["data"]["text/html"])
"""


def test_in_a_notebook(flight_dir: Path, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    """One line that updates itself, in a kernel alone; report and figures from within.

    Step, loss and speed; a run without a step for long says so; a link to the page once there is one.
    """
    environ = {**clean_environment(), "TORCHOBS_DIR": str(flight_dir), "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    process = start(sys.executable, "-c", NOTEBOOK, torch=True, env=environ, cwd=tmp_path)
    assert process.wait(timeout=120) == 0, (tmp_path / "0.log").read_text()
    lines = [line for line in (tmp_path / "0.log").read_text().splitlines() if "torchobs</b>" in line]
    assert len({line.split()[0] for line in lines}) == 1
    assert "gpt &lt;x&gt;" in lines[0]
    assert "waiting for the first step" in lines[0]
    assert any("steps/s" in line and "loss" in line and "gradient norm" in line for line in lines)
    link = '<a href="http://127.0.0.1:9/" target="_blank" rel="noopener">live page</a>'
    assert any("no step for" in line and link in line for line in lines)
    assert "ended after step" in lines[-1]
    assert (tmp_path / "figures" / "loss.svg").stat().st_size > 1000
