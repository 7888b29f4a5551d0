"""Messages, to real servers and commands: of a killed rank, in spite of trouble, and who never sees the URL."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from tests import fork_server
from tests.diagnosis_files import START_S, facts, steps
from tests.exporters import Service
from tests.integration.test_node import announced, exporters
from tests.otlp import Answer, Receiver, Request
from tests.support import ROOT, clean_environment, free_port, wait_until
from torchobs import catalog
from torchobs.config import settings
from torchobs.config.options import TARGET
from torchobs.exporter import notify
from torchobs.exporter.config import ExporterConfig
from torchobs.exporter.notify import Message, deliver
from torchobs.exporter.outcomes import Outcomes
from torchobs.ranks.rank_view import run_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECRET = "t0p-s3cret"
TRAIN = """
import sys, time, torch, torchobs
layer = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for step in range(1 << 30):
    optimizer.zero_grad()
    loss = layer(torch.ones(1, 2)).sum()
    if step > 20 and "nan" in sys.argv:
        loss = loss * float("nan")
    loss.backward()
    optimizer.step()
    if step == 5:
        print("ready", flush=True)
    if step == 9 and "hang" in sys.argv:
        time.sleep(60)
    if step == 9 and "raise" in sys.argv:
        raise KeyError("at its end")
    time.sleep(0.02)
"""
MESSAGE = Message("words", "failed", "job", "run", "host", "restart")


@pytest.fixture
def run(tmp_path: Path, flight_dir: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a training by `torchobs run`, and wait until it trains; all exporters of its directory end with the test."""
    started: list[subprocess.Popen[str]] = []
    (tmp_path / "train.py").write_text(TRAIN)

    def begin(options: tuple[str, ...], *arguments: str, **environ: str) -> subprocess.Popen[str]:
        env = {**clean_environment(), "TORCHOBS_DIR": str(flight_dir), "PYTHONPATH": str(ROOT), **environ}
        argv = (sys.executable, "-m", "torchobs", "run", "--address", "127.0.0.1:0", *options, "train.py", *arguments)
        with (tmp_path / "log").open("a") as log:
            process = subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=log, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()
    for exporter in exporters(flight_dir):
        with suppress(psutil.NoSuchProcess):
            exporter.kill()


def texts(receiver: Receiver) -> list[str]:
    """What has arrived."""
    return [json.loads(request.body)["text"] for request in receiver.taken]


@pytest.mark.parametrize("option", [True, False], ids=["option", "variable of a run that finds an exporter"])
def test_a_killed_rank_sends_its_message_and_keeps_its_secret(
    run: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
    flight_dir: Path,
    option: bool,  # noqa: FBT001  # two ways
) -> None:
    """One message, with the words of the page, culprit, action, link and command; the URL is nowhere that others look."""
    with Receiver() as receiver:
        url = f"{receiver.url}/{SECRET}"
        if option:
            process = run(("--notify", url), TORCHOBS_RUN_ID="mine")
        else:
            run((), TORCHOBS_RUN_ID="other")
            announced(flight_dir)
            process = run((), TORCHOBS_RUN_ID="mine", TORCHOBS_NOTIFY=url)
        page = announced(flight_dir).url
        time.sleep(1.5)  # the exporter has seen the rank
        process.send_signal(signal.SIGKILL)
        (text,) = wait_until(lambda: texts(receiver), 40)
        everything = [httpx.get(f"{page}{path}", trust_env=False, timeout=10).text for path in ("", "metrics", "api/v1/ranks")]
        everything += [" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])]
        everything += [path.read_bytes().decode(errors="replace") for path in flight_dir.iterdir() if path.is_file()]
        asked = (sys.executable, "-m", "torchobs", "inspect", "--json", str(flight_dir))
        everything += [subprocess.run(asked, capture_output=True, text=True, check=False, cwd=ROOT).stdout]
        everything += [(tmp_path / "log").read_text()]
    assert text.startswith("torchobs: train mine on ")
    assert " failed.\n" in text
    assert "vanished without a word" in text
    assert "action: unknown." in text
    assert f"page: {page.replace('127.0.0.1', 'localhost')}?run=train%2Fmine (from elsewhere: ssh -L " in text
    assert f"more: torchobs inspect {flight_dir} --run mine" in text
    assert [seen for seen in everything if SECRET in seen] == []
    time.sleep(2)
    assert len(receiver.requests) == 1


def test_the_command_line_is_pythons_own_and_the_recorded_one_without_the_url(
    run: Callable[..., subprocess.Popen[str]],
) -> None:
    """`ps` shows the script's arguments and none of the secret, in the process that was asked and the same one."""
    process = run(("--no-exporter", f"--notify=cat {SECRET}"), "--lr", "3e-4")
    assert psutil.Process(process.pid).cmdline()[1:] == [
        "-m", "torchobs", "run", "--address", "127.0.0.1:0", "--no-exporter", "train.py", "--lr", "3e-4",
    ]  # fmt: skip


def collected(tmp_path: Path) -> list[dict[str, Any]]:
    """What a command has got."""
    return [json.loads(line) for line in (tmp_path / "got").read_text().splitlines()] if (tmp_path / "got").exists() else []


def test_a_command_gets_each_kind_once(tmp_path: Path, flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN while it trains, then its failure; not the second failure within ten minutes, nor one of before the exporter."""
    monkeypatch.setattr(notify, "SETTLED_S", 0.5)
    (tmp_path / "train.py").write_text(TRAIN.replace("layer =", "torchobs.init(job_name='job', run_id='run')\nlayer =", 1))
    env = {**clean_environment(), "TORCHOBS_DIR": str(flight_dir), "PYTHONPATH": str(ROOT)}

    def trained(*arguments: str) -> subprocess.Popen[str]:
        argv = (sys.executable, str(tmp_path / "train.py"), *arguments)
        return fork_server.Python(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    command = f"sh -c 'cat >> {tmp_path}/got; echo >> {tmp_path}/got'"
    with Service(ExporterConfig(flight_dir=str(flight_dir), notify=command)):
        process = trained("nan")
        (nan,) = wait_until(lambda: collected(tmp_path), 40)
        assert (nan["kind"], nan["job_name"], nan["run_id"], nan["action"]) == ("nan", "job", "run", None)
        assert "has NaN or infinity." in nan["text"]
        process.kill()
        process.wait()
        failed = wait_until(lambda: collected(tmp_path)[1:], 40)
        assert [(one["kind"], one["action"]) for one in failed] == [("failed", "unknown")]
        assert trained("raise").wait() == 1
        time.sleep(4)
        assert len(collected(tmp_path)) == 2
    monkeypatch.setattr(notify, "STALE_S", -60.0)
    with Service(ExporterConfig(flight_dir=str(flight_dir), notify=command)):
        time.sleep(4)
    assert len(collected(tmp_path)) == 2


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        ({"state": "hung", "reason": "", "up": True}, ["hung"]),
        ({"state": "failed", "reason": "crashed", "exit_code": 139}, ["failed"]),
        ({"state": "finished", "reason": "finished"}, []),
        ({"state": "finished", "reason": "finished", "last_s": START_S + 601}, ["ended"]),
        ({"state": "failed", "reason": "terminated", "exit_code": 143, "last_s": START_S + 601}, ["ended"]),
        ({"state": "alive", "reason": "", "up": True, "values": {(catalog.HW_STATUS, "GPU-0", "gpu", "failed"): 1}}, ["error"]),
        ({"state": "failed", "reason": "crashed", "exit_code": 139, "last_s": START_S - 61}, []),
    ],
)
def test_a_run_is_worth_messages_of_these_kinds(given: dict[str, Any], kinds: list[str]) -> None:
    """Its failure, whatever its age; its end if it was long; trouble of its hardware; nothing that ended long before."""
    assert [*notify.trouble(run_of([facts(steps(50), **given)], 1, 1), START_S)] == kinds


def delivered(answer: Callable[[Request], Answer], path: str = "", scheme: str = "") -> list[Request]:
    """Send a message to a server that answers so: the requests until it was sent or given up."""
    with Receiver(answer) as receiver:
        deliver(f"{scheme}{receiver.url}{path}", MESSAGE, Event())
        return receiver.requests


def test_a_message_comes_in_spite_of_trouble(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Servers that are slow, fail for a while, refuse, redirect, are down: with ever longer pauses, for a limited time."""
    caplog.set_level("INFO")
    monkeypatch.setattr(notify, "FIRST_PAUSE_S", 0.1)
    monkeypatch.setattr(notify, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(notify, "RETRIED_S", 5.0)
    answers = iter([Answer(503), Answer(hold_s=1.0), Answer(429), Answer()])
    requests = delivered(lambda _: next(answers), f"/{SECRET}")
    assert [json.loads(request.body) for request in requests] == [{"text": "words"}] * 4
    pauses = [after.at_s - before.at_s for before, after in pairwise(requests)]
    assert 0.1 <= pauses[0] < pauses[2]
    for status in (302, 307, 400, 404, 410):
        with Receiver() as elsewhere:
            moved = Answer(status, {"Location": f"{elsewhere.url}/{SECRET}"})
            assert len(delivered(lambda _, moved=moved: moved, f"/{SECRET}")) == 1  # type: ignore[misc]
            assert elsewhere.requests == []
    (plain,) = delivered(lambda _: Answer(), scheme="ntfy:")
    assert (plain.body, plain.headers["content-type"]) == (b"words", "text/plain; charset=utf-8")
    monkeypatch.setattr(notify, "RETRIED_S", 0.5)
    began_s = time.monotonic()
    deliver(f"http://127.0.0.1:{free_port()}/{SECRET}", MESSAGE, Event())
    deliver(f"https://no-such-host.invalid/{SECRET}", MESSAGE, Event())
    deliver(f"false {SECRET}", MESSAGE, Event())
    assert time.monotonic() - began_s < 20
    lines = caplog.text
    assert SECRET not in lines
    assert "sent" in lines
    assert "given up: status 302" in lines
    assert "given up: ConnectionRefusedError" in lines


def test_a_server_that_never_answers_keeps_nobody_waiting(
    flight_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Metrics are served while a message hangs, and an exporter that is to end in a hurry ends."""
    monkeypatch.setattr(notify, "SETTLED_S", 0.1)
    monkeypatch.setattr(notify, "RETRIED_S", 1.0)
    (tmp_path / "train.py").write_text(TRAIN.replace("layer =", "torchobs.init()\nlayer =", 1))
    env = {**clean_environment(), "TORCHOBS_DIR": str(flight_dir), "PYTHONPATH": str(ROOT)}
    with Receiver(lambda _: Answer(hold_s=8.0)) as receiver:
        service = Service(ExporterConfig(flight_dir=str(flight_dir), notify=receiver.url))
        with service:
            argv = (sys.executable, str(tmp_path / "train.py"), "raise")
            assert fork_server.run(argv, env=env, capture_output=True).returncode == 1
            wait_until(lambda: receiver.requests, 20)
            began_s = time.monotonic()
            assert "torchobs_rank_exit" in service.page()
            assert time.monotonic() - began_s < 1
            assert receiver.taken == []


def test_a_hang_is_a_message(tmp_path: Path, flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real rank that makes no step any more; it lives, so nothing is to be done by a machine yet."""
    monkeypatch.setattr(notify, "SETTLED_S", 0.5)
    (tmp_path / "train.py").write_text(TRAIN.replace("layer =", "torchobs.init()\nlayer =", 1))
    env = {**clean_environment(), "TORCHOBS_DIR": str(flight_dir), "PYTHONPATH": str(ROOT)}
    config = ExporterConfig(flight_dir=str(flight_dir), hang_timeout_s=1.0, notify=f"sh -c 'cat >> {tmp_path}/got'")
    with Service(config), fork_server.Python((sys.executable, str(tmp_path / "train.py"), "hang"), env=env) as process:
        (hung,) = wait_until(lambda: collected(tmp_path), 40)
        assert (hung["kind"], hung["action"]) == ("hung", None)
        assert " hangs.\n" in hung["text"]
        process.kill()


def test_what_cannot_be_looked_at_keeps_no_exporter(
    flight_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A fault of our own costs the messages, is in the log, and neither the page nor the exporter's end."""

    def broken(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(Outcomes, "read", broken)
    env = {**clean_environment(), "TORCHOBS_DIR": str(flight_dir), "PYTHONPATH": str(ROOT)}
    done = fork_server.run((sys.executable, "-c", "import torchobs; torchobs.init(); torchobs.step()"), env=env)
    assert done.returncode == 0
    with Service(ExporterConfig(flight_dir=str(flight_dir), notify="cat")) as service:
        wait_until(lambda: "a look at the runs failed" in caplog.text)
        assert service.state() == "finished"


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("https://hooks.example/services/T0/B0/x", True), ("ntfy:http://localhost:8080/topic", True), ("notify-send -", True),
        ("https://", False), ("http://user:word@host/", False), ("https://host/a b", False), ("ntfy:host/topic", False),
        ("mail 'unfinished", False),
    ],
)  # fmt: skip
def test_what_cannot_be_a_target_is_refused(text: str, valid: bool) -> None:  # noqa: FBT001  # a column
    """And is not repeated in the complaint."""
    if valid:
        assert TARGET.parse(text) == text
        return
    argv = (sys.executable, "-m", "torchobs", "run", "--notify", text, "train.py")
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, env=clean_environment() | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 2
    assert (repr(text) in done.stderr, "--notify: expected a URL" in done.stderr) == (False, True)
    _, problems = settings.resolve({}, {"TORCHOBS_NOTIFY": text})
    assert [str(problem).split(";")[0] for problem in problems] == ["TORCHOBS_NOTIFY is not repeated here"]
