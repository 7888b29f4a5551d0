"""A forked interpreter is, to a test, what a new one would be."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import fork_server

PROGRAMS = {
    "arguments": "import sys; print(sys.argv, __name__, sys.stdin.read(), flush=True); print('error', file=sys.stderr)",
    "exception": "def f():\n    raise KeyError('a')\nf()",
    "exit": "import sys; sys.exit('no')",
    "at exit": "import atexit; atexit.register(print, 'last'); print('first')",
    "interrupt": "raise KeyboardInterrupt",
    "interrupted at exit": "import atexit; atexit.register(print, 'last', flush=True); raise KeyboardInterrupt",
    "status": "import sys; sys.exit(259)",
    "child": "import os\nif os.fork():\n    print(os.waitstatus_to_exitcode(os.wait()[1]))\nelse:\n    raise SystemExit(7)",
    "signal": "import os; os.kill(os.getpid(), 9)",
    "environment": "import os; print(os.environ['PATH'], os.environ['HOME'], os.getcwd())",
    "thread": "import threading, time; threading.Timer(0.1, print, ['ended']).start()",
}


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, elsewhere it is subprocess itself")
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("how", ["code", "script"])
def test_a_program_cannot_tell(name: str, how: str, tmp_path: Path) -> None:
    """Output, errors with their traceback, status and what is done at the end."""
    (tmp_path / "program.py").write_text(PROGRAMS[name])
    argv = [sys.executable, *(["-c", PROGRAMS[name]] if how == "code" else ["program.py"]), "one", "--two"]
    expected = subprocess.run(argv, input="given", capture_output=True, text=True, cwd=tmp_path, check=False)
    found = fork_server.run(argv, input="given", capture_output=True, text=True, cwd=tmp_path)
    assert (found.returncode, found.stdout, found.stderr) == (expected.returncode, expected.stdout, expected.stderr)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, elsewhere it is subprocess itself")
def test_output_that_cannot_be_written_is_told() -> None:
    """At the end, as Python does it."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    argv = [sys.executable, "-c", "print(1)"]
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        expected = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, env=environ, check=False)
        found = fork_server.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, env=environ)
    assert found.returncode == expected.returncode == 120
    assert found.stderr.splitlines()[1:] == expected.stderr.splitlines()[1:]  # before it stands the stream, under its number


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, elsewhere it is subprocess itself")
@pytest.mark.parametrize("finalized", [False, True])
def test_modules_are_taken_to_pieces_where_that_is_asked_for(*, finalized: bool) -> None:
    """It is what `finalized` is about."""
    code = "import os, sys\nclass Last:\n    def __del__(self, write=os.write): write(1, b'gone')\nsys.last = Last()"
    found = fork_server.run([sys.executable, "-c", code], capture_output=True, text=True, finalized=finalized)
    assert found.stdout == "gone" * finalized


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, elsewhere it is subprocess itself")
def test_it_is_a_child_of_who_asked_and_has_torch() -> None:
    """Killed and waited for as any other."""
    code = "import sys, os, time; print('torch' in sys.modules, os.getppid() == int(sys.argv[1]), flush=True); time.sleep(60)"
    argv = [sys.executable, "-c", code, str(os.getpid())]
    with fork_server.Python(argv, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "True True\n"
        child.terminate()
        assert child.wait(30) == -signal.SIGTERM
