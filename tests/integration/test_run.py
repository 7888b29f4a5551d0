"""`torchobs run`: a script is what it is without it, is served from its first step, and so are the ranks that it starts."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
import zipfile
from textwrap import dedent
from typing import TYPE_CHECKING, NamedTuple

import psutil
import pytest

from tests import flights, fork_server
from tests.exporters import Client, value_on
from tests.fork_server import Python
from tests.integration.test_node import announced, exporters
from tests.support import ROOT, clean_environment, free_port, wait_until
from torchobs import catalog
from torchobs.flight import reader
from torchobs.flight.layout import Exit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


RUN = ("-m", "torchobs", "run", "--no-exporter")

SCRIPTS = {
    # what a script sees of itself
    "names": """
        import __main__, sys
        seen = {name: value for name, value in globals().items() if name not in ("sys", "__main__")}
        print(seen, type(__loader__), sys.argv, sys.path[0], vars(__main__) is globals(), __name__)
    """,
    "surroundings": """
        import inspect, os, sys, warnings
        class A:
            y = 1
        print(inspect.getsource(A), sys.stdin.read().upper(), sys.stdin.isatty(), sys.stdout.isatty())
        warnings.warn("old", DeprecationWarning)
        os.chdir("/")
        print(__file__, sys.path[0], os.path.exists(__file__))
    """,
    "process": """
        import os, signal
        print([(int(s), str(signal.getsignal(s))) for s in signal.valid_signals() if signal.getsignal(s) != signal.SIG_DFL])
        print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        print([n for n in range(64) if os.path.exists(f"/proc/self/fd/{n}") and os.get_inheritable(n)])
        try:
            os.wait()
        except ChildProcessError:
            print("no child")
    """,
    # how it ends
    "os_exit": "import os\nprint('x', flush=True)\nos._exit(7)",
    "sigint": "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)",
    "sigterm": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
    "own_sigterm": """
        import os, signal, sys
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
        os.kill(os.getpid(), signal.SIGTERM)
    """,
    # how it fails
    "clipping": """
        import torch
        model = torch.nn.Linear(2, 1)
        (model(torch.ones(1, 2)).sum() * float("nan")).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    """,
    "syntax": "x = (\ny = 3",
    "own_hook": """
        import sys
        sys.excepthook = lambda kind, error, trace: print(kind, trace.tb_frame.f_code.co_name, error.__traceback__ is trace)
        1 / 0
    """,
    # what happens after its last line
    "at_exit": "import atexit\natexit.register(lambda: print('bye', __name__))\ndef f():\n    1 / 0\nf()",
    "stdout_closed": "import sys\nsys.stdout.close()",
    # threads
    "thread": "from threading import *\nThread(target=lambda: (main_thread().join(), print('t'))).start()\nprint('m')",
    # processes: what crosses between them is found in __main__ on both sides
    **{
        f"processes_{method}": f"""
            import multiprocessing

            class Item:
                pass

            def work(queue):
                queue.put(Item())

            if __name__ == "__main__":
                context = multiprocessing.get_context("{method}")
                queue = context.Queue()
                child = context.Process(target=work, args=(queue,))
                child.start()
                print(type(queue.get()) is Item)
                child.join()
                print(child.exitcode)
        """
        for method in ("spawn", "fork")
    },
    "fork_exit": """
        import os, sys, warnings
        warnings.simplefilter("ignore")  # since Python 3.12 os.fork() warns where there are threads, such as our sampler
        if os.fork() == 0:
            sys.exit(5)
        print(os.waitstatus_to_exitcode(os.wait()[1]))
    """,
}
"""Little scripts, one for each way in which a program could notice where it runs."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with every script."""
    for name, text in SCRIPTS.items():
        (tmp_path / f"my_{name}.py").write_text(dedent(text))
    return tmp_path


def outcome(*arguments: str, cwd: Path, flight_dir: Path, torch: bool = False, **variables: str) -> tuple[int, str, str]:
    """How Python with these arguments ends and what it says, but for addresses in memory. `torch`: it has imported it."""
    done = (fork_server.run if torch else subprocess.run)(
        [sys.executable, *arguments],
        check=False,
        cwd=cwd,
        env=clean_environment() | {"TORCHOBS_DIR": str(flight_dir), "PYTHONDONTWRITEBYTECODE": "1"} | variables,
        input="typed",
        capture_output=True,
        text=True,
        timeout=110,
    )
    out, err = (re.sub(r"0x[0-9a-f]+", "0x", said) for said in (done.stdout, done.stderr))
    return done.returncode, out, err


def same(*command: str, cwd: Path, flight_dir: Path, flags: tuple[str, ...] = (), torch: bool = False) -> tuple[int, str, str]:
    """Assert that both ways of running it have one outcome; return it."""
    expected = outcome(*flags, *command, cwd=cwd, flight_dir=flight_dir, torch=torch)
    assert outcome(*flags, *RUN, *command, cwd=cwd, flight_dir=flight_dir, torch=torch) == expected
    return expected


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_cannot_tell(name: str, folder: Path, flight_dir: Path) -> None:
    """`torchobs run x.py …` prints, fails and ends as `python x.py …` does."""
    same(f"my_{name}.py", "--flag", "-m", "--", cwd=folder, flight_dir=flight_dir, torch="import torch\n" in SCRIPTS[name])


@pytest.mark.parametrize("name", ["names", "processes_spawn"])
def test_a_module_cannot_tell(name: str, folder: Path, flight_dir: Path) -> None:
    """`torchobs run -m x …` is `python -m x …`."""
    same("-m", f"my_{name}", "--flag", cwd=folder, flight_dir=flight_dir)


@pytest.mark.parametrize(("name", "flags"), [("names", ("-I",)), ("processes_spawn", ("-W", "error", "-X", "dev"))])
def test_python_s_own_options_hold(name: str, flags: tuple[str, ...], folder: Path, flight_dir: Path) -> None:
    """`python -W error -m torchobs run x.py` is `python -W error x.py`: nothing of ours warns, leaks or needs `sys.path[0]`."""
    same(f"my_{name}.py", cwd=folder, flight_dir=flight_dir, flags=flags)


@pytest.mark.parametrize("path", ["sub/../my_names.py", "sub/link.py"])
def test_a_path_is_what_was_typed(path: str, folder: Path, flight_dir: Path) -> None:
    """`__file__` is not normalised, a link's directory on `sys.path` is its target's."""
    (folder / "sub").mkdir()
    (folder / "link.py").symlink_to("my_names.py")
    (folder / "sub" / "link.py").symlink_to("../my_names.py")
    assert "sys.path" not in same(path, cwd=folder, flight_dir=flight_dir)[1]


def test_a_zip_with_a_main_module(tmp_path: Path, flight_dir: Path) -> None:
    """`python app.zip`, which is how whole projects are shipped to a cluster."""
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", dedent(SCRIPTS["names"]) + "import part\n")
        archive.writestr("part.py", "print(__file__)\n")
    assert same("app.zip", "--flag", cwd=tmp_path, flight_dir=flight_dir)[0] == 0


@pytest.mark.parametrize("command", [("-m", "no_such_module"), ("empty",)])
def test_what_cannot_be_run_is_refused_in_python_s_words(command: tuple[str, ...], tmp_path: Path, flight_dir: Path) -> None:
    """A module that is not there, a directory without `__main__`."""
    (tmp_path / "empty").mkdir()
    status, _, err = same(*command, cwd=tmp_path, flight_dir=flight_dir)
    assert status == 1
    assert "no_such_module" in err or "__main__" in err


def test_a_terminal_stays_a_terminal(tmp_path: Path, flight_dir: Path) -> None:
    """Progress bars and debuggers ask for it, on all three streams."""
    (tmp_path / "x.py").write_text(
        "import sys\nprint([s.isatty() for s in (sys.stdin, sys.stdout, sys.stderr)], input('? '))\n"
    )
    controller, terminal = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, *RUN, "x.py"], cwd=tmp_path, env=clean_environment() | {"TORCHOBS_DIR": str(flight_dir)},
        stdin=terminal, stdout=terminal, stderr=terminal,
    )  # fmt: skip
    os.close(terminal)
    os.write(controller, b"yes\n")
    assert child.wait(60) == 0
    said = os.read(controller, 4096).decode()
    os.close(controller)
    assert "[True, True, True] yes" in said


def test_a_script_runs_even_if_torchobs_cannot_start(tmp_path: Path) -> None:
    """No place for the flight file, whatever else: one line on standard error, and the script is run."""
    (tmp_path / "x.py").write_text("print('trained')\n")
    (tmp_path / "file").touch()
    done = outcome(*RUN, "x.py", cwd=tmp_path, flight_dir=tmp_path / "file" / "impossible")
    assert done[:2] == (0, "trained\n")
    assert done[2].count("\n") == 1
    assert "torchobs" in done[2]


PROGRAM = (sys.executable, "-m", "torchobs", "run")

TRAIN = """
import glob, os, sys, time
import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
sys.stdout.write("trained\\n")  # in one piece, buffered or not: ranks share the pipe
sys.stdout.flush()
sys.stdin.readline()
rank = os.environ.get("RANK", "0")
open("trained-" + rank, "w").close()
while len(glob.glob("trained-*")) < int(os.environ.get("WORLD_SIZE", "1")):
    time.sleep(0.01)  # torchrun kills all others as soon as one has failed
sys.exit(int(sys.argv[2 + int(rank)]))
"""


@pytest.fixture
def environ(flight_dir: Path) -> Iterator[dict[str, str]]:
    """The environment of a run with flight files and an exporter of its own; the exporter ends with the test."""
    yield clean_environment() | {"TORCHOBS_DIR": str(flight_dir), "TORCHOBS_EXPORTER_ADDRESS": f"127.0.0.1:{free_port()}"}
    for process in exporters(flight_dir):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has left just now
            process.kill()


def files(flight_dir: Path) -> list[reader.View]:
    """The flight files of runs that have ended."""
    views = []
    for path in flight_dir.glob("*.flight"):
        with contextlib.closing(reader.open_path(str(path))) as file:
            views.append(file.read(final=True))
    return views


def test_an_untouched_script_is_served_from_its_first_step(
    start: Callable[..., subprocess.Popen[str]], environ: dict[str, str], flight_dir: Path, tmp_path: Path
) -> None:
    """Steps counted, the exit status the script's own and on the page, and `| tee` ends with it."""
    (tmp_path / "train.py").write_text(TRAIN)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    child = start(*PROGRAM, "train.py", "7", "3", torch=True, cwd=tmp_path, env=environ, **pipes)
    assert child.stdout is not None
    assert child.stdout.readline() == "trained\n"
    announcement = announced(flight_dir)
    exporter = Client(environ["TORCHOBS_EXPORTER_ADDRESS"])
    # a look at the files serves whoever asks within a tenth of a second, and this one may be from before the steps
    wait_until(lambda: exporter.value("torchobs_steps_total", rank="0") == 7)
    assert exporter.value("torchobs_rank_up", rank="0") == 1
    rest, _ = child.communicate("\n", timeout=20)
    assert (rest, child.returncode) == ("", 3)
    assert psutil.pid_exists(announcement.pid)

    def last_page() -> str:
        page = exporter.page()  # the exporter may leave once this was fetched
        return page if value_on(page, "torchobs_rank_exit", reason="exit_code") == 1 else ""

    assert value_on(wait_until(last_page), "torchobs_steps_total") == 7


def test_torchrun_starts_it_on_every_rank(environ: dict[str, str], flight_dir: Path, tmp_path: Path) -> None:
    """`torchrun --no-python torchobs run train.py`: two ranks of one run, one exporter, torchrun's own verdict on a failure."""
    (tmp_path / "train.py").write_text(TRAIN)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = fork_server.run(
        [*torchrun, "--no-python", *PROGRAM, "train.py", "5", "0", "4"],
        cwd=tmp_path, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.stdout == "trained\ntrained\n"
    assert done.returncode == 1
    assert re.search(r"exitcode +: 4\b", done.stderr)
    views = files(flight_dir)
    assert sorted(view.header.resource["rank"] for view in views) == [0, 1]
    assert len({view.header.resource["run_id"] for view in views}) == 1
    assert {view.live.exit_code for view in views if view.header.resource["rank"] == 1} == {4}
    assert announced(flight_dir)


class Said(NamedTuple):
    """What a script in a terminal left."""

    status: int
    output: str
    terminal: str


def run(tmp_path: Path, flight_dir: Path, *options: str, **environ: str) -> Said:
    """Run a script that diverges and raises, with a terminal as its standard error."""
    ours, theirs = pty.openpty()
    child = Python(
        [*PROGRAM, *options, str(ROOT / "tests" / "scripts" / "dying.py"), "raise"], cwd=tmp_path, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs,
        env=clean_environment()
        | {"TORCHOBS_DIR": str(flight_dir), "PYTHONPATH": str(ROOT), "TORCHOBS_LOG_LEVEL": "ERROR", **environ},
    )  # fmt: skip
    os.close(theirs)
    read = b""
    with contextlib.suppress(OSError):  # Linux says so of a terminal that nobody has open
        while part := os.read(ours, 65536):
            read += part
    os.close(ours)
    output, _ = child.communicate(timeout=60)
    return Said(child.returncode, output, read.decode().replace("\r\n", "\n"))


def test_the_end_says_what_inspect_would_say_first(tmp_path: Path, flight_dir: Path) -> None:
    """After the traceback: how it ended, what was worst, where the time went, the command for more; nothing of the script's."""
    said = run(tmp_path, flight_dir, "--no-exporter")
    assert (said.status, said.output) == (1, "")
    script, _, summary = said.terminal.partition("RuntimeError: the loss is gone\n")
    assert script.startswith("Traceback")
    assert "torchobs:" not in script
    lines = summary.splitlines()
    assert lines[0] == "torchobs: Trouble. Ended: 1 rank, 60 steps, last loss NaN."
    assert lines[1].startswith('torchobs: Rank 0 ended by RuntimeError "the loss is gone" at ')
    assert lines[2].startswith("torchobs: The loss turned infinite in step 48")
    assert "torchobs: action: do_not_restart. The program itself raised an exception: it would do so again." in lines
    assert lines[-2].startswith("torchobs: time since the process began: ")
    assert lines[-1].startswith(f"torchobs: more: torchobs inspect {flight_dir} --run ")


@pytest.mark.parametrize(
    ("options", "environ"),
    [(("--quiet",), {}), ((), {"TORCHOBS_SUMMARY": "0"}), ((), {"RANK": "1", "WORLD_SIZE": "2"}), (("--level", "off"), {})],
)
def test_who_wants_it_quiet_has_it_quiet(
    options: tuple[str, ...], environ: dict[str, str], tmp_path: Path, flight_dir: Path
) -> None:
    """By an option or a variable; other ranks than the first one never say anything."""
    said = run(tmp_path, flight_dir, "--no-exporter", *options, **environ)
    assert (said.status, said.output) == (1, "")
    assert ("torchobs:" in said.terminal) == ("off" in options)


SHORT = """
import sys, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""
HELP = "import argparse, torch\nargparse.ArgumentParser().parse_args()\n"
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import torch\nimport not_there\n", ("train.py",)),
        ("def train(:\n", ("train.py",)),
        (HELP, ("train.py", "--help")),
        (HELP, ("train.py", "--lrr", "1")),
    ],
)
def test_a_mistake_leaves_nothing(tmp_path: Path, flight_dir: Path, script: str, words: tuple[str, ...]) -> None:
    """And what Python says of it, with its status, is Python's own."""
    (tmp_path / "train.py").write_text(script)
    same(*words, cwd=tmp_path, flight_dir=flight_dir, torch=True)
    assert not list(flight_dir.iterdir())


@pytest.mark.parametrize(
    ("script", "variables"),
    [
        (SHORT + "sys.exit(2)\n", {}),
        (SHORT + "import not_there\n", {}),
        ("import sys, torch\nsys.exit('no data')\n", {}),
        ("import torch\nfor _ in torch.utils.data.DataLoader([1]): import not_there\n", {}),
        ("import torch\nimport not_there\n", LAUNCHED),
        ("import torch\nimport not_there\n", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}),
    ],
)
def test_what_had_begun_or_failed_stays(tmp_path: Path, flight_dir: Path, script: str, variables: dict[str, str]) -> None:
    """A failure of a program, of a rank that others wait for, and of what nobody looks at."""
    (tmp_path / "train.py").write_text(script)
    outcome(*RUN, "train.py", cwd=tmp_path, flight_dir=flight_dir, torch=True, **variables)
    assert len(list(flight_dir.glob("*.flight"))) == 1


SPAWNING = """
import sys
import torch
import torch.multiprocessing as mp
from torch.distributed import destroy_process_group, init_process_group

def rank(index, place):
    # a file: a port may be taken by now, and the store behind it ends with the rank that has it, asked for or not
    init_process_group("gloo", init_method=f"file://{place}", rank=index, world_size=2)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    destroy_process_group()

def double(x):
    return 2 * x

if __name__ == "__main__":
    method, place = sys.argv[1:]
    with mp.get_context(method).Pool(1) as pool:
        print(pool.map(double, [1]))
    mp.start_processes(rank, (place,), nprocs=2, start_method=method)
    if method == "fork":
        raise RuntimeError("behind the training")
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_ranks_of_multiprocessing_are_seen_without_their_help(method: str, tmp_path: Path, flight_dir: Path) -> None:
    """Each is a rank of one run, from its process group to its end; neither a pool's worker nor who started them is one.

    A launcher that fails behind its ranks is reported beside the ranks that finished in order.
    """
    (tmp_path / "train.py").write_text(SPAWNING)
    words = ("--dir", str(flight_dir), "train.py", method, str(tmp_path / "rendezvous"))
    status, output, error = outcome(*RUN, *words, cwd=tmp_path, flight_dir=flight_dir, torch=True)
    assert (status, output) == (int(method == "fork"), "[2]\n")
    assert (error == "") == (method == "spawn")
    views = files(flight_dir)
    ranks = [(view.header.resource["rank"], flights.value(view, catalog.STEPS), view.live.exit_reason)
             for view in views if view.header.resource["world_size"] == 2]  # fmt: skip
    assert sorted(ranks) == [(0, 3, Exit.FINISHED), (1, 3, Exit.FINISHED)]
    assert len(views) == (2 if method == "spawn" else 3)
    assert len({view.header.resource["run_id"] for view in views}) == 1
    if method == "fork":
        said = outcome("-m", "torchobs", "inspect", str(flight_dir), cwd=tmp_path, flight_dir=flight_dir)
        assert said[0] == 1
        assert "Rank 0 finished in order after step 3" in said[1]
        assert "- The process that started the ranks ended by RuntimeError" in said[1]
        assert "Trouble. Finished: 2 ranks" in said[1]
        assert "earlier attempt" not in said[1]
