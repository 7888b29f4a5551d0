"""Messages, to real servers and commands: of a killed rank, in spite of trouble, and who never sees the URL."""

from __future__ import annotations

import json
import math
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

from tests.diagnosis_files import START_S, facts, steps
from tests.exporters import Service
from tests.integration.test_node import announced, exporters
from tests.otlp import Answer, Receiver, Request
from tests.rank_files import live_rank, train
from tests.support import ROOT, clean_environment, free_port, wait_until
from torchobs import catalog
from torchobs.cli import __main__ as dispatch
from torchobs.config import settings
from torchobs.config.options import TARGET
from torchobs.exporter import notify
from torchobs.exporter.config import ExporterConfig
from torchobs.exporter.notify import Message, deliver
from torchobs.flight.layout import Exit
from torchobs.ranks import state
from torchobs.ranks.rank_view import run_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Popen = subprocess.Popen[str]

SECRET = "t0p-s3cret"
SCRIPT = str(ROOT / "tests" / "scripts" / "plain_training.py")
MESSAGE = Message("words", "failed", "job", "run", "host", "restart")


@pytest.fixture
def run(start: Callable[..., Popen], tmp_path: Path, flight_dir: Path) -> Iterator[Callable[..., Popen]]:
    """Start a training by `torchobs run`, and wait until it trains; all exporters of its directory end with the test."""
    env = {**clean_environment(), "TORCHOBS_DIR": str(flight_dir), "PYTHONPATH": str(ROOT)}

    def begin(options: tuple[str, ...], *arguments: str, **environ: str) -> Popen:
        argv = (sys.executable, "-m", "torchobs", "run", "--address", "127.0.0.1:0", *options, SCRIPT, "10000", *arguments)
        with (tmp_path / "log").open("a") as log:  # with a target as an option it begins anew, in a process without torch
            process = start(*argv, torch=not options, env={**env, **environ}, stdout=subprocess.PIPE, stderr=log)
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        return process

    yield begin
    for exporter in exporters(flight_dir):
        with suppress(psutil.NoSuchProcess):
            exporter.kill()


def test_a_killed_rank_sends_its_message_and_keeps_its_secret(
    run: Callable[..., Popen], tmp_path: Path, flight_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One message, with the words of the page, culprit, action, link and command; the URL is nowhere that others look.

    Also of a run that finds the exporter of another one, which sends elsewhere. `ps` shows the script's arguments alone.
    """
    with Receiver() as receiver:
        run((), TORCHOBS_RUN_ID="other", TORCHOBS_NOTIFY=f"cat {SECRET}")
        page = announced(flight_dir).url
        process = run((f"--notify={receiver.url}/{SECRET}",), "--lr", "3e-4", TORCHOBS_RUN_ID="mine")
        argv = psutil.Process(process.pid).cmdline()[1:]
        assert argv == ["-m", "torchobs", "run", "--address", "127.0.0.1:0", SCRIPT, "10000", "--lr", "3e-4"]
        wait_until(lambda: 'run_id="mine"' in httpx.get(f"{page}metrics", trust_env=False, timeout=10).text)
        process.send_signal(signal.SIGKILL)
        (message,) = wait_until(lambda: receiver.taken, 40)
        text = json.loads(message.body)["text"]
        everything = [httpx.get(f"{page}{path}", trust_env=False, timeout=10).text for path in ("", "metrics", "api/v1/ranks")]
        everything += [" ".join(other.info["cmdline"] or ()) for other in psutil.process_iter(["cmdline"])]
        everything += [path.read_bytes().decode(errors="replace") for path in flight_dir.iterdir() if path.is_file()]
        dispatch.main(["inspect", "--json", str(flight_dir)])
        everything += [capsys.readouterr().out, (tmp_path / "log").read_text()]
        time.sleep(1)
    assert text.startswith("torchobs: plain_training mine on ")
    assert " failed.\n" in text
    assert "vanished without a word" in text
    assert "action: unknown." in text
    assert f"page: {page.replace('127.0.0.1', 'localhost')}?run=plain_training%2Fmine (from elsewhere: ssh -L " in text
    assert f"more: torchobs inspect {flight_dir} --run mine" in text
    assert [public for public in everything if SECRET in public] == []
    assert len(receiver.requests) == 1


def collected(tmp_path: Path) -> list[dict[str, Any]]:
    """What a command has got."""
    return [json.loads(line) for line in (tmp_path / "got").read_text().splitlines()] if (tmp_path / "got").exists() else []


def ended(flight_dir: Path) -> None:
    """A rank that has just ended by an exception."""
    writer = live_rank(flight_dir)
    train(writer, [1, 2, 3])
    writer.exit(Exit.EXCEPTION, 1)
    writer.close()


def test_a_command_gets_each_kind_once(tmp_path: Path, flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN while it trains, then its failure; not the second failure within ten minutes."""
    monkeypatch.setattr(notify, "SETTLED_S", 0.5)
    monkeypatch.setattr(state, "UNRESPONSIVE_AFTER_S", 600.0)  # its heartbeat is the test's
    command = f"sh -c 'cat >> {tmp_path}/got; echo >> {tmp_path}/got'"
    with Service(ExporterConfig(flight_dir=str(flight_dir), notify=command)):
        writer = live_rank(flight_dir)
        for step in range(1, 31):
            train(writer, [step], loss=2.0 if step < 20 else math.nan)
        (nan,) = wait_until(lambda: collected(tmp_path), 40)
        assert (nan["kind"], nan["job_name"], nan["run_id"], nan["action"]) == ("nan", "gpt", "run-1", None)
        assert "has NaN or infinity." in nan["text"]
        writer.close()
        failed = wait_until(lambda: collected(tmp_path)[1:], 40)
        assert [(message["kind"], message["action"]) for message in failed] == [("failed", "unknown")]
        ended(flight_dir)
        time.sleep(2)
        assert len(collected(tmp_path)) == 2


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({"state": "hung", "reason": "", "up": True}, ["hung"]),
        ({"state": "unresponsive", "reason": "", "up": True, "beat_age_s": 121.0}, ["hung"]),
        ({"state": "unresponsive", "reason": "", "up": True, "beat_age_s": 90.0}, []),
        ({"state": "failed", "reason": "crashed", "exit_code": 139}, ["failed"]),
        ({"state": "finished", "reason": "finished"}, []),
        ({"state": "finished", "reason": "finished", "last_s": START_S + 601}, ["ended"]),
        ({"state": "failed", "reason": "terminated", "exit_code": 143, "last_s": START_S + 601}, ["ended"]),
        ({"state": "alive", "reason": "", "up": True, "values": {(catalog.HW_STATUS, "GPU-0", "gpu", "failed"): 1}}, ["error"]),
        ({"state": "failed", "reason": "crashed", "exit_code": 139, "last_s": START_S - 61}, []),
    ],
)
def test_a_run_is_worth_messages_of_these_kinds(fields: dict[str, Any], kinds: list[str]) -> None:
    """Its failure, whatever its age; its end if it was long; trouble of its hardware; nothing that ended long before."""
    assert [*notify.trouble(run_of([facts(steps(50), **fields)], 1, 1), START_S)] == kinds


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
    assert SECRET not in caplog.text
    assert "sent" in caplog.text
    assert "given up: status 302" in caplog.text
    assert "given up: ConnectionRefusedError" in caplog.text


def test_a_server_that_never_answers_keeps_nobody_waiting(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics are served while a message hangs, and an exporter that is to end in a hurry ends."""
    monkeypatch.setattr(notify, "SETTLED_S", 0.1)
    monkeypatch.setattr(notify, "RETRIED_S", 1.0)
    monkeypatch.setattr(notify, "TIMEOUT_S", 2.0)
    ended(flight_dir)
    with Receiver(lambda _: Answer(hold_s=8.0)) as receiver:
        service = Service(ExporterConfig(flight_dir=str(flight_dir), notify=receiver.url))
        with service:
            wait_until(lambda: receiver.requests, 20)
            began_s = time.monotonic()
            assert "torchobs_rank_exit" in service.page()
            assert time.monotonic() - began_s < 1
            assert receiver.taken == []


def test_what_cannot_be_a_target_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """And is not repeated in the complaint."""
    for text in ("https://hooks.example/services/T0/B0/x", "ntfy:http://localhost:8080/topic", "notify-send -"):
        assert TARGET.parse(text) == text
    for text in ("https://", "http://user:word@host/", "https://host/a b", "ntfy:host/topic", "mail 'unfinished"):
        with pytest.raises(SystemExit, match="2"):
            dispatch.main(["run", "--notify", text, "train.py"])
        said = capsys.readouterr().err
        assert (repr(text) in said, "--notify: expected a URL" in said) == (False, True)
        _, problems = settings.resolve({}, {"TORCHOBS_NOTIFY": text})
        assert [str(problem).split(";")[0] for problem in problems] == ["TORCHOBS_NOTIFY is not repeated here"]
