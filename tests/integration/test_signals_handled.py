"""Ends by a signal that the script handles itself: the signal is named, the status is Python's, and nothing is in between."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from tests import fork_server, support
from torchobs import catalog
from torchobs.diagnosis.diagnosis import diagnose
from torchobs.diagnosis.load import load_reports

if TYPE_CHECKING:
    from pathlib import Path

    from torchobs.diagnosis.rank_report import RankReport

SCRIPT = """
import functools, os, signal, sys, time, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
class Preempted(Exception):
    pass
def train(steps):
    for _ in range(steps):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
def send(number):
    train(20)
    signal.setitimer(signal.ITIMER_REAL, 0.2) if number == signal.SIGALRM else os.kill(os.getpid(), number)
    train(1_000_000)
class Handler:
    def __call__(self, number, frame):
        raise Preempted("secret")
def leave(status, number, frame):
    sys.exit(status)
def fail(*given):
    raise Preempted("secret")
def interrupt(number, frame):
    raise KeyboardInterrupt
"""
TOLD = "was told to end (SIGTERM: by the scheduler, the launcher or a person) after step"
ENDS = {
    # body: status, reason, what is said
    "signal.signal(signal.SIGTERM, functools.partial(leave, 0)); send(signal.SIGTERM)": (
        0, "finished", "; SIGTERM had told it to end",
    ),
    "signal.signal(signal.SIGTERM, functools.partial(leave, 1)); send(signal.SIGTERM)": (
        1, "terminated", "; it left with exit status 1",
    ),
    "signal.signal(signal.SIGTERM, Handler()); send(signal.SIGTERM)": (
        1, "terminated", "; on that it raised __main__.Preempted",
    ),
    "signal.signal(signal.SIGTERM, interrupt); send(signal.SIGTERM)": (-2, "terminated", TOLD),
    "signal.signal(signal.SIGUSR1, fail); signal.signal(signal.SIGALRM, fail); send(signal.SIGALRM)": (
        1, "exception", "in fail, raised by the handler of SIGALRM, after step",
    ),
    "signal.signal(signal.SIGUSR1, functools.partial(leave, 3)); send(signal.SIGUSR1)": (
        3, "exit_code", "left with exit status 3 on SIGUSR1, which it handled, after step",
    ),
    "signal.signal(signal.SIGINT, fail); send(signal.SIGINT)": (
        1, "interrupted", "; on that it raised __main__.Preempted",
    ),
    "send(signal.SIGINT)": (-2, "interrupted", "was interrupted (Ctrl-C, SIGINT) after step 20."),
    "try:\n send(signal.SIGINT)\nexcept KeyboardInterrupt:\n raise SystemExit(1)": (
        1, "interrupted", "; it left with exit status 1",
    ),
    "try:\n send(signal.SIGINT)\nexcept KeyboardInterrupt:\n sys.exit(0)": (0, "finished", "; SIGINT had told it to end"),
    "signal.signal(signal.SIGTERM, fail)\ntry:\n send(signal.SIGTERM)\nexcept Preempted:\n sys.exit(1)": (
        1, "terminated", "; on that it raised __main__.Preempted",
    ),
    "signal.signal(signal.SIGTERM, fail)\ntry:\n send(signal.SIGTERM)\nexcept Preempted:\n train(30)": (
        0, "finished", "in order",
    ),
    "signal.signal(signal.SIGTERM, functools.partial(leave, 1))\ntry:\n send(signal.SIGTERM)\nexcept SystemExit:\n train(30)": (
        0, "finished", "in order",
    ),
    "train(20)\nfail()": (1, "exception", "in fail, called"),
}  # fmt: skip


def run(tmp_path: Path, flight_dir: Path, body: str) -> tuple[int, str, RankReport]:
    """Run the script under `torchobs run`; return its status, what it wrote to standard error, and the report."""
    (tmp_path / "train.py").write_text(f"{SCRIPT}{body}\n")
    environment = {**support.clean_environment(), "TORCHOBS_DIR": str(flight_dir), "PYTHONPATH": str(support.ROOT)}
    argv = (sys.executable, "-m", "torchobs", "run", "--no-exporter", "train.py")
    child = fork_server.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    reports, _ = load_reports(list(flight_dir.glob("*.flight")))
    return child.returncode, child.stderr, reports[0]


@pytest.mark.parametrize("body", ENDS)
def test_the_signal_is_named(tmp_path: Path, flight_dir: Path, body: str) -> None:
    """Whose handler it was that left, raised, or was left by an exception; not of what training went on after."""
    status, reason, told = ENDS[body]
    found, error, report = run(tmp_path, flight_dir, body)
    text = diagnose(report)[0].text
    assert (found, report.reason) == (status, reason), error
    assert told in text or told == "in fail, called"
    assert not (told in {"in order", "in fail, called"} and "SIG" in text)
    assert f"{support.ROOT / 'torchobs'}{os.sep}" not in error, "no frame of ours"
    raised = report.events_named(catalog.EVENT_EXCEPTION)
    assert all(fact.attributes.get("exception.message", "secret") == "secret" for fact in raised)


CLOSING = """
import atexit
from torchobs.flight.writer.writer import FlightWriter
from torchobs.probes.step.steps import StepProbe
before = {FlightWriter.exit: "exit", StepProbe.remove: "remove"}
left = []
for function, name in before.items():
    def interrupted(*given, function=function, name=name):
        if name not in left:
            left.append(name)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        return function(*given)
    setattr({"exit": FlightWriter, "remove": StepProbe}[name], name, interrupted)
backward = torch.autograd.backward
train(20)
"""


def test_ctrl_c_at_the_very_end_is_late(tmp_path: Path, flight_dir: Path) -> None:
    """While our own hooks go and the file is closed: what it interrupts is done all the same, and no traceback is shown."""
    status, error, report = run(tmp_path, flight_dir, CLOSING)
    assert (status, report.reason, error) == (0, "finished", "")


def test_ctrl_c_in_shutdown_is_the_script_s(tmp_path: Path, flight_dir: Path) -> None:
    """It comes out when everything is removed, and the script may handle it."""
    body = "import torchobs\ntry:\n torchobs.shutdown()\nexcept KeyboardInterrupt:\n print('interrupted', file=sys.stderr)\n"
    restored = "assert 'torchobs' not in torch.optim.Optimizer.zero_grad.__module__\nassert not torchobs.Session().active\n"
    status, error, report = run(tmp_path, flight_dir, f"{CLOSING}{body}{restored}train(3)\n")
    assert (status, error.strip(), report.reason) == (0, "interrupted", "finished")
    assert report.last_step == 20


def test_an_exception_is_told_though_a_handler_interrupts_its_recording(tmp_path: Path, flight_dir: Path) -> None:
    """As torch's for SIGCHLD does, where a worker dies while its end is told to the main process by a closed connection."""
    script = f"""
{SCRIPT}
import torchobs
from torchobs.probes.lifecycle import exits
describe = exits.describe
def interrupted(error, **given):
    exits.describe = describe
    os.kill(os.getpid(), signal.SIGUSR1)
    return describe(error, **given)
exits.describe = interrupted
signal.signal(signal.SIGUSR1, fail)
torchobs.init()
train(3)
raise ConnectionResetError("by a worker")
"""
    (tmp_path / "train.py").write_text(script)
    environment = {**support.clean_environment(), "TORCHOBS_DIR": str(flight_dir), "PYTHONPATH": str(support.ROOT)}
    done = fork_server.run(
        (sys.executable, "train.py"), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 1
    (report,), _ = load_reports(list(flight_dir.glob("*.flight")))
    (text, *_) = [finding.text for finding in diagnose(report)]
    assert 'ended by ConnectionResetError "by a worker" at' in text
