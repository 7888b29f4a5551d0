"""``torchobs run``: run an unmodified training script with torchobs from its first line.

``runpy.run_path`` is unsuitable: it restores the old ``__main__``, so that objects pickled by name afterwards (classes in
the queues of DataLoader workers, in ``atexit`` handlers) are not found, and clears the program's globals at its end.

Only on a terminal, on rank 0, and to standard error: the script's streams and exit status are not affected.
"""

from __future__ import annotations

import argparse
import atexit
import builtins
import contextlib
import logging
import os
import pkgutil
import re
import runpy
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from enum import Enum
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING, NamedTuple

from torchobs.cli import arguments
from torchobs.config import settings
from torchobs.config.identity import exit_status
from torchobs.config.options import either
from torchobs.support import error_guard

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

    from torchobs.ranks.runs import Chosen


_HOOKS = tuple(str(Path(__file__).parent.parent / name) for name in ("probes", "flight", "support", "runtime/profiler.py"))
"""Files with the frames of hooks. The user's signal handler may run within any of them"""
_STDERR = 2
_MOST_FINDINGS = 3
_LEAST_NAMED = 0.01
_PATIENCE_S = 2.0
"""For other ranks to end after this one, so that the summary is the run's"""
_VALUED = (
    settings.named("exporter_address")._replace(flag="--address", metavar="HOST:PORT"),
    arguments.DIRECTORY,
    settings.named("level")._replace(flag="--level"),
    settings.named("tag")._replace(flag="--tag", metavar="TAG"),
    settings.NOTIFY,
)
_OPTIONS = (*(option.flag for option in _VALUED), "--no-exporter", "--no-keep", "--quiet", "--help", "-m")
_PYTHON = re.compile(r"python[\d.]*")
"""The program that people usually write before a script"""


class ProgramKind(Enum):
    """The form of the Python command line."""

    SCRIPT = "python script.py"
    PACKAGE = "python directory-or-zip"
    MODULE = "python -m module"


class NoSuchProgramError(Exception):
    """The program does not exist; the message is Python's own."""


class Program(NamedTuple):
    """What to run: the path or the module's name, and the program's arguments."""

    kind: ProgramKind
    name: str
    arguments: tuple[str, ...]


def find(path: str, arguments: tuple[str, ...]) -> Program:
    """Return the program at ``path``. Raises :class:`NoSuchProgramError` when it is not a readable file."""
    if pkgutil.get_importer(path) is not None:
        return Program(ProgramKind.PACKAGE, path, arguments)
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as problem:
        raise NoSuchProgramError(f"can't open file {_absolute(path)!r}: [Errno {problem.errno}] {problem.strerror}") from None
    return Program(ProgramKind.SCRIPT, path, arguments)


def enter(program: Program) -> None:
    """Set ``sys.argv``, ``sys.path`` and ``sys.modules['__main__']`` as Python does before the program's first line."""
    sys.argv[:] = ["-m" if program.kind is ProgramKind.MODULE else program.name, *program.arguments]
    if not _safe_path() or program.kind is ProgramKind.PACKAGE:
        _enter_path(program)
    main = _new_main(sys.modules["__main__"])
    # multiprocessing keeps the main module of its import time, and looks up objects from spawned workers there
    sys.modules.update({name: main for name in ("__main__", "__mp_main__") if name in sys.modules})


def execute(program: Program) -> None:
    """Run the program to its end, in ``__main__``.

    Its exceptions propagate to the interpreter (status 1, or SIGINT), with tracebacks that start at the program's frame.
    """
    try:
        if program.kind is ProgramKind.MODULE:
            runpy._run_module_as_main(program.name)  # type: ignore[attr-defined]  # noqa: SLF001  # what `python -m` itself calls
        elif program.kind is ProgramKind.PACKAGE:
            runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]  # noqa: SLF001  # as above
        else:
            main = vars(sys.modules["__main__"])
            exec(_load(_absolute(program.name), main), main)  # noqa: S102  # running the user's script is the purpose
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        _show_once_from(_without_hooks(trace))
        raise


def _load(path: str, main: dict[str, object]) -> CodeType:
    main["__file__"] = path
    if path.endswith(".pyc"):
        compiled = SourcelessFileLoader("__main__", path)
        main["__loader__"] = compiled
        if (code := compiled.get_code("__main__")) is not None:
            return code
    main["__loader__"] = SourceFileLoader("__main__", path)
    # not by the loader, which would add its own frames to a SyntaxError
    return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)


def _enter_path(program: Program) -> None:
    first = {
        ProgramKind.SCRIPT: lambda: str(Path(os.path.realpath(program.name)).parent),
        ProgramKind.PACKAGE: lambda: _absolute(program.name),
        ProgramKind.MODULE: os.getcwd,
    }[program.kind]
    started_with_one = not _safe_path()
    sys.path[: 1 if started_with_one else 0] = [first()]


def _safe_path() -> bool:
    """Return whether Python was started with -P or -I, which leave the script's directory out of ``sys.path``."""
    return bool(getattr(sys.flags, "safe_path", sys.flags.isolated))


def _absolute(path: str) -> str:
    # joined and not normalised, as Python keeps the "./" in its own __file__
    return os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118  # pathlib normalises


def _new_main(old: ModuleType) -> ModuleType:
    main = ModuleType("__main__")
    if "__annotations__" in vars(old):  # present or not depending on the Python version
        vars(main)["__annotations__"] = {}
    vars(main).update({"__builtins__": builtins, "__file__": None, "__cached__": None})
    return main


def _without_hooks(trace: TracebackType | None) -> TracebackType | None:
    """Remove our hooks' frames from a traceback, except one that raised."""
    kept = list[TracebackType]()
    while trace is not None:
        if trace.tb_next is None or not trace.tb_frame.f_code.co_filename.startswith(_HOOKS):
            kept.append(trace)
        trace = trace.tb_next
    for entry, following in zip(kept, [*kept[1:], None], strict=True) if kept else ():
        entry.tb_next = following
    return kept[0] if kept else None


def _show_once_from(trace: TracebackType | None) -> None:
    """Shorten the traceback that the interpreter is about to show, then restore the program's own ``sys.excepthook``."""
    its_own = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
        sys.excepthook = its_own
        error.__traceback__ = sys.last_traceback = trace
        its_own(kind, error, trace)

    sys.excepthook = show


class _Watched(NamedTuple):
    """The run that this process belongs to."""

    directory: str
    run_id: str
    pid: int
    is_read: bool
    """whether a person reads the summary"""
    most_kept: int


class Summary:
    """Prints the summary at the end, and keeps the run. Must be made before ``init()``, so that its exit handler runs last."""

    def __init__(self, *, quiet: bool) -> None:
        from torchobs.runtime.notebook import PageAddress

        PageAddress.silent = quiet or not os.isatty(_STDERR)
        self._quiet = quiet
        self._watched: _Watched | None = None
        # exit handlers run last in, first out: this one after the session's and the script's
        atexit.register(error_guard.call, error_guard.CircuitBreaker("summary"), self.end)

    def begin(self) -> None:
        """Remember the run of the present session."""
        from torchobs.runtime.session import current

        session = current()
        writer = session.writer if session is not None else None
        if session is None or writer is None or session.identity is None:
            return
        is_quiet = self._quiet or session.identity.rank or not session.settings.summary or not os.isatty(_STDERR)
        directory, most = str(Path(writer.path).parent), session.settings.keep_runs
        self._watched = _Watched(directory, session.identity.run_id, os.getpid(), not is_quiet, most)

    def end(self) -> None:
        """Print the summary of the run after everything else has ended. It is kept by its last rank, or by the exporter."""
        watched, self._watched = self._watched, None
        if watched is None or watched.pid != os.getpid():  # a forked child
            return
        try:
            self._print_and_keep(watched)
        finally:
            if getattr(sys, "last_type", None) is KeyboardInterrupt:
                # Python ends by SIGINT then, but forgets it when any text is evaluated, as a named tuple does when it is made
                with contextlib.suppress(KeyboardInterrupt):
                    exec("raise KeyboardInterrupt")  # noqa: S102  # reminds it

    @staticmethod
    def _print_and_keep(watched: _Watched) -> None:
        from torchobs.flight.directory import opened
        from torchobs.node.election import is_decided

        with opened(watched.directory) as directory_fd:
            keeps = watched.most_kept and not is_decided(directory_fd)
        if not watched.is_read and not keeps:
            return
        from torchobs.ranks.runs import choose, listing

        directory = Path(watched.directory)
        keeps = keeps and not any(run.lives for run in listing(directory).runs if run.run_id == watched.run_id)
        if not watched.is_read and not keeps:
            return
        chosen, until_s = choose([directory], watched.run_id), time.monotonic() + _PATIENCE_S
        while watched.is_read and {"alive", "finished"} <= {rank.state for rank in chosen.ranks} and time.monotonic() < until_s:
            time.sleep(0.2)  # the other ranks end a moment later
            chosen = choose([directory], watched.run_id)
        if watched.is_read:
            more = f"torchobs inspect {shlex.quote(watched.directory)} --run {shlex.quote(watched.run_id)}"
            _print([*summary_lines(chosen), f"more: {more}"])
        if keeps:
            from torchobs.document import kept

            if (place := kept.directory()) is not None:
                with contextlib.suppress(kept.NotKeptError, OSError):  # the disk is full
                    kept.keep(chosen, place, watched.most_kept)


def summary_lines(chosen: Chosen) -> list[str]:
    """Return a summary of the run in a few lines: health, how it ended, worst findings, what to do, where the time went."""
    from torchobs.diagnosis.action import verdict
    from torchobs.diagnosis.diagnosis import diagnose_run
    from torchobs.diagnosis.health import INFO
    from torchobs.document.sections import goodput

    ranks = chosen.ranks
    diagnosis = diagnose_run(ranks, chosen.launchers)
    ended, *rest = diagnosis.by_rank[diagnosis.principal]
    worst = [finding.long for finding in [*diagnosis.together, *rest] if finding.severity != INFO][:_MOST_FINDINGS]
    uses = goodput(ranks[diagnosis.principal])
    least = _LEAST_NAMED * sum(uses.parts.values()) if uses else 0.0
    parts = [f"{name} {share}" for name, seconds, share in uses.largest_first() if seconds >= least] if uses else []
    owner = f" of rank {ranks[diagnosis.principal].rank}" if len(ranks) > 1 else ""
    went = [f"time{owner} since {ranks[diagnosis.principal].since}: {', '.join(parts)}"] if parts else []
    after = verdict(ranks, diagnosis.principal, chosen.before.get(ranks[diagnosis.principal].rank))
    advice = [] if after.cause in {"running", "finished", "interrupted"} else [f"action: {after.action}. {after.reason}"]
    return [diagnosis.verdict.long, ended.long, *worst, *advice, *went]


def _print(lines: Sequence[str]) -> None:
    """Write in one piece to descriptor 2: the script may have replaced or closed ``sys.stderr``.

    If it has closed the descriptor too, as a daemon does, another file of it may have the number: then nothing is written.
    """
    with contextlib.suppress(OSError):
        if not os.isatty(_STDERR):
            return
        os.write(_STDERR, "".join(f"torchobs: {line}\n" for line in lines).encode(errors="replace"))


_DESCRIPTION = """\
Run a training script or a module as Python would, and record what happens in it. The script needs no change: its arguments,
exit status, signals, input and output stay its own.

The first rank on a machine starts an exporter, which serves metrics and a live page on http://127.0.0.1:10960 (or the next free
port; exporter.json in the flight directory has the address) and ends after the machine's last training. On a terminal, rank 0
prints the page's address at the start and a summary of the run at the end. What `torchobs report` shows of a run that has ended
is kept, also beyond a reboot (docs/report.md)."""

_EXAMPLES = """\
examples:
  torchobs run train.py --lr 3e-4             instead of: python train.py --lr 3e-4
  torchobs run -m package.train               instead of: python -m package.train
  torchrun --nproc-per-node 2 --no-python torchobs run train.py
                                              instead of: torchrun --nproc-per-node 2 train.py
  torchobs run --no-exporter train.py         record only; `torchobs inspect` and `torchobs top` need no exporter
  torchobs run -- --odd-name.py               a script whose name begins with a dash

Every setting can also be given as an environment variable, such as TORCHOBS_LEVEL; an option overrides its variable."""


class _Parser(arguments.Parser):
    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """Print the help or an error as the other commands do. No user code runs after that."""
        if status := arguments.guarded(lambda: int(not (file or sys.stderr).write(message)), "torchobs run"):
            sys.exit(status)


def main(argv: Sequence[str], begin: Callable[..., object] | None = None) -> None:
    """Run ``torchobs run`` with these arguments; ``begin``: :func:`torchobs.init`, replaceable by tests.

    Returns when the script ends by itself. Raises what the script raises, ``SystemExit`` included.
    """
    options, what = _parse(list(argv))
    if options.notify:
        _begin_anew(options.notify, list(argv))
    enter(what)
    breaker, summary = error_guard.CircuitBreaker("run"), Summary(quiet=options.quiet)
    error_guard.call(breaker, begin or _init, **_overrides(options))
    for failure in breaker.failures:
        logging.getLogger("torchobs").warning(
            "torchobs could not start (%s at %s): the script runs without it", failure.exception, failure.location
        )
    error_guard.call(error_guard.CircuitBreaker("summary"), summary.begin)
    try:
        execute(what)
    except SystemExit as leaving:
        error_guard.call(breaker, _note_exit, leaving)
        raise


def split(argv: list[str], valued: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Split into our options and the command, which begins at the script's name or ``-m``; ``valued`` options take a word."""
    valued = valued or [str(option.flag) for option in _VALUED]
    at = 0
    while at < len(argv) and argv[at].startswith("-") and not argv[at].startswith("-m"):
        if argv[at] == "--":
            return argv[:at], argv[at + 1 :]
        at += 2 if argv[at] in valued else 1
    return argv[:at], argv[at:]


def parser() -> arguments.Parser:
    """Return the parser for the options before the script."""
    usage = "torchobs run [options] script.py [arguments …]\n       torchobs run [options] -m module [arguments …]"
    parser = arguments.parser("run", usage, _DESCRIPTION, _EXAMPLES, _Parser)
    parser.add_argument("--no-exporter", action="store_true", help="Start no exporter on this machine.")
    parser.add_argument("--no-keep", action="store_true", help="Keep nothing of the run beyond the machine's next start.")
    parser.add_argument("--quiet", action="store_true", help="Print neither the page's address nor the summary.")
    for option in _VALUED:
        arguments.add(parser, option)
    return parser


def _parse(argv: list[str]) -> tuple[argparse.Namespace, Program]:
    flags, command = split(argv)
    flag_parser = parser()
    options, unknown = flag_parser.parse_known_args(flags)
    if unknown:
        flag_parser.error(f"unknown option {unknown[0]!r}, expected {either(_OPTIONS)}; the script's own come after its name")
    if not command or command == ["-m"]:
        flag_parser.error("a script or `-m module` is missing")
    try:
        return options, split_program(command)
    except NoSuchProgramError as problem:
        flag_parser.exit(2, f"torchobs run: {problem}\n")


def split_program(command: list[str]) -> Program:
    """Return the program that a command line names; raises ``NoSuchProgramError`` if there is none."""
    first, *rest = command
    if first == "-m":
        first, *rest = f"-m{rest[0]}", *rest[1:]
    if first.startswith("-m"):
        return Program(ProgramKind.MODULE, first[2:], tuple(rest))
    if _PYTHON.fullmatch(Path(first).name) and rest and not Path(first).is_dir():
        raise NoSuchProgramError(f"the script is run by this Python, {sys.executable}: leave out {first!r}")
    return find(first, tuple(rest))


def _overrides(options: argparse.Namespace) -> dict[str, object]:
    """Return the arguments of ``init()``; the exporter is on by default here."""
    decided = settings.environment().get("TORCHOBS_EXPORTER", "").strip()
    return {
        "exporter": False if options.no_exporter else None if decided else True,
        "exporter_address": options.exporter_address,
        "flight_dir": options.flight_dir,
        "level": options.level,
        "tag": options.tag,
        "keep_runs": 0 if options.no_keep else None,
    }


def _begin_anew(notify: str, argv: list[str]) -> None:
    """Begin anew with the URL in the environment: everybody can read a command line, also that of forked workers."""
    flags, _ = split(argv)
    kept = [word for at, word in enumerate(flags) if not word.startswith("--notify") and flags[at - 1 : at] != ["--notify"]]
    before, environ = sys.orig_argv[: -len(argv)], {**settings.environment(), settings.NOTIFY.variables[0]: notify}
    if [*before, *argv] != sys.orig_argv:  # called by another program
        before = [sys.executable, "-m", "torchobs", "run"]
    os.execve(sys.executable, [*before, *kept, *argv[len(flags) :]], environ)  # noqa: S606  # the same program once more


def _init(**overrides: object) -> object:
    import torchobs

    return torchobs.init(**overrides)


def _note_exit(leaving: SystemExit) -> None:
    from torchobs.runtime import session

    if (running := session.current()) is not None:
        running.note_exit(exit_status(leaving.code), leaving)
