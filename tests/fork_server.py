"""Interpreters with torch in them, forked from one that has imported it: a test's training saves three seconds of CPU.

`Python` is a `subprocess.Popen` for commands that begin with this interpreter or with a script of its environment, and `run` is
`subprocess.run`. The child is forked from a server that each process of the tests starts when it first needs one. The child is
a child of the test as any other, with the streams, the environment, the folder and the arguments that it was given. It differs
from a new interpreter in this: `torch`, `torch._dynamo` and the parts of torchobs' session have been imported, torch computes
on `OMP_NUM_THREADS` threads (default 1), `/proc/self/cmdline` is the server's, and after threads, exit functions and output
have come to their end the process is gone: Python does not take its modules to pieces, which of torch's is as much work as a
short training, and no library's destructors run. A test that is about any of these, or about how an interpreter starts, uses
`subprocess`, and so do options that are not known here; `finalized=True` has Python end as it always does.
`torch.distributed.run` gets a server of its own for its workers.

Only Linux can hand a grandchild to the process that asked for it; elsewhere all of this is `subprocess`.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import fcntl
import gc
import inspect
import json
import linecache
import os
import runpy
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PRELOADED = (
    *("torch", "torch._dynamo", "torch.distributed.run", "torchobs.probes", "torchobs.runtime.command_handler"),
    *("torchobs.runtime.probe_manager", "torchobs.runtime.sampler", "torchobs.runtime.spawned_ranks"),
)
"""What a training imports in any case: an optimizer's first step imports `torch._dynamo`, and `torchobs.init()` the parts of a
session. The session's own module registers what it does at the end when it is imported: by the program, in the usual order."""
_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_LENGTH = struct.Struct("!I")
_PLAIN = {"preexec_fn": None, "shell": False, "pass_fds": ()}
"""Arguments of `Popen._execute_child` that only a new process can have otherwise."""
_READ_AT_THE_START = ("PYTHON", "LD_", "TORCH_LOGS", "TORCHDYNAMO", "TORCHINDUCTOR", "OMP_", "MKL_", "KMP_")
"""Variables that an interpreter or torch reads once, when it starts: other ones than the tests' own need a new interpreter."""
_HANDLED = {"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS"}
_START = "import sys; sys.path.insert(0, sys.argv[1]); from tests import fork_server; del sys.path[:2]; fork_server.serve()"
_EXIT = os._exit  # whatever a program makes of it
_SIGNATURE = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]


@dataclass
class _Command:
    """What the child is to be: `how` is `-c`, `-m` or empty for a script, `what` its code, module or path."""

    how: str
    what: str
    arguments: list[str]
    unbuffered: bool = False
    strict: bool = False  # -W error
    cwd: str | None = None
    environ: dict[str, str] = field(default_factory=dict)
    new_session: bool = False
    finalized: bool = False  # Python is to end as it always does


def _understood(argv: list[str], environ: Mapping[str, str]) -> _Command | None:
    """Return the command if it is one that a forked interpreter can be, else None."""
    if _start_of(environ) != _start_of(os.environ):
        return None
    program, words = argv[0], argv[1:]
    if program != sys.executable:
        script = shutil.which(program, path=environ.get("PATH", ""))
        ours = script is not None and Path(script).parent == Path(sys.executable).parent and _is_ours(script)
        return _Command("", str(script), words) if ours else None
    unbuffered = words[:1] == ["-u"]
    words = words[unbuffered:]
    strict = words[:2] == ["-W", "error"]
    words = words[2 * strict :]
    if len(words) > 1 and words[0] in {"-c", "-m"}:
        return _Command(words[0], words[1], words[2:], unbuffered, strict)
    if words and words[0].endswith(".py"):
        return _Command("", words[0], words[1:], unbuffered, strict)
    return None


def _start_of(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in environ.items() if name.startswith(_READ_AT_THE_START) and name not in _HANDLED}


def _is_ours(script: str) -> bool:
    with open(script, "rb") as file:  # noqa: PTH123  # the first line of what may be a large binary
        return file.readline(4096).strip() == f"#!{sys.executable}".encode()


class Python(subprocess.Popen[Any]):
    """A `Popen` for this interpreter's programs; see the module."""

    finalized = False

    def _execute_child(self, *arguments: Any) -> None:
        bound = _SIGNATURE.bind(self, *arguments).arguments
        command_line = bound["args"]
        argv = [os.fsdecode(word) for word in command_line] if isinstance(command_line, (list, tuple)) else []
        environ = {os.fsdecode(name): os.fsdecode(value) for name, value in (bound["env"] or os.environ).items()}
        plain = sys.platform != "linux" or any(bound.get(name, value) != value for name, value in _PLAIN.items())
        command = None if plain or not argv else _understood(argv, environ)
        if command is None:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        command.environ, command.new_session, command.finalized = environ, bound["start_new_session"], self.finalized
        command.cwd = os.path.realpath(bound["cwd"] or ".")
        if not os.path.isdir(command.cwd):  # noqa: PTH112
            raise FileNotFoundError(command.cwd)
        streams = [bound[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        self.pid = _server().fork(command, [number if stream == -1 else stream for number, stream in enumerate(streams)])
        self._child_created = True
        pipes = (bound[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class _Finalized(Python):
    finalized = True


def run(
    argv: Any,
    *,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    finalized: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` with a forked interpreter."""
    content = options.pop("input", None)
    if content is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with (_Finalized if finalized else Python)(argv, **options) as process:
        try:
            out, err = process.communicate(content, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done: subprocess.CompletedProcess[Any] = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def spawn(function: Callable[..., object], *arguments: str, nprocs: int) -> None:
    """`torch.multiprocessing.spawn` with forked interpreters: a module's function, called with the rank and the arguments."""
    started = []
    for rank in range(nprocs):
        code = f"from {function.__module__} import {function.__name__} as main; main({rank}, *{arguments!r})"
        root = Path(__file__).resolve().parent.parent
        started.append(Python([sys.executable, "-c", code], cwd=root, stderr=subprocess.PIPE, text=True))
    try:
        ended = [(process.communicate(timeout=240)[1], process.returncode) for process in started]
        assert all(code == 0 for _, code in ended), ended
    finally:
        for process in started:
            process.kill()


def said_by_ranks(function: Callable[..., object], directory: Path) -> list[Any]:
    """Spawn two ranks of a function, given the rank and a folder; return what each has written there to `{rank}.json`."""
    spawn(function, str(directory), nprocs=2)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]


class _Server:
    """The side of whoever asks; the server ends when the connection does."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection, self._pid = connection, pid
        self._lock = threading.Lock()

    def fork(self, command: _Command, descriptors: list[int]) -> int:
        """Return the process id of a child of this process that runs `command`."""
        message = json.dumps(asdict(command)).encode()
        with self._lock:
            _be_subreaper(yes=True)  # the child's parent, a child of the server's, is gone at once: it is given to us
            try:
                packed = array.array("i", descriptors)
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)]
                self._connection.sendmsg([_LENGTH.pack(len(message))], ancillary)
                self._connection.sendall(message)
                return int(_LENGTH.unpack(_exactly(self._connection, _LENGTH.size))[0])
            finally:
                _be_subreaper(yes=False)

    def end(self) -> None:
        self._connection.close()
        os.waitpid(self._pid, 0)


_current: dict[int, _Server] = {}
"""The server of this process, by its id: a fork's is not its own."""


def _server() -> _Server:
    pid = os.getpid()
    if pid not in _current:
        ours, theirs = socket.socketpair()
        # a fork has none of the threads of their pools
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            argv = [sys.executable, "-c", _START, str(Path(__file__).resolve().parent.parent)]
            process = subprocess.Popen(argv, env=environ, stdin=theirs.fileno())
        process.returncode = 0  # `end` waits for it
        _current[pid] = server = _Server(ours, process.pid)
        atexit.register(lambda: server.end() if os.getpid() == pid else None)
    return _current[pid]


def _be_subreaper(*, yes: bool) -> None:
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)


def _exactly(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        part = connection.recv(size - len(received))
        if not part:
            raise EOFError
        received += part
    return received


# ------------------------------------------------------------------------------------------------------- the server's side


def serve() -> None:
    """Serve whoever has started this process, over its standard input; in a child, be the program that was asked for."""
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the tests' affair, which end this
    for name in PRELOADED:
        __import__(name)
    threads = os.listdir("/proc/self/task")  # noqa: PTH208
    assert len(threads) == 1, f"what is imported has started threads, which no fork would have: {threads}"
    serve_and_become(connection)


def serve_and_become(connection: socket.socket) -> None:
    """Fork a child for every request, which returns from here with the program's end; the server itself does not return."""
    gc.freeze()  # so that a collection in a child copies none of it
    while True:
        try:
            first, ancillary, _, _ = connection.recvmsg(_LENGTH.size, socket.CMSG_SPACE(64 * 4))
            message = _exactly(connection, _LENGTH.unpack(first + _exactly(connection, _LENGTH.size - len(first)))[0])
        except (EOFError, OSError):
            os._exit(0)
        descriptors = array.array("i")
        for _, _, packed in ancillary:
            descriptors.frombytes(packed)
        pid = _forked_twice()
        if pid == 0:
            connection.close()
            _become(_Command(**json.loads(message)), list(descriptors))
            return
        for descriptor in descriptors:
            os.close(descriptor)
        try:
            connection.sendall(_LENGTH.pack(pid))
        except OSError:
            os._exit(0)


def _forked_twice() -> int:
    """Return 0 in a grandchild, which has been given to the nearest subreaper, and its process id here."""
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        first = os.getpid()
        pid = os.fork()
        if pid:
            os.write(writing, _LENGTH.pack(pid))
            os._exit(0)
        while os.getppid() == first:  # it is about to end, and the program is to see its true parent
            time.sleep(0.0005)
        os.close(reading)
        os.close(writing)
        return 0
    os.waitpid(between, 0)
    pid = int(_LENGTH.unpack(os.read(reading, _LENGTH.size))[0])
    os.close(reading)
    os.close(writing)
    return pid


def _become(command: _Command, descriptors: list[int]) -> None:
    """Make this process what a new interpreter with that command line would be, and run it to its end."""
    if command.new_session:
        os.setsid()
    _take_streams(descriptors)
    os.environ.clear()
    os.environ.update(command.environ)
    os.chdir(command.cwd or "/")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    unbuffered = command.unbuffered or bool(command.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        line_buffered = number == 2 or (number == 1 and os.isatty(number))
        errors = "backslashreplace" if number == 2 else None
        stream = open(number, "w" if number else "r", 1 if line_buffered else -1, closefd=False, errors=errors)  # noqa: SIM115
        if unbuffered and number:
            stream.reconfigure(write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    _end_without_libraries()
    import torch

    torch.set_num_threads(int(command.environ.get("OMP_NUM_THREADS", "1")))
    if command.what == "torch.distributed.run":
        _serve_the_workers()
    status = _execute(command)
    if not command.finalized:
        _end(status)
    if status < 0:
        atexit.register(os.kill, os.getpid(), -status)
    raise SystemExit(status)


def _end(status: int) -> None:
    """Do what Python does at its end up to where it takes its modules to pieces; return if the output cannot be written."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except (OSError, ValueError):
        return  # which Python itself tells
    if status < 0:
        os.kill(os.getpid(), -status)
    _EXIT(status & 0xFF)


def _end_without_libraries() -> None:
    """Let the process be gone once Python has ended in order: the destructors of torch's libraries take 0.1 s."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # glibc's
        libc.on_exit(libc._exit, None)
        libc.__cxa_atexit(libc.fflush, None, None)  # what comes last is done first


def _take_streams(streams: list[int]) -> None:
    """Make the descriptors this process's input, output and errors."""
    above = [fcntl.fcntl(stream, fcntl.F_DUPFD_CLOEXEC, max(3, *streams) + 1) for stream in streams]
    for stream in streams:
        os.close(stream)
    for number, stream in enumerate(above):
        os.dup2(stream, number, inheritable=True)
        os.close(stream)


def _serve_the_workers() -> None:
    """Let what this process, a launcher, starts be forked, too: from a copy of it, made before it has any thread."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):  # whoever reads the launcher's output waits for its end, not for the server's
            os.dup2(null, number)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        serve_and_become(theirs)
        raise SystemExit  # a worker has come to its end
    theirs.close()
    _current[os.getpid()] = _Server(ours, pid)
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    vars(subprocess_handler)["Popen"] = Python


def _execute(command: _Command) -> int:
    """Run the program; return its status, negative for the signal that is to end it."""
    sys.argv = ["-c" if command.how == "-c" else command.what, *command.arguments]
    options = [*(["-u"] * command.unbuffered), *(["-W", "error"] * command.strict), *filter(None, [command.how])]
    sys.orig_argv = [sys.executable, *options, command.what, *command.arguments]
    first = {"-c": "", "-m": command.cwd or ""}.get(command.how, str(Path(command.what).resolve().parent))
    sys.path[:0] = [first, *filter(None, command.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if command.strict:
        warnings.simplefilter("error")
    names = sys.modules["__main__"].__dict__
    names.clear()
    names |= {"__name__": "__main__", "__builtins__": sys.modules["builtins"], "__doc__": None, "__package__": None}
    names |= {"__loader__": None, "__spec__": None, "__annotations__": {}}
    for module in ("tests.fork_server", "tests"):
        del sys.modules[module]
    try:
        if command.how == "-m":
            runpy._run_module_as_main(command.what)  # type: ignore[attr-defined]  # as the interpreter itself does
        elif command.how == "-c":
            code = compile(command.what, "<string>", "exec")
            if (register := getattr(linecache, "_register_code", None)) is not None:  # tracebacks show it since Python 3.13
                register(code, command.what, "<string>")
            exec(code, names)  # noqa: S102
        else:
            path = os.path.abspath(command.what)  # noqa: PTH100  # as the interpreter does it
            names |= {"__file__": path, "__cached__": None}
            exec(compile(Path(path).read_bytes(), path, "exec"), names)  # noqa: S102
    except SystemExit as left:
        return _status_of(left.code)
    except BaseException as error:  # noqa: BLE001  # told as the interpreter would, without frames of ours
        return _tell(error)
    return 0


def _status_of(code: object) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    sys.stdout.flush()
    print(code, file=sys.stderr)  # noqa: T201  # as the interpreter does
    return 1


def _tell(error: BaseException) -> int:
    """Do what an interpreter does about an exception that nobody has caught; return the status."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename in {__file__, "<frozen runpy>", runpy.__file__}:
        traceback = traceback.tb_next
    sys.excepthook(type(error), error.with_traceback(traceback), traceback)
    if isinstance(error, KeyboardInterrupt):  # whoever waits for it is to see that a signal has ended it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        return -signal.SIGINT
    return 1
