"""How ranks end, each in a real process: by an exception, a status, a signal, Ctrl-C, as somebody's child, or not at all."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from tests import flights, fork_server, support
from tests.training import loss_of, mlp, recording
from torchobs import catalog
from torchobs.diagnosis.diagnosis import diagnose
from torchobs.flight import reader
from torchobs.flight.layout import Exit
from torchobs.probes.exits import Ending
from torchobs.ranks.runs import load

if TYPE_CHECKING:
    from pathlib import Path

    from torchobs.ranks.rank_view import RankView


class Ended(NamedTuple):
    """What a process left."""

    status: int
    reason: int | None
    code: int
    exceptions: list[dict[str, Any]]
    end: dict[str, Any]
    error: str
    raised_after: list[int]
    steps: int


def run(tmp_path: Path, flight_dir: Path, script: str, *command: str) -> Ended:
    """Run a script, and read the one flight file that it left."""
    (tmp_path / "train.py").write_text(script)
    environment = {**support.clean_environment(), "TORCHOBS_DIR": str(flight_dir), "PYTHONPATH": str(support.ROOT)}
    argv = command or (sys.executable, "train.py")
    given: Any = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 240}
    child = fork_server.run(argv, **given, finalized=True)
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
    after = [event["step"] for event in events if event["name"] == "torchobs.exception"]
    steps = next((int(value) for series, value in view.points if series.name == "torchobs.steps"), 0)  # type: ignore[arg-type]
    left = view.live.exit_reason, view.live.exit_code
    return Ended(child.returncode, *left, exceptions, end[-1] if end else {}, child.stderr, after, steps)


@pytest.mark.parametrize(
    ("end", "status", "reason", "code"),
    [
        ("sys.exit(0)", 0, Exit.FINISHED, 0),
        ("sys.exit(3)", 3, Exit.EXIT_CODE, 3),
        ("sys.exit('secret')", 1, Exit.EXIT_CODE, 1),
        ("raise KeyboardInterrupt", -2, Exit.INTERRUPTED, 130),
        ("signal.raise_signal(signal.SIGINT)", -2, Exit.INTERRUPTED, 130),
        ("with torchobs.init(): raise KeyboardInterrupt", -2, Exit.INTERRUPTED, 130),
        ("os._exit(3)", 3, None, 0),
    ],
)
def test_what_python_ends_with_is_what_the_file_says(
    tmp_path: Path, flight_dir: Path, end: str, status: int, reason: int | None, code: int
) -> None:
    """Without `torchobs run`, too: a job that failed is never shown as finished."""
    ended = run(tmp_path, flight_dir, f"import os, signal, sys\nimport torchobs\ntorchobs.init()\n{end}\n")
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
    ended = run(tmp_path, flight_dir, CHAIN + "load()\n")
    (told,) = ended.exceptions
    assert told["exception.type"] == "builtins.ValueError"
    assert told["location"].endswith("train.py:11 in load")
    assert told["cause.type"] == "builtins.KeyError"
    assert (told["exception.message"], told["cause.message"]) == ("secret", "'secret'")
    assert told["cause.location"].endswith("train.py:6 in deep")
    assert (ended.reason, ended.end) == (Exit.EXCEPTION, {"reason": "exception", "code": 1})


def test_messages_are_left_out_with_the_other_details_of_a_run(tmp_path: Path, flight_dir: Path) -> None:
    """The setting `run_details` leaves class and place of an exception."""
    script = CHAIN.replace("init()", "init(run_details=False)") + "load()\n"
    (raised,) = run(tmp_path, flight_dir, script).exceptions
    assert not [name for name in raised if name.endswith("message")]
    assert {"exception.type", "location", "cause.type", "cause.location"} <= raised.keys()


FIRST_STEP = """
import torch, torchobs
torchobs.init()
weight = torch.zeros(4, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.01)
(weight * torch.ones(4)).sum().add(1).pow(2).backward()
optimizer.step()
raise ValueError
"""


def test_an_exception_is_of_the_step_after_which_it_came(tmp_path: Path, flight_dir: Path) -> None:
    """The first step is written when the next one begins, or at the end: it was complete all the same."""
    ended = run(tmp_path, flight_dir, FIRST_STEP)
    assert (ended.reason, ended.raised_after, ended.steps) == (Exit.EXCEPTION, [1], 1)


def test_an_exception_that_is_handled_by_leaving_is_the_reason(tmp_path: Path, flight_dir: Path) -> None:
    """`except Exception: log it, sys.exit(1)` is how many a training script ends."""
    ended = run(tmp_path, flight_dir, CHAIN + "try:\n    load()\nexcept Exception:\n    sys.exit(4)\n")
    assert (ended.status, ended.reason, ended.code) == (4, Exit.EXCEPTION, 4)
    assert [told["cause.type"] for told in ended.exceptions] == ["builtins.KeyError"]


def test_a_thread_s_exception_ends_no_rank(tmp_path: Path, flight_dir: Path) -> None:
    """It is told with the thread's name, and whoever listened before still hears it."""
    thread = "thread = threading.Thread(target=load, name='loader')\nthread.start()\nthread.join()\n"
    ended = run(tmp_path, flight_dir, CHAIN + thread)
    assert (ended.status, ended.reason) == (0, Exit.FINISHED)
    assert [(told["thread"], told["exception.type"]) for told in ended.exceptions] == [("loader", "builtins.ValueError")]
    assert "ValueError: secret" in ended.error


CHILD = """
import multiprocessing, sys
import torchobs
def rank():
    torchobs.init()
    {body}
if __name__ == "__main__":
    child = multiprocessing.get_context({method!r}).Process(target=rank)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


@pytest.mark.parametrize(
    ("method", "body", "status", "reason"),
    [
        ("fork", "pass", 0, Exit.FINISHED),
        ("fork", "sys.exit(6)", 6, Exit.EXIT_CODE),
        ("fork", "1 // 0", 1, Exit.EXCEPTION),
        ("spawn", "1 // 0", 1, Exit.EXCEPTION),
        ("forkserver", "sys.exit(6)", 6, Exit.EXIT_CODE),
    ],
)
def test_a_rank_that_is_a_child_process_ends_as_any_other(
    tmp_path: Path, flight_dir: Path, method: str, body: str, status: int, reason: int
) -> None:
    """A forked child runs no handler of `atexit`, and no excepthook: multiprocessing has its own way out."""
    ended = run(tmp_path, flight_dir, CHILD.format(body=body, method=method))
    assert (ended.status, ended.reason, ended.code) == (status, reason, status)
    assert [told["exception.type"] for told in ended.exceptions] == ["builtins.ZeroDivisionError"] * (body == "1 // 0")


SPAWN = """
import torch.multiprocessing
import torchobs
def rank(index):
    torchobs.init(rank=index)
    raise LookupError("secret")
if __name__ == "__main__":
    try:
        torch.multiprocessing.spawn(rank, nprocs=1)
    except torch.multiprocessing.ProcessRaisedException as error:
        assert "LookupError: secret" in str(error)
"""


def test_torch_s_spawn_sees_the_exception_and_so_do_we(tmp_path: Path, flight_dir: Path) -> None:
    """It hands the traceback to the parent and leaves with status 1."""
    ended = run(tmp_path, flight_dir, SPAWN)
    assert (ended.status, ended.reason, ended.code) == (0, Exit.EXCEPTION, 1), ended.error
    assert [told["exception.type"] for told in ended.exceptions] == ["builtins.LookupError"]
    assert ended.exceptions[0]["location"].endswith("train.py:6 in rank")


RECORD = """
import json, os
from torch.distributed.elastic.multiprocessing.errors import record
import torchobs
@record
def main():
    torchobs.init()
    raise LookupError("secret")
os.environ["TORCHELASTIC_ERROR_FILE"] = "error.json"
main()
"""


def test_torchelastic_s_error_file_is_written_as_ever(tmp_path: Path, flight_dir: Path) -> None:
    """`@record` writes what the launcher shows; the exception goes on to us."""
    ended = run(tmp_path, flight_dir, RECORD)
    assert (ended.status, ended.reason) == (1, Exit.EXCEPTION)
    assert "LookupError" in (tmp_path / "error.json").read_text()
    assert [told["exception.type"] for told in ended.exceptions] == ["builtins.LookupError"]


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
    """It is told with the worker's own line, and the training process' that asked for the batch; the worker leaves no file."""
    ended = run(tmp_path, flight_dir, LOADER)
    assert (ended.status, ended.reason) == (1, Exit.EXCEPTION)
    (told,) = ended.exceptions
    assert told["exception.type"] == "builtins.KeyError"
    assert told["location"].endswith("train.py:7 in look_up")
    assert "caller" not in told
    assert (told["origin"], told["exception.message"]) == ("DataLoader worker process 0", "'secret'")
    assert told["reraised"].endswith("train.py:14 in <module>")
    assert "cause.type" not in told


TOLD = """
import torchobs
from tests.support import wait_until
from torchobs.flight import reader
def told():
    file = reader.open_path(torchobs.init().writer.path)
    try:
        return sum(fields.get("name") == "torchobs.exception" for fields in flights.frames(file))
    finally:
        file.close()
"""
NOTEBOOK = """
import time
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_cell("import torchobs; session = torchobs.init()")
before = vars(shell).copy()
for cell, failures in (
    ("secret", 1), ("def f(): return 1 // 0", 1), ("f()", 2), ("f()", 3), ("session.active or secret2", 3)
):
    shell.run_cell(cell)
    wait_until(lambda: told() >= failures)
time.sleep(0.3)
assert vars(shell).keys() == before.keys()
"""


def test_a_notebook_goes_on_after_a_cell_that_failed(tmp_path: Path, flight_dir: Path) -> None:
    """Each failure is told, the same one twice, too; the session stays, and the end is in order."""
    ended = run(tmp_path, flight_dir, TOLD + NOTEBOOK)
    kinds = ["builtins.NameError", "builtins.ZeroDivisionError", "builtins.ZeroDivisionError"]
    assert [told["exception.type"] for told in ended.exceptions] == kinds
    assert (ended.status, ended.reason) == (0, Exit.FINISHED), ended.error


WATCHED = """
from IPython.core.interactiveshell import InteractiveShell
from torchobs.taps.patch import RESTORED, active
InteractiveShell.instance().run_cell("import torchobs; torchobs.init()")
assert RESTORED not in [patch.check() for patch in active()]
"""


def test_a_notebook_s_own_hook_is_no_other_tool_s(tmp_path: Path, flight_dir: Path) -> None:
    """Promise: IPython puts `sys.excepthook` back after each cell, and no warning of a hook that was lost greets everybody."""
    ended = run(tmp_path, flight_dir, WATCHED)
    assert ended.status == 0, ended.error


def test_who_catches_an_exit_and_trains_on_has_not_left(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that calls sys.exit() inside a `try` is no end; what follows tells."""
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
TOLD_TO_END = "was told to end by SIGTERM after step"
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
    "signal.signal(signal.SIGTERM, interrupt); send(signal.SIGTERM)": (-2, "terminated", TOLD_TO_END),
    "signal.signal(signal.SIGUSR1, functools.partial(leave, 3)); send(signal.SIGUSR1)": (
        3, "exit_code", "left with exit status 3 on SIGUSR1, which it handled, after step",
    ),
    "signal.signal(signal.SIGINT, fail); send(signal.SIGINT)": (
        1, "interrupted", "; on that it raised __main__.Preempted",
    ),
    "send(signal.SIGINT)": (-2, "interrupted", "was interrupted (Ctrl-C, SIGINT) after step 20."),
    "signal.signal(signal.SIGTERM, fail)\ntry:\n send(signal.SIGTERM)\nexcept Preempted:\n train(30)": (
        0, "finished", "in order",
    ),
    "train(20)\nfail()": (1, "exception", "in fail, called"),
}  # fmt: skip


def run_handling(tmp_path: Path, flight_dir: Path, body: str) -> tuple[int, str, RankView]:
    """Run the script under `torchobs run`; return its status, what it wrote to standard error, and the report."""
    (tmp_path / "train.py").write_text(f"{HANDLING}{body}\n")
    environment = {**support.clean_environment(), "TORCHOBS_DIR": str(flight_dir), "PYTHONPATH": str(support.ROOT)}
    argv = (sys.executable, "-m", "torchobs", "run", "--no-exporter", "train.py")
    child = fork_server.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    reports, _ = load(list(flight_dir.glob("*.flight")))
    return child.returncode, child.stderr, reports[0]


@pytest.mark.parametrize("body", ENDS)
def test_the_signal_is_named(tmp_path: Path, flight_dir: Path, body: str) -> None:
    """Whose handler it was that left, raised, or was left by an exception; not of what training went on after."""
    status, reason, said = ENDS[body]
    found, error, report = run_handling(tmp_path, flight_dir, body)
    text = diagnose(report)[0].long
    assert (found, report.reason) == (status, reason), error
    assert said in text or said == "in fail, called"
    assert not (said in {"in order", "in fail, called"} and "SIG" in text)
    assert f"{support.ROOT / 'torchobs'}{os.sep}" not in error, "no frame of ours"
    raised = report.events_named(catalog.EVENT_EXCEPTION)
    assert all(fact.attributes.get("exception.message", "secret") == "secret" for fact in raised)


CLOSING = """
import atexit
from torchobs.flight.writer import FlightWriter
from torchobs.probes.steps import StepProbe
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


def test_ctrl_c_in_shutdown_is_the_script_s(tmp_path: Path, flight_dir: Path) -> None:
    """It comes out when everything is removed, and the script may handle it."""
    body = "import torchobs\ntry:\n torchobs.shutdown()\nexcept KeyboardInterrupt:\n print('interrupted', file=sys.stderr)\n"
    restored = "assert 'torchobs' not in torch.optim.Optimizer.zero_grad.__module__\nassert not torchobs.Session().active\n"
    status, error, report = run_handling(tmp_path, flight_dir, f"{CLOSING}{body}{restored}train(3)\n")
    assert (status, error.strip(), report.reason) == (0, "interrupted", "finished")
    assert report.last_step == 20


def test_an_exception_is_told_though_a_handler_interrupts_its_recording(tmp_path: Path, flight_dir: Path) -> None:
    """As torch's for SIGCHLD does, where a worker dies while its end is told to the main process by a closed connection."""
    script = f"""
{HANDLING}
import torchobs
from torchobs.probes import exits
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
    (report,), _ = load(list(flight_dir.glob("*.flight")))
    (text, *_) = [finding.long for finding in diagnose(report)]
    assert 'ended by ConnectionResetError "by a worker" at' in text
