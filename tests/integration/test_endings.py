"""How ranks end, each in a real process: by an exception, a status, a signal, a crash, as somebody's child, or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from signal import SIGABRT, SIGSEGV
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

import torchobs
from tests import flights, fork_server
from tests.support import NEEDS_COMPILER, ROOT, clean_environment, wait_until
from tests.training import loss_of, mlp, recording, surface
from torchobs import catalog
from torchobs.diagnosis.health import diagnose
from torchobs.exporter.config import ExporterConfig
from torchobs.exporter.outcomes import Outcomes
from torchobs.flight import reader
from torchobs.flight.layout import Exit
from torchobs.flight.native import compiled
from torchobs.flight.writer import FlightWriter
from torchobs.probes.exits import Ending
from torchobs.probes.steps import StepProbe
from torchobs.ranks.runs import load
from torchobs.ranks.scanner import Scanner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchobs.ranks.snapshot import Rank


COMPILED = pytest.mark.skipif(compiled() is None, reason=NEEDS_COMPILER)
FROM_A_TERMINAL = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
"""Where the tests themselves run under nohup"""
WAITS = "import time\nprint('ready', flush=True)\ntime.sleep(60)\n"
HOLDS_THE_GIL = "import re\nprint('ready', flush=True)\nre.match('(a|aa)+$' , 'a' * 200 + 'b')\n"
ENDS_CHILDREN = """
import os, signal
for _ in range(50):
    child = os.fork()
    if not child: signal.pause()
    os.kill(child, signal.SIGTERM)
    assert os.waitpid(child, 0)[1] == signal.SIGTERM
"""


def environment(flight_dir: Path) -> dict[str, str]:
    """Return what a script runs with."""
    return {**clean_environment(), "TORCHOBS_DIR": str(flight_dir), "PYTHONPATH": str(ROOT)}


def run_code(flight_dir: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own, for the fork server's have handlers of their own."""
    argv = (sys.executable, "-c", code)
    return subprocess.run(argv, env=environment(flight_dir), capture_output=True, text=True, timeout=240, check=False)


def run_file(tmp_path: Path, flight_dir: Path, script: str, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Write the script and run it, or the command."""
    (tmp_path / "train.py").write_text(script)
    argv = command or (sys.executable, "train.py")
    options |= {"cwd": tmp_path, "env": environment(flight_dir), "capture_output": True, "text": True, "timeout": 240}
    return fork_server.run(argv, **options)


@pytest.fixture
def dead_rank(flight_dir: Path) -> Iterator[Callable[[], Rank]]:
    """The one rank of the directory, once it is dead, as the exporter sees it."""
    scanner = Scanner(ExporterConfig(flight_dir=str(flight_dir)))

    def look() -> Rank:
        (dead,) = wait_until(lambda: [rank for rank in scanner.scan().ranks if not rank.up], timeout_s=15)
        return dead

    yield look
    scanner.close()


def begin(start: Callable[..., subprocess.Popen[str]], flight_dir: Path, script: str) -> subprocess.Popen[str]:
    """Start the script, and wait for its first line."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    child = start(sys.executable, "-c", script, env=environment(flight_dir), **pipes)
    assert child.stdout
    assert child.stdout.readline() == "ready\n"
    return child


TERMINATED, LOST = ("failed", "terminated"), ("lost", "lost")


@pytest.mark.parametrize(
    ("script", "number", "state"),
    [
        pytest.param(WAITS, signal.SIGTERM, TERMINATED, id="by default"),
        # children are ended by the same signal, as multiprocessing ends its own, however young they are
        pytest.param(f"{ENDS_CHILDREN}{WAITS}", signal.SIGKILL, LOST, id="only a child's"),
        pytest.param(HOLDS_THE_GIL, signal.SIGTERM, TERMINATED, id="the GIL is held"),
        pytest.param(WAITS, signal.SIGHUP, TERMINATED, marks=COMPILED, id="a closed terminal"),
        pytest.param(f"torchobs.shutdown()\n{WAITS}", signal.SIGUSR1, ("finished", "finished"), id="after the end"),
    ],
)
def test_who_was_told_to_end_says_so(
    start: Callable[..., subprocess.Popen[str]],
    flight_dir: Path,
    dead_rank: Callable[[], Rank],
    script: str,
    number: int,
    state: tuple[str, str],
) -> None:
    """The exit status is the one without torchobs, and a rank is terminated only by a signal of its own."""
    child = begin(start, flight_dir, f"{FROM_A_TERMINAL}import torchobs\ntorchobs.init()\n{script}")
    child.send_signal(number)
    assert child.wait(timeout=30) == -number
    rank = dead_rank()
    assert (rank.state, rank.reason) == state


def test_without_the_compiled_part_sigterm_leaves_its_mark(
    start: Callable[..., subprocess.Popen[str]], flight_dir: Path, dead_rank: Callable[[], Rank]
) -> None:
    """As in a pod that torchobs was injected into."""
    child = begin(
        start, flight_dir, f"import sys\nsys.modules['torchobs._native'] = None\nimport torchobs\ntorchobs.init()\n{WAITS}"
    )
    child.terminate()
    assert child.wait(timeout=30) == -signal.SIGTERM
    assert dead_rank().reason == "terminated"


def test_nothing_is_left_of_it_after_the_end(flight_dir: Path) -> None:
    """After shutdown() SIGTERM is what it was, and a handler that somebody installed is still theirs."""
    look = "print(int(next(l for l in open('/proc/self/status') if l.startswith('SigCgt')).split()[1], 16) >> 14 & 1)"
    script = (
        "import signal, torchobs\n"
        f"{look}\ntorchobs.init(); {look}\ntorchobs.shutdown(); {look}\n"
        "torchobs.init(); signal.signal(signal.SIGTERM, print); torchobs.shutdown(); "
        f"{look}\nprint(signal.getsignal(signal.SIGTERM) is print)"
    )
    done = run_code(flight_dir, script)
    assert done.stdout.split() == ["0", "1", "0", "1", "True"], done.stderr
    assert all(not path.stat().st_size for path in flight_dir.glob("*.lock"))


def test_stacks_that_the_user_wants_on_sigterm_stay_theirs(flight_dir: Path) -> None:
    """``faulthandler.register`` of one's own writes to its own file and survives, during the session and after it."""
    script = (
        "import faulthandler, os, signal, torchobs\ntorchobs.init()\n"
        "stacks = open(os.environ['TORCHOBS_DIR'] + '/stacks', 'w+')\n"
        "faulthandler.register(signal.SIGTERM, file=stacks)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\ntorchobs.shutdown()\nos.kill(os.getpid(), signal.SIGTERM)\n"
        "stacks.seek(0)\nprint(stacks.read().count('Current thread'))"
    )
    done = run_code(flight_dir, script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")
    assert all(not path.stat().st_size for path in flight_dir.glob("*.lock"))


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


def said(flight_dir: Path) -> list[str]:
    """What is said of the one rank."""
    (report,), _ = load(list(flight_dir.glob("*.flight")))
    return [finding.long for finding in diagnose(report)]


@pytest.mark.parametrize(
    ("body", "number", "words"),
    [
        ("torchobs.init(); crash()", SIGSEGV, READ),
        ("torchobs.init(); thread = threading.Thread(target=crash); thread.start(); thread.join()", SIGSEGV, READ),
        ("torchobs.init(); native()", SIGABRT, "crashed in a thread that ran no Python code (SIGABRT, "),
    ],
    ids=["main thread", "another thread", "native thread"],
)
def test_the_signal_and_the_place_are_told(flight_dir: Path, body: str, number: int, words: str) -> None:
    """By `inspect` and by the exporter; nothing is written beside the script's own output, and its status stays as it is."""
    done = run_code(flight_dir, SCRIPT + body)
    assert (done.returncode, done.stdout, done.stderr) == (-number, "", "")
    assert words in said(flight_dir)[0]
    scanner = Scanner(ExporterConfig(flight_dir=str(flight_dir)))
    try:
        (rank,) = wait_until(lambda: [rank for rank in scanner.scan().ranks if not rank.up])
        assert (rank.state, rank.reason) == ("failed", "crashed")
        outcomes = Outcomes()
        (run,) = outcomes.read(scanner, scanner.scan())
        (proof,) = outcomes.verdict(run).evidence  # as a message and the API say it
        assert words in proof.text
    finally:
        scanner.close()


@pytest.mark.parametrize(
    "body",
    [
        "faulthandler.enable(); torchobs.init(); crash()",
        "torchobs.init(); faulthandler.enable(); crash()",
    ],
    ids=["the user's before", "the user's later"],
)
def test_faulthandler_is_the_user_s(flight_dir: Path, body: str) -> None:
    """What it writes goes where it would go, and the rank is gone without a word."""
    done = run_code(flight_dir, SCRIPT + body)
    assert done.returncode == -SIGSEGV
    assert "Segmentation fault" in done.stderr
    assert "vanished without a word" in said(flight_dir)[0]


def test_handlers_of_others_are_left_alone(flight_dir: Path) -> None:
    """A virtual machine in the process lives on SIGSEGV; with one signal taken none is."""
    look = "print(faulthandler.is_enabled())"
    body = f"torchobs.init(); {look}; torchobs.shutdown(); {look}; signal.signal(signal.SIGBUS, print); torchobs.init(); {look}"
    done = run_code(flight_dir, SCRIPT + body)
    assert (done.stdout.split(), done.returncode) == (["True", "False", "False"], 0)


def test_children_and_what_comes_after_the_session_leave_no_mark(flight_dir: Path) -> None:
    """A worker that crashes, and an interpreter that crashes at its very end, are not the rank."""
    body = "torchobs.init()\nif not os.fork(): crash()\nassert os.wait()[1] == signal.SIGSEGV\ntorchobs.shutdown()\ncrash()"
    assert run_code(flight_dir, SCRIPT + body).returncode == -SIGSEGV
    assert "finished in order" in said(flight_dir)[0]
    assert [path.stat().st_size for path in flight_dir.glob("*.lock")] == [0]


class Ended(NamedTuple):
    """What a process left."""

    status: int
    reason: int | None
    code: int
    exceptions: list[dict[str, Any]]
    end: dict[str, Any]
    error: str


def run_script(tmp_path: Path, flight_dir: Path, script: str) -> Ended:
    """Run a script, and read the one flight file that it left."""
    child = run_file(tmp_path, flight_dir, script, finalized=True)
    (path,) = flight_dir.glob("*.flight")
    file = reader.open_path(os.fspath(path))
    try:
        view = file.read(final=True)
        events = flights.frames(file)
    finally:
        file.close()
    exceptions = [event["attrs"] for event in events if event["name"] == "torchobs.exception"]
    others = [event for event in events if event["name"] != "torchobs.exception"]
    without = [{name: value for name, value in raised.items() if not name.endswith(".message")} for raised in exceptions]
    assert "secret" not in repr((others, without)), "no source text, and values in messages alone"
    end = [event["attrs"] for event in events if event["name"] == "torchobs.run.end"]
    left = view.live.exit_reason, view.live.exit_code
    return Ended(child.returncode, *left, exceptions, end[-1] if end else {}, child.stderr)


@pytest.mark.parametrize(
    ("end", "status", "reason", "code"),
    [
        ("sys.exit(3)", 3, Exit.EXIT_CODE, 3),
        ("sys.exit('secret')", 1, Exit.EXIT_CODE, 1),
        ("signal.raise_signal(signal.SIGINT)", -2, Exit.INTERRUPTED, 130),
        ("os._exit(3)", 3, None, 0),
    ],
)
def test_what_python_ends_with_is_what_the_file_says(
    tmp_path: Path, flight_dir: Path, end: str, status: int, reason: int | None, code: int
) -> None:
    """Without `torchobs run`, too: a job that failed is never shown as finished."""
    ended = run_script(tmp_path, flight_dir, f"import os, signal, sys\nimport torchobs\ntorchobs.init()\n{end}\n")
    assert (ended.status, ended.reason, ended.code) == (status, reason, code)


CHAIN = """
import json, sys, threading
import torchobs
torchobs.init()
def deep():
    return {}["secret"]
def load():
    try:
        deep()
    except KeyError as error:
        raise ValueError("secret") from error
def main():
    json.loads("{secret")
"""


def test_a_chain_is_told_with_its_root(tmp_path: Path, flight_dir: Path) -> None:
    """Both classes, both messages and both places."""
    ended = run_script(tmp_path, flight_dir, CHAIN + "load()\n")
    (raised,) = ended.exceptions
    assert raised["exception.type"] == "builtins.ValueError"
    assert raised["location"].endswith("train.py:11 in load")
    assert raised["cause.type"] == "builtins.KeyError"
    assert (raised["exception.message"], raised["cause.message"]) == ("secret", "'secret'")
    assert raised["cause.location"].endswith("train.py:6 in deep")
    assert (ended.reason, ended.end) == (Exit.EXCEPTION, {"reason": "exception", "code": 1})


def test_messages_are_left_out_with_the_other_details_of_a_run(tmp_path: Path, flight_dir: Path) -> None:
    """The setting `run_details` leaves class and place of an exception."""
    script = CHAIN.replace("init()", "init(run_details=False)") + "load()\n"
    (raised,) = run_script(tmp_path, flight_dir, script).exceptions
    assert not [name for name in raised if name.endswith("message")]
    assert {"exception.type", "location", "cause.type", "cause.location"} <= raised.keys()


def test_an_exception_that_is_handled_by_leaving_is_the_reason(tmp_path: Path, flight_dir: Path) -> None:
    """`except Exception: log it, sys.exit(1)` is how many a training script ends."""
    ended = run_script(tmp_path, flight_dir, CHAIN + "try:\n    load()\nexcept Exception:\n    sys.exit(4)\n")
    assert (ended.status, ended.reason, ended.code) == (4, Exit.EXCEPTION, 4)
    assert [raised["cause.type"] for raised in ended.exceptions] == ["builtins.KeyError"]


def test_a_thread_s_exception_ends_no_rank(tmp_path: Path, flight_dir: Path) -> None:
    """It is recorded with the thread's name, and whoever listened before still hears it."""
    thread = "thread = threading.Thread(target=load, name='loader')\nthread.start()\nthread.join()\n"
    ended = run_script(tmp_path, flight_dir, CHAIN + thread)
    assert (ended.status, ended.reason) == (0, Exit.FINISHED)
    assert [(raised["thread"], raised["exception.type"]) for raised in ended.exceptions] == [("loader", "builtins.ValueError")]
    assert "ValueError: secret" in ended.error


CHILD = """
import multiprocessing, sys
import torchobs
def rank():
    torchobs.init()
    {body}
if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=rank)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [("sys.exit(6)", 6, Exit.EXIT_CODE), ("1 // 0", 1, Exit.EXCEPTION), ("pass", 0, Exit.FINISHED)],
)
def test_a_rank_that_is_a_child_process_ends_as_any_other(
    tmp_path: Path, flight_dir: Path, body: str, status: int, reason: int
) -> None:
    """A forked child runs no handler of `atexit`, and no excepthook: multiprocessing has its own way out."""
    ended = run_script(tmp_path, flight_dir, CHILD.format(body=body))
    assert (ended.status, ended.reason, ended.code) == (status, reason, status)
    assert [raised["exception.type"] for raised in ended.exceptions] == ["builtins.ZeroDivisionError"] * (body == "1 // 0")


SPAWN = """
import torch.multiprocessing
import torchobs
def rank(index):
    torchobs.init(rank=index)
    raise LookupError("secret")
if __name__ == "__main__":
    try:
        torch.multiprocessing.start_processes(rank, nprocs=1, start_method="fork")
    except torch.multiprocessing.ProcessRaisedException as error:
        assert "LookupError: secret" in str(error)
"""


def test_torch_s_spawn_sees_the_exception_and_so_do_we(tmp_path: Path, flight_dir: Path) -> None:
    """It hands the traceback to the parent and leaves with status 1."""
    ended = run_script(tmp_path, flight_dir, SPAWN)
    assert (ended.status, ended.reason, ended.code) == (0, Exit.EXCEPTION, 1), ended.error
    assert [raised["exception.type"] for raised in ended.exceptions] == ["builtins.LookupError"]
    assert ended.exceptions[0]["location"].endswith("train.py:6 in rank")


LOADER = """
from torch.utils.data import DataLoader, Dataset
import torchobs
class Broken(Dataset):
    secrets = {}
    def look_up(self, index):
        return self.secrets["secret"]
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return self.look_up(index)
torchobs.init()
torchobs.init()
for batch in DataLoader(Broken(), num_workers=1, multiprocessing_context="fork"):
    pass
"""


def test_a_loader_worker_s_exception_is_the_rank_s(tmp_path: Path, flight_dir: Path) -> None:
    """Recorded with the worker's own line, and the training process' that asked for the batch; the worker leaves no file."""
    ended = run_script(tmp_path, flight_dir, LOADER)
    assert (ended.status, ended.reason) == (1, Exit.EXCEPTION)
    (raised,) = ended.exceptions
    assert raised["exception.type"] == "builtins.KeyError"
    assert raised["location"].endswith("train.py:7 in look_up")
    assert "caller" not in raised
    assert (raised["origin"], raised["exception.message"]) == ("DataLoader worker process 0", "'secret'")
    assert raised["reraised"].endswith("train.py:14 in <module>")
    assert "cause.type" not in raised


NOTEBOOK = """
import torchobs
from tests.support import wait_until
from torchobs.flight import reader
def told():
    file = reader.open_path(torchobs.init().writer.path)
    try:
        return sum(getattr(event, "name", "") == "torchobs.exception" for event in file.events())
    finally:
        file.close()
import time
from IPython.core.interactiveshell import InteractiveShell
from torchobs.taps.patch import RESTORED, active
shell = InteractiveShell.instance()
shell.run_cell("import torchobs; session = torchobs.init()")
before = vars(shell).copy()
assert RESTORED not in [patch.check() for patch in active()]  # IPython puts sys.excepthook back after each cell
for cell, failures in (
    ("secret", 1), ("def f(): return 1 // 0", 1), ("f()", 2), ("f()", 3), ("session.active or secret2", 3)
):
    shell.run_cell(cell)
    wait_until(lambda: told() >= failures)
time.sleep(0.3)
assert vars(shell).keys() == before.keys()
"""


def test_a_notebook_goes_on_after_a_cell_that_failed(tmp_path: Path, flight_dir: Path) -> None:
    """Each failure is recorded, the same one twice, too; the session stays, and the end is in order."""
    ended = run_script(tmp_path, flight_dir, NOTEBOOK)
    kinds = ["builtins.NameError", "builtins.ZeroDivisionError", "builtins.ZeroDivisionError"]
    assert [raised["exception.type"] for raised in ended.exceptions] == kinds
    assert (ended.status, ended.reason) == (0, Exit.FINISHED), ended.error


def test_who_catches_an_exit_and_trains_on_has_not_left(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that calls sys.exit() inside a `try` is no end: the training goes on."""
    for recorded in recording(flight_dir):
        with pytest.raises(SystemExit):
            sys.exit(3)
        exits = recorded.session._exits
        assert exits.ended(None) == (Exit.EXIT_CODE, 3, None)
        assert exits.ended(Ending(Exit.EXIT_CODE, 7)) == (Exit.EXIT_CODE, 7, None)  # `torchobs run` saw the last of several
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for index in range(4):
            loss_of(model, index).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        assert exits.ended(None) == (Exit.FINISHED, 0, None)
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
        sys.excepthook(LookupError, LookupError(), None)
        assert exits.ended(None) == (Exit.FINISHED, 0, None)  # at a prompt one goes on


HANDLING = """
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
    os.kill(os.getpid(), number)
    train(1_000_000)
def leave(status, number, frame):
    sys.exit(status)
def fail(*given):
    raise Preempted("secret")
"""
RAISED = "; on that it raised __main__.Preempted"
ENDS = {
    "signal.signal(signal.SIGTERM, functools.partial(leave, 0)); send(signal.SIGTERM)":
        (0, "finished", "; SIGTERM had asked it to end"),
    "signal.signal(signal.SIGTERM, functools.partial(leave, 1)); send(signal.SIGTERM)":
        (1, "terminated", "; it left with exit status 1"),
    "signal.signal(signal.SIGUSR1, functools.partial(leave, 3)); send(signal.SIGUSR1)":
        (3, "exit_code", "left with exit status 3 on SIGUSR1, which it handled, after step"),
    "signal.signal(signal.SIGINT, fail); send(signal.SIGINT)": (1, "interrupted", RAISED),
    "signal.signal(signal.SIGTERM, fail)\ntry:\n send(signal.SIGTERM)\nexcept Preempted:\n train(30)":
        (0, "finished", "in order"),
}  # fmt: skip
"""By what the script does: its status, the reason, and what is said"""


@pytest.mark.parametrize("body", ENDS)
def test_the_signal_is_named(tmp_path: Path, flight_dir: Path, body: str) -> None:
    """That of the handler that left, raised, or was left by an exception; not one after which training went on."""
    status, reason, said = ENDS[body]
    argv = (sys.executable, "-m", "torchobs", "run", "--no-exporter", "train.py")
    child = run_file(tmp_path, flight_dir, f"{HANDLING}{body}\n", *argv)
    (report,), _ = load(list(flight_dir.glob("*.flight")))
    text = diagnose(report)[0].long
    assert (child.returncode, report.reason) == (status, reason), child.stderr
    assert said in text
    assert said != "in order" or "SIG" not in text
    assert f"{ROOT / 'torchobs'}{os.sep}" not in child.stderr, "no frame of ours"
    raised = report.events_named(catalog.EVENT_EXCEPTION)
    assert all(fact.attributes.get("exception.message", "secret") == "secret" for fact in raised)


def test_ctrl_c_in_shutdown_is_the_script_s(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes out when everything is removed and the end is recorded, and the script may handle it."""
    before = surface()
    session = torchobs.init(flight_dir=flight_dir)
    left: list[Any] = []
    for owner, original in ((FlightWriter, FlightWriter.exit), (StepProbe, StepProbe.remove)):

        def interrupted(*arguments: Any, function: Any = original) -> Any:
            if function not in left:
                left.append(function)
                raise KeyboardInterrupt
            return function(*arguments)

        monkeypatch.setattr(owner, original.__name__, interrupted)
    with pytest.raises(KeyboardInterrupt):
        torchobs.shutdown()
    assert len(left) == 2
    assert not session.active
    wait_until(lambda: surface() == before)
    assert load(list(flight_dir.glob("*.flight")))[0][0].reason == "finished"
