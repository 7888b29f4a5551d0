"""`torchobs run x.py` is `python x.py`: the same output, errors and exit status, whatever the script does."""

import os
import pty
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from textwrap import dedent

import pytest

from tests import fork_server
from tests.support import clean_environment

RUN = ("-m", "torchobs", "run", "--no-exporter")

SCRIPTS = {
    # what a script sees of itself
    "names": """
        import __main__, sys
        seen = {name: value for name, value in globals().items() if name not in ("sys", "__main__")}
        print(seen, type(__loader__), sys.argv, sys.path[0], vars(__main__) is globals(), __name__)
    """,
    "annotations": "x: int = 1\nprint(__annotations__)",
    "docstring": "'''what it is for'''\nprint(__doc__)",
    "inspect": "import inspect\nclass A:\n    y = 1\nprint(inspect.getsource(A))",
    "chdir": "import os, sys\nos.chdir('/')\nprint(__file__, sys.path[0], os.path.exists(__file__))",
    "stdin": "import sys\nprint(sys.stdin.read().upper(), sys.stdin.isatty(), sys.stdout.isatty())",
    "buffering": "import os\nprint('first')\nos.write(1, b'second\\n')",
    # how it ends
    "exit_status": "import sys\nsys.exit(3)",
    "exit_message": "import sys\nsys.exit('bad')",
    "exit_none": "import sys\nsys.exit()",
    "exit_true": "raise SystemExit(True)",
    "exit_large": "raise SystemExit(300)",
    "exit_object": "raise SystemExit(ValueError('q'))",
    "exit_subclass": "class Leave(SystemExit):\n    pass\nraise Leave(4)",
    "os_exit": "import os\nprint('x', flush=True)\nos._exit(7)",
    "interrupt": "raise KeyboardInterrupt",
    "sigint": "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)",
    "sigterm": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
    "sigkill": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "own_sigterm": """
        import os, signal, sys
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
        os.kill(os.getpid(), signal.SIGTERM)
    """,
    "dispositions": """
        import signal
        print([(int(s), str(signal.getsignal(s))) for s in signal.valid_signals() if signal.getsignal(s) != signal.SIG_DFL])
        print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    """,
    # how it fails
    "error": "def f():\n    1 / 0\nf()",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('x') from error",
    "clipping": """
        import torch
        model = torch.nn.Linear(2, 1)
        (model(torch.ones(1, 2)).sum() * float("nan")).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    """,
    "backward": """
        import torch
        def train(x):
            x.backward()
        train(torch.ones(2, requires_grad=True))
    """,
    "chained_in_torch": """
        import torch
        from torch.utils.data import DataLoader
        class Bad(torch.nn.Linear):
            def train(self, mode=True):
                super().train(mode)
                [mode for mode in DataLoader([1, object()], batch_size=2)]
        try:
            Bad(1, 1).eval()
        except TypeError as error:
            torch.save(error, "/no such directory/x")
    """,
    "generator_exit": "raise GeneratorExit",
    "syntax": "x = (\ny = 3",
    "open_string": "x = '''abc",
    "indentation": "if 1:\nx = 2",
    "own_hook": """
        import sys
        sys.excepthook = lambda kind, error, trace: print(kind, trace.tb_frame.f_code.co_name, error.__traceback__ is trace)
        1 / 0
    """,
    "warning": "import warnings\nwarnings.warn('old', DeprecationWarning)",
    # what happens after its last line
    "at_exit": "import atexit\natexit.register(lambda: print('bye', __name__))\nraise RuntimeError('r')",
    "at_exit_pickle": """
        import atexit, pickle
        class A:
            pass
        atexit.register(lambda: print(type(pickle.loads(pickle.dumps(A())))))
    """,
    "at_exit_traceback": """
        import atexit, sys, traceback
        atexit.register(lambda: traceback.print_tb(sys.last_traceback))
        1 / 0
    """,
    "destructor": "class A:\n    def __del__(self):\n        print('del')\na = A()",
    "destructor_error": "class A:\n    def __del__(self):\n        print('del')\na = A()\n1 / 0",
    "stdout_closed": "import sys\nsys.stdout.close()",
    # threads
    "thread": "from threading import *\nThread(target=lambda: (main_thread().join(), print('t'))).start()\nprint('m')",
    "thread_exit": """
        import sys, threading
        thread = threading.Thread(target=lambda: sys.exit(3))
        thread.start()
        thread.join()
    """,
    "thread_error": """
        import threading
        thread = threading.Thread(target=lambda: 1 / 0, name="T")
        thread.start()
        thread.join()
    """,
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
        for method in ("spawn", "forkserver", "fork")
    },
    "pool": """
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context

        def square(x):
            return x * x

        if __name__ == "__main__":
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                print(list(pool.map(square, range(3))))
    """,
    "fork_exit": """
        import os, sys, warnings
        warnings.simplefilter("ignore")  # since Python 3.12 os.fork() warns where there are threads, such as our sampler
        if os.fork() == 0:
            sys.exit(5)
        print(os.waitstatus_to_exitcode(os.wait()[1]))
    """,
    "wait_for_any_child": "import os\ntry:\n    os.wait()\nexcept ChildProcessError:\n    print('no child')",
    "descriptors": """
        import os
        print([n for n in range(64) if os.path.exists(f"/proc/self/fd/{n}") and os.get_inheritable(n)])
    """,
}
"""Little scripts, one for each way in which a program could notice where it runs."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with every script."""
    for name, text in SCRIPTS.items():
        (tmp_path / f"my_{name}.py").write_text(dedent(text))
    return tmp_path


def outcome(*arguments: str, cwd: Path, flight_dir: Path, torch: bool = False) -> tuple[int, str, str]:
    """How Python with these arguments ends and what it says, but for addresses in memory. `torch`: it has imported it."""
    done = (fork_server.run if torch else subprocess.run)(
        [sys.executable, *arguments],
        check=False,
        cwd=cwd,
        env=clean_environment() | {"TORCHOBS_DIR": str(flight_dir), "PYTHONDONTWRITEBYTECODE": "1"},
        input="typed",
        capture_output=True,
        text=True,
        timeout=60,
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


@pytest.mark.parametrize(
    "name", ["names", "error", "syntax", "exit_status", "interrupt", "processes_spawn", "processes_forkserver"]
)
def test_a_module_cannot_tell(name: str, folder: Path, flight_dir: Path) -> None:
    """`torchobs run -m x …` is `python -m x …`."""
    same("-m", f"my_{name}", "--flag", cwd=folder, flight_dir=flight_dir)


@pytest.mark.parametrize("flags", [("-I",), ("-O",), ("-W", "error"), ("-X", "dev")], ids=" ".join)
@pytest.mark.parametrize("name", ["names", "docstring", "warning", "processes_spawn"])
def test_python_s_own_options_hold(name: str, flags: tuple[str, ...], folder: Path, flight_dir: Path) -> None:
    """`python -W error -m torchobs run x.py` is `python -W error x.py`: nothing of ours warns, leaks or needs `sys.path[0]`."""
    same(f"my_{name}.py", cwd=folder, flight_dir=flight_dir, flags=flags)


@pytest.mark.parametrize("path", ["./my_names.py", "sub/../my_names.py", "link.py", "sub/link.py"])
def test_a_path_is_what_was_typed(path: str, folder: Path, flight_dir: Path) -> None:
    """`__file__` is not normalised, a link's directory on `sys.path` is its target's."""
    (folder / "sub").mkdir()
    (folder / "link.py").symlink_to("my_names.py")
    (folder / "sub" / "link.py").symlink_to("../my_names.py")
    assert "sys.path" not in same(path, cwd=folder, flight_dir=flight_dir)[1]


def test_a_script_in_another_directory_finds_its_neighbours(folder: Path, flight_dir: Path) -> None:
    """And what lies in the working directory it does not find."""
    (folder / "sub").mkdir()
    (folder / "sub" / "train.py").write_text("import neighbour\nprint(neighbour.x)\nimport stranger\n")
    (folder / "sub" / "neighbour.py").write_text("x = 1\n")
    (folder / "stranger.py").touch()
    status, out, err = same("sub/train.py", cwd=folder, flight_dir=flight_dir)
    assert (status, out) == (1, "1\n")
    assert "No module named 'stranger'" in err


@pytest.mark.parametrize("package", ["folder", "app.zip", "./folder/"])
def test_a_directory_or_zip_with_a_main_module(package: str, tmp_path: Path, flight_dir: Path) -> None:
    """`python app.zip`, which is how whole projects are shipped to a cluster."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text(dedent(SCRIPTS["names"]) + "import part\n")
    (tmp_path / "folder" / "part.py").write_text("print(__file__)\n")
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        for part in ("__main__.py", "part.py"):
            archive.write(tmp_path / "folder" / part, part)
    assert same(package, "--flag", cwd=tmp_path, flight_dir=flight_dir)[0] == 0


def test_a_package_with_a_main_module(tmp_path: Path, flight_dir: Path) -> None:
    """`-m package` runs its `__main__`, with its relative imports."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import sys\nprint(sys.argv)\n")
    (tmp_path / "package" / "part.py").write_text("x = 1\n")
    (tmp_path / "package" / "__main__.py").write_text(
        "from .part import x\nimport sys\nprint(x, sys.argv, __package__, __spec__.name)\n"
    )
    assert same("-m", "package", "--flag", cwd=tmp_path, flight_dir=flight_dir)[0] == 0


@pytest.mark.parametrize("command", [("-m", "no_such_module"), ("-m", "empty"), ("empty",)])
def test_what_cannot_be_run_is_refused_in_python_s_words(command: tuple[str, ...], tmp_path: Path, flight_dir: Path) -> None:
    """A module that is not there, a package or directory without `__main__`."""
    (tmp_path / "empty").mkdir()
    status, _, err = same(*command, cwd=tmp_path, flight_dir=flight_dir)
    assert status == 1
    assert "no_such_module" in err or "__main__" in err


def test_compiled_scripts_run(tmp_path: Path, flight_dir: Path) -> None:
    """`python x.pyc`."""
    (tmp_path / "x.py").write_text("print(__file__, type(__loader__))\n")
    compile_it = "import py_compile; py_compile.compile('x.py', 'x.pyc')"
    subprocess.run([sys.executable, "-c", compile_it], cwd=tmp_path, check=True)
    assert same("x.pyc", cwd=tmp_path, flight_dir=flight_dir)[0] == 0


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
