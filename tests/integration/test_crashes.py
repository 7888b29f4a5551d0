"""A rank that a fatal signal ends: it ends as it would without torchobs, and is told with the signal and the place."""

from __future__ import annotations

import subprocess
import sys
from signal import SIGABRT, SIGFPE, SIGKILL, SIGSEGV
from typing import TYPE_CHECKING

import pytest

from tests.support import ROOT, clean_environment, wait_until
from torchobs.diagnosis.diagnosis import diagnose
from torchobs.diagnosis.load import load_reports
from torchobs.exporter.config import ExporterConfig
from torchobs.ranks.scanner import Scanner

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SCRIPT = """
import ctypes, faulthandler, os, signal, sys, threading, time
import torchobs
class Crash:
    def read(self):
        ctypes.string_at(0)
crash = Crash().read
def native():
    # a thread of its own that knows nothing of Python
    libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
    libc.pthread_create(ctypes.byref(thread), None, ctypes.cast(libc.abort, ctypes.c_void_p), None)
    signal.pause()
"""
READ = "in read (SIGSEGV, a segmentation fault), before its first step was complete."


def run(flight_dir: Path, body: str, more: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the script: a process of its own, for the fork server's have handlers of their own."""
    environment = {**clean_environment(), "TORCHOBS_DIR": str(flight_dir), "PYTHONPATH": str(ROOT), **(more or {})}
    return subprocess.run(
        [sys.executable, "-c", f"{SCRIPT}\n{body}\n"], env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def said(flight_dir: Path) -> list[str]:
    """What is said of the one rank."""
    (report,), _ = load_reports(list(flight_dir.glob("*.flight")))
    return [finding.text for finding in diagnose(report)]


@pytest.mark.parametrize(
    ("body", "number", "told"),
    [
        ("torchobs.init(); crash()", SIGSEGV, READ),
        ("torchobs.init(); thread = threading.Thread(target=crash); thread.start(); thread.join()", SIGSEGV, READ),
        ("torchobs.init(); os.kill(os.getpid(), signal.SIGFPE)", SIGFPE, "(SIGFPE, an arithmetic error"),
        ("torchobs.init(); native()", SIGABRT, "crashed in a thread that ran no Python code (SIGABRT, "),
        ("torchobs.init(); torchobs.shutdown(); torchobs.init(); crash()", SIGSEGV, READ),
    ],
    ids=["main thread", "another thread", "sent", "native thread", "second session"],
)
def test_the_signal_and_the_place_are_told(flight_dir: Path, body: str, number: int, told: str) -> None:
    """By `inspect` and by the exporter; the script's own output and its status stay as they are."""
    plain, done = (
        run(flight_dir, body.replace("torchobs.init()", "0").replace("torchobs.shutdown()", "0")),
        run(flight_dir, body),
    )
    assert (done.returncode, done.stdout, done.stderr) == (-number, plain.stdout, plain.stderr)
    for path in sorted(flight_dir.glob("*.flight"), key=lambda one: one.stat().st_mtime_ns)[:-1]:
        path.unlink()  # the first session
    assert told in said(flight_dir)[0]
    scanner = Scanner(ExporterConfig(flight_dir=str(flight_dir)))
    try:
        (rank,) = wait_until(lambda: [rank for rank in scanner.scan().ranks if not rank.up])
        assert (rank.state, rank.reason) == ("failed", "crashed")
    finally:
        scanner.close()


@pytest.mark.parametrize(
    ("body", "number"),
    [
        ("torchobs.init(); os.kill(os.getpid(), signal.SIGKILL)", SIGKILL),
        ("faulthandler.enable(); torchobs.init(); crash()", SIGSEGV),
        ("torchobs.init(); faulthandler.enable(); crash()", SIGSEGV),
        ("torchobs.init(); faulthandler.disable(); crash()", SIGSEGV),
    ],
    ids=["no mark of SIGKILL", "the user's before", "the user's later", "switched off"],
)
def test_faulthandler_is_the_user_s(flight_dir: Path, body: str, number: int) -> None:
    """What it writes goes where it would go, and the rank is gone without a word."""
    done = run(flight_dir, body)
    assert done.returncode == -number
    assert ("Segmentation fault" in done.stderr) is ("enable()" in body)
    assert "vanished without a word" in said(flight_dir)[0]


def test_handlers_of_others_are_left_alone(flight_dir: Path) -> None:
    """A virtual machine in the process lives on SIGSEGV; with one signal taken none is."""
    look = "print(faulthandler.is_enabled())"
    done = run(flight_dir, f"signal.signal(signal.SIGBUS, print); torchobs.init(); {look}")
    assert (done.stdout, done.returncode) == ("False\n", 0)
    done = run(flight_dir, f"torchobs.init(); {look}; torchobs.shutdown(); {look}")
    assert (done.stdout.split(), done.returncode) == (["True", "False"], 0)


def test_children_and_what_comes_after_the_session_leave_no_mark(flight_dir: Path) -> None:
    """A worker that crashes, and an interpreter that crashes at its very end, are not the rank."""
    body = "torchobs.init()\nif not os.fork(): crash()\nassert os.wait()[1] == signal.SIGSEGV\ntorchobs.shutdown()\ncrash()"
    assert run(flight_dir, body).returncode == -SIGSEGV
    assert "finished in order" in said(flight_dir)[0]
    assert [path.stat().st_size for path in flight_dir.glob("*.lock")] == [0]
