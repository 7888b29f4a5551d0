"""``init`` and ``shutdown``: composes settings, identity, the flight file, the probes and the sampler. No logic of its own."""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs._version import __version__
from torchobs.config import option_types, settings
from torchobs.flight.files.cleanup import clean
from torchobs.flight.files.location import NoPlaceError, control_directory, open_place, remedy
from torchobs.flight.format.layout import Exit
from torchobs.flight.writer.writer import FlightWriter, open_writer
from torchobs.identity import identity, process
from torchobs.probes.compile.dynamo_rules import DynamoRules
from torchobs.probes.core.context import ProbeContext
from torchobs.probes.core.device_scalars import DeviceValues
from torchobs.probes.core.patch_watch import PatchWatch
from torchobs.probes.core.step_recorder import StepRecorder
from torchobs.probes.lifecycle.exits import ExitProbe
from torchobs.runtime import spawned_ranks
from torchobs.runtime.command_handler import Commands
from torchobs.runtime.probe_manager import ProbeManager
from torchobs.runtime.run_span import RunSpan, of_launcher
from torchobs.runtime.sampler import Sampler
from torchobs.runtime.spawned_ranks import SpawnedRanks, described, hide_launcher_file, tell_of_children
from torchobs.support import graph_safe
from torchobs.support.after_fork import renew_in_child
from torchobs.support.error_guard import CircuitBreaker, call, settle
from torchobs.support.import_hooks import after_import, cancel
from torchobs.support.rank_log import OWN, name_nobody, name_rank

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.abc import MetaPathFinder
    from multiprocessing.util import Finalize
    from types import TracebackType

    from torchobs.config.settings import Settings
    from torchobs.identity.identity import Identity

logger = logging.getLogger("torchobs")
_ENDINGS = {
    Exit.FINISHED: "finished", Exit.EXCEPTION: "exception", Exit.EXIT_CODE: "exit_code", Exit.INTERRUPTED: "interrupted",
}  # fmt: skip
_lock = threading.RLock()
_current: Session | None = None


class Session:
    """What ``init()`` returns. A context manager: leaving it is :func:`shutdown`.

    Inert where torchobs is off or has no place to write.
    """

    def __init__(self) -> None:
        self.settings: Settings = settings.Settings()
        self.given: dict[str, str] = {}
        """The arguments of ``init()`` that decided, as text"""
        self.identity: Identity | None = None
        self.context: ProbeContext | None = None
        self.pid = os.getpid()
        self._switches: ProbeManager | None = None
        self._exits = ExitProbe()
        self._dynamo = DynamoRules()
        self._torch: MetaPathFinder | None = None
        self._sampler: Sampler | None = None
        self._ended: tuple[int, int] | None = None
        self._farewell: Finalize | None = None
        self._samples: list[tuple[str, Callable[[], None]]] = []
        self._slow: list[tuple[str, Callable[[], None]]] = []
        self.run: RunSpan | None = None
        self._commands: Commands | None = None
        self._children: SpawnedRanks | None = None
        self._inherited: Session | None = None
        """A parent's, in a forked child: kept, for torch records CUDA events when pinned memory is freed, which no child may"""

    def __enter__(self) -> Session:  # noqa: PYI034  # typing.Self needs Python 3.11
        """Return the session."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Shut down; an exception on its way out is recorded, not swallowed."""
        del kind, trace
        if error is not None and self.active:
            settle(CircuitBreaker("exits"), self._exits.passes, error)
        self.close()

    @property
    def active(self) -> bool:
        """Whether anything is recorded, in this process."""
        return self.context is not None and self.pid == os.getpid()

    @property
    def writer(self) -> FlightWriter | None:
        """The flight file's writer; ``None`` while inactive."""
        return self.context.writer if self.context is not None and self.active else None

    def open(self, chosen: Settings, who: Identity) -> None:
        """Create the flight file, start the sampler, install the probes. Raises ``NoPlaceError`` if there is none."""
        self.settings, self.identity = chosen, who
        place = open_place(str(chosen.flight_dir) if chosen.flight_dir else None, settings.environment().get("XDG_RUNTIME_DIR"))
        resource = who.described() | _versions() | of_launcher(chosen) | described()
        try:
            writer = open_writer(place, resource, chosen.file_size)
        except OSError as error:
            os.close(place.fd)
            what = f"{error.strerror or error}: the flight file cannot be written in {place.path}; {remedy(error)}"
            raise NoPlaceError(what, of_one_rank=True) from error
        context = self.context = ProbeContext(chosen, writer, StepRecorder(writer), DeviceValues())
        writer.event(catalog.EVENT_RUN_START.name, {"launcher": who.launcher, "restart": who.restart})
        self.run = RunSpan(chosen, writer, lambda: self.writer)
        self.run.begin()
        self.run.watch(context)
        context.span = self.run.write
        self._switches = ProbeManager(context, self._samples, self._slow)
        control_dir = str(chosen.control_dir) if chosen.control_dir else None
        self._commands = Commands(context, self._switches, control_directory(control_dir, place.path))
        self._samples += [("control", self._commands.sample), ("spans", self.run.sample_steps)]
        self._samples.append(("children", partial(tell_of_children, context)))
        self._slow += [
            ("otel", self.run.sample),
            ("children", partial(hide_launcher_file, context)),
            ("patches", PatchWatch(context).observe),
        ]
        if chosen.exporter:
            self._slow.append(("exporter", self._ensure_exporter))
        self._sampler = Sampler(context, self._samples, self._slow)
        self._watch_child()
        if self._exits.name not in chosen.disable_probes:
            self._switches.install(self._exits)
        self._torch = after_import("torch", self._install_torch_probes)
        self._children = SpawnedRanks(init, arrive, self.given | {"run_id": who.run_id}, writer.header.incarnation.hex())
        call(CircuitBreaker("children"), self._children.install)
        self._sampler.start()
        if chosen.exporter:
            self._ensure_exporter()
        call(CircuitBreaker("clean"), clean, place.fd, now=time.monotonic_ns())

    def _watch_child(self) -> None:
        """See to it that a rank which is a child of ``multiprocessing`` closes: a forked one runs no ``atexit`` handler."""
        if multiprocessing.parent_process() is not None:
            from multiprocessing import util

            self._farewell = util.Finalize(None, self._end_of_child, exitpriority=-1)

    def _end_of_child(self) -> None:
        """The child's main function has ended; what it raised is on its way out."""
        self.__exit__(*sys.exc_info())

    def _ensure_exporter(self) -> None:
        """See to it that this node has an exporter: now, and again if it was killed."""
        from torchobs.node.launch import ensure_exporter

        if self.context is not None:
            address = self.settings.exporter_address
            ensure_exporter(str(Path(self.context.writer.path).parent), "" if address is None else str(address), logger)

    def _install_torch_probes(self) -> None:
        """Install what needs torch, now or at the end of its import."""
        if self.context is None or self._switches is None:
            return
        self.context.thread = threading.get_ident()
        self._switches.begin()
        self._dynamo.install(self.context.breaker("dynamo"))
        graph_safe.torch_is_here()

    def note_exit(self, code: int) -> None:
        """Record the exit code that the process is about to end with (``torchobs run`` knows it)."""
        if self._ended is None:
            self._ended = (Exit.FINISHED, 0) if code == 0 else (Exit.EXIT_CODE, code)

    def close(self) -> None:
        """Remove every hook, write what is left, let go of the file. Idempotent; in a forked child it does nothing."""
        global _current  # noqa: PLW0603  # the one session of the process
        with _lock:
            if self.run is not None and self.active:
                settle(CircuitBreaker("otel"), self.run.observe, 1.0)
            context, self.context = self.context, None
            if _current is self:
                _current = None
            if context is None or self.pid != os.getpid():
                return
            self._remove_hooks(context)
            if self._farewell is not None:
                self._farewell.cancel()
            if self._sampler is not None:
                self._sampler.stop()
            settle(CircuitBreaker("shutdown"), self._finish, context)
            name_nobody(logger)

    def _remove_hooks(self, context: ProbeContext) -> None:
        if self._torch is not None:
            cancel(self._torch)
        settle(CircuitBreaker("cycle"), context.recorder.flush)  # while phases are still recorded
        if self._switches is not None:
            self._switches.remove_all()
        if self._children is not None:
            settle(CircuitBreaker("children"), self._children.remove)
        settle(CircuitBreaker("dynamo"), self._dynamo.remove)
        if self.run is not None:
            settle(CircuitBreaker("otel"), self.run.remove)
        for breaker in context.breakers.values():
            breaker.blown = True  # a hook that somebody else still holds does nothing

    def _finish(self, context: ProbeContext) -> None:
        context.recorder.flush()
        if self._sampler is not None:
            for breaker in context.breakers.values():
                breaker.blown = False
            call(CircuitBreaker("sampler"), self._sampler.end)
            for breaker in context.breakers.values():
                breaker.blown = True
        reason, code = self._exits.ended(self._ended)
        if reason != Exit.FINISHED and context.writer.hidden:
            call(CircuitBreaker("children"), context.writer.show)  # who started the ranks has failed: that is not told by them
        if self.run is not None:
            self.run.end(failed=reason != Exit.FINISHED)
        if self._commands is not None:
            self._commands.close()
        context.writer.event(catalog.EVENT_RUN_END.name, {"reason": _ENDINGS[reason], "code": code}, context.recorder.step)
        context.writer.exit(reason, code)
        context.writer.close()


def init(**overrides: object) -> Session:
    """Begin to record this process's training. Idempotent and thread-safe; never raises for what the environment holds.

    Every setting (docs/settings.md) can be given by its name; an argument beats the environment, which beats the default.
    Where nothing can be recorded (no room, another system than Linux or macOS, a worker process) the session is inert, and
    one warning says why.

    Raises:
        TypeError: an argument names no setting.
    """
    global _current  # noqa: PLW0603  # the one session of the process
    with _lock:
        if _current is not None and _current.pid == os.getpid():
            return _current
        chosen, problems = settings.resolve(overrides)
        if _is_worker():
            return Session()  # and not kept: a child that is only importing its main module may be a rank a moment later
        inherited, session = _current, Session()
        if inherited is not None and inherited.context is not None:
            inherited._remove_hooks(inherited.context)  # noqa: SLF001  # a fork's inert hooks, in a child that is a rank of its own
            session._inherited = inherited  # noqa: SLF001  # as above
        _current = session
        # an argument that makes no sense is None here, where the default is
        given = {name: getattr(chosen, name) for name, value in overrides.items() if value is not None}
        session.given = {name: option_types.as_text(value) for name, value in given.items() if value is not None}
        call(CircuitBreaker("init"), _set_level, chosen)
        breaker = CircuitBreaker("init")
        call(breaker, _begin, session, chosen, list(problems))
        for trip in breaker.trips:
            logger.warning(
                "torchobs: off, init() failed with %s at %s; training is not affected", trip.exception, trip.location
            )
        return session


def arrive(given: dict[str, str], launcher: str) -> object:
    """What a spawned child calls to unpickle the token that it was given (``children``)."""
    return spawned_ranks.arrive(init, arrive, given, launcher)


def _set_level(chosen: Settings) -> None:
    if logger.level == logging.NOTSET:
        logger.setLevel(chosen.log_level)


def _begin(session: Session, chosen: Settings, problems: list[settings.SettingsProblem]) -> None:
    if not chosen.enabled:
        return
    environ, this = settings.environment(), process.this_process()
    who, more = identity.discover(environ, chosen, this)
    group = _process_group()
    if group is not None and who.launcher == "python" and chosen.rank is None:
        # ranks that a script started itself (torch.multiprocessing.spawn): no variable says so, the process group does
        who, more = identity.discover(environ, replace(chosen, rank=group[0], world_size=group[1]), this)
    name_rank(logger, who.rank, who.local_rank, who.world_size)
    for problem in dict.fromkeys([*problems, *more]):
        logger.warning("torchobs: %s; the default is used", problem)
    try:
        session.open(chosen, who)
    except NoPlaceError as error:
        logger.warning("torchobs: off, %s; training is not affected", error, extra=OWN if error.of_one_rank else None)
        name_nobody(logger)


def shutdown() -> None:
    """Stop recording: torch is left exactly as it was found, the flight file stays for the exporter. Idempotent."""
    session = _current
    if session is not None:
        session.close()


def current() -> Session | None:
    """Return the active session of this process, if there is one."""
    session = _current
    return session if session is not None and session.active else None


def _is_worker() -> bool:
    """Return True if this is a child that is just importing the main module, or a DataLoader worker: neither is a rank."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        return True
    data = sys.modules.get("torch.utils.data")
    return data is not None and getattr(data, "get_worker_info", lambda: None)() is not None


def _process_group() -> tuple[int, int] | None:
    """Return rank and world size of the default process group, if it has been initialised by now."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _versions() -> dict[str, str | int]:
    found: dict[str, str | int] = {
        "torchobs_version": __version__,
        "python_version": ".".join(map(str, sys.version_info[:3])),
        "script": os.path.basename(sys.argv[0])[:128] if sys.argv else "",  # noqa: PTH119  # argv[0] is no path for sure
        "pid": os.getpid(),
    }
    torch = sys.modules.get("torch")
    with contextlib.suppress(AttributeError):
        found["torch_version"] = str(torch.__version__)  # type: ignore[union-attr]  # None has no version: suppressed
    return found


def _at_exit() -> None:
    shutdown()


def _after_fork() -> None:
    """Make an inherited session inert: its writer stores into private memory, its hooks do nothing."""
    session = _current
    if session is not None and session.context is not None:
        for breaker in session.context.breakers.values():
            breaker.blown = True


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)
renew_in_child(sys.modules[__name__], _lock=threading.RLock)
