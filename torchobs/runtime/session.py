"""``init`` and ``shutdown``: compose settings, identity, the flight file, the probes and the sampler."""

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
from torchobs.config import identity, settings
from torchobs.config.options import as_text
from torchobs.flight.cleanup import clean
from torchobs.flight.directory import NoPlaceError, control_directory, open_place, remedy
from torchobs.flight.layout import PROCESS_BEGUN, Exit
from torchobs.flight.writer import FlightWriter, open_writer
from torchobs.probes import factories
from torchobs.probes.amp import LossScaling
from torchobs.probes.compile import DynamoRules
from torchobs.probes.context import Hooks, ProbeContext, TrainingState
from torchobs.probes.exits import Ending, ExitProbe
from torchobs.probes.scalars import Scalars
from torchobs.probes.step_recorder import StepRecorder
from torchobs.runtime import spawned_ranks
from torchobs.runtime.command_handler import CommandHandler
from torchobs.runtime.details import GaugeHistory, RunDetails
from torchobs.runtime.notebook import NotebookStatus, PageAddress, in_notebook
from torchobs.runtime.probe_manager import ProbeManager
from torchobs.runtime.sampler import LimitedLog, Sampler, SamplerPauses
from torchobs.runtime.spans import RunSpan, trace_attributes
from torchobs.runtime.spawned_ranks import SpawnedRanks, hide_launcher_file, launcher_attributes
from torchobs.runtime.stack_samples import StackSamples
from torchobs.support import error_guard, graph_safe
from torchobs.support.after_fork import renew_in_child
from torchobs.support.error_guard import CircuitBreaker, call, settle
from torchobs.support.import_hooks import after_import, cancel, imported
from torchobs.support.process_group import rank_and_size
from torchobs.support.rank_log import THIS_RANK, name_rank, remove_rank, set_level
from torchobs.taps.taps import SafePoint
from torchobs.tensors.device_reads import DeviceValues
from torchobs.tensors.references import let_tensors_be_swapped

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from importlib.abc import MetaPathFinder
    from multiprocessing.util import Finalize
    from types import TracebackType

    from torchobs.config.identity import Identity
    from torchobs.config.settings import Settings

logger = logging.getLogger("torchobs")
_lock = threading.RLock()
_current: Session | None = None
_pids_recorded: list[int] = []
"""This process, once it was recorded; its parent in a forked child that was not"""


class Session:
    """Session that ``init()`` returns. As a context manager, leaving it calls :func:`shutdown`.

    Inert where torchobs is off or has no directory to write to.
    """

    def __init__(self) -> None:
        self.settings: Settings = settings.Settings()
        self.arguments: dict[str, str] = {}
        """Arguments of ``init()`` that took effect, as text"""
        self.identity: Identity | None = None
        self.context: ProbeContext | None = None
        self.pid = os.getpid()
        self.loss_scaling = LossScaling()
        """State of the loss scalers, from the AMP probe"""
        self._probe_manager: ProbeManager | None = None
        self._exits = ExitProbe()
        self._dynamo = DynamoRules()
        self._torch: MetaPathFinder | None = None
        self._sampler: Sampler | None = None
        self._exit: Ending | None = None
        self._finalizer: Finalize | None = None
        self._samples: list[tuple[str, Callable[[], None]]] = []
        self._slow: list[tuple[str, Callable[[], None]]] = []
        self.run: RunSpan | None = None
        self._commands: CommandHandler | None = None
        self._children: SpawnedRanks | None = None
        self._last: list[tuple[str, Callable[[], None]]] = []
        """Called after the sampler's last round"""
        self._page: PageAddress | None = None
        self.recorded_in = ""
        """Path of the flight file, also after the end; empty if there is none"""
        self._inherited: Session | None = None
        """Parent's session in a forked child, kept alive: freeing pinned memory records CUDA events, which a child must not"""

    def __enter__(self) -> Session:  # noqa: PYI034  # typing.Self needs Python 3.11
        """Return the session."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Shut down; an exception that leaves the block is recorded and not swallowed."""
        del kind, trace
        if error is not None and self.active:
            settle(CircuitBreaker("exits"), self._exits.record_escaping, error)
        self.close()

    def __repr__(self) -> str:
        """Return the run, the step and the live page's address."""
        if self.identity is None or not self.recorded_in:
            return "<torchobs.Session: nothing is recorded>"
        run = f"job {self.identity.job_name}, run {self.identity.run_id}, rank {self.identity.rank}"
        context = self.context
        if context is None or not self.active:
            return f"<torchobs.Session: {run}, ended, recorded in {self.recorded_in}>"
        page = f", live on {self._page.url}" if self._page is not None and self._page.url else ""
        return f"<torchobs.Session: {run}, step {context.recorder.step:,}{page}>"

    @property
    def active(self) -> bool:
        """Whether this process is recording."""
        return self.context is not None and self.pid == os.getpid()

    @property
    def writer(self) -> FlightWriter | None:
        """Flight file's writer; ``None`` while inactive."""
        return self.context.writer if self.context is not None and self.active else None

    def open(self, chosen: Settings, rank_identity: Identity) -> None:
        """Create the flight file, install the probes, start the sampler. Raises ``NoPlaceError`` without a place to write."""
        self.settings, self.identity = chosen, rank_identity
        place = open_place(str(chosen.flight_dir) if chosen.flight_dir else None, settings.environment().get("XDG_RUNTIME_DIR"))
        resource = rank_identity.described() | _versions() | trace_attributes(chosen) | launcher_attributes() | _begun()
        try:
            writer = open_writer(place, resource, chosen.file_size, native=chosen.native)
        except OSError as error:
            place.directory.close()
            what = f"{error.strerror or error}: the flight file cannot be written in {place.path}; {remedy(error)}"
            raise NoPlaceError(what, of_one_rank=True) from error
        writer.event(catalog.EVENT_RUN_START.name, {"launcher": rank_identity.launcher, "restart": rank_identity.restart})
        self.recorded_in = writer.path
        self.run = RunSpan(chosen, writer, lambda: self.writer)
        recorder, pauses, spent_ns = StepRecorder(writer), SamplerPauses(), dict[str, int]()
        training, hooks = TrainingState(recorder.plain), Hooks(spent_ns, recorder.plain)
        context = self.context = ProbeContext(
            settings=chosen, writer=writer, recorder=recorder, device=DeviceValues(), training=training, hooks=hooks,
            scalars=Scalars(writer.table), write_span=self.run.write, warn_limited=LimitedLog().warn,
            yield_gil=pauses.yield_gil, at_backward=(safe_point := SafePoint(training)).arm, spent_ns=spent_ns,
        )  # fmt: skip
        self.run.watch(context)
        self._probe_manager = ProbeManager(
            context, partial(factories, self.loss_scaling), safe_point, self._samples, self._slow
        )
        control_dir = str(chosen.control_dir) if chosen.control_dir else None
        self._commands = CommandHandler(context, self._probe_manager, control_directory(control_dir, place.path))
        history = GaugeHistory(context)
        self._samples += [
            ("control", self._commands.sample), ("history", history.sample), ("between", StackSamples(context).sample),
        ]  # fmt: skip
        self._last.append(("history", history.record))
        self._slow += [
            ("otel", self.run.observe),
            ("children", partial(hide_launcher_file, context)),
            ("patches", self._probe_manager.check_patches),
        ]
        if chosen.exporter:
            self._page = PageAddress(writer.path, says=chosen.summary and not rank_identity.rank and not in_notebook())
            self._samples.append(("page", self._page.sample))
        if chosen.summary and in_notebook():
            status = NotebookStatus(context, f"{rank_identity.job_name} {rank_identity.run_id}", self._page)
            call(context.breaker("notebook"), status.begin)
            self._samples.append(("notebook", status.sample))
            self._last.append(("notebook", status.end))
        if chosen.run_details:
            details = RunDetails(context)
            call(context.breaker("details"), details.begin)
            self._slow.append(("details", details.sample))
        if chosen.exporter:
            self._slow.append(("exporter", self._ensure_exporter))
        self._sampler = Sampler(context, pauses, self.run, self._samples, self._slow)
        self._watch_child()
        if self._exits.name not in chosen.disable_probes:
            self._probe_manager.install(self._exits)
        self._torch = after_import("torch", self._install_torch_probes)
        self._children = SpawnedRanks(
            init, unpickle_token, self.arguments | {"run_id": rank_identity.run_id}, writer.header.incarnation.hex()
        )
        call(CircuitBreaker("children"), self._children.install)
        self._sampler.start()
        if chosen.exporter:
            self._ensure_exporter()
        call(CircuitBreaker("clean"), clean, place.fd, now=time.monotonic_ns())

    def _watch_child(self) -> None:
        """Make a rank that is a ``multiprocessing`` child close its session: a forked one runs no ``atexit`` handlers."""
        if multiprocessing.parent_process() is not None:
            from multiprocessing import util

            self._finalizer = util.Finalize(None, self._close_child, exitpriority=-1)

    def _close_child(self) -> None:
        """Close the session after the child's main function, recording the exception that it raised."""
        self.__exit__(*sys.exc_info())

    def _ensure_exporter(self) -> None:
        """Start this node's exporter unless there is one: at the start, and again if it was killed."""
        from torchobs.node.launch import ensure_exporter

        if self.context is not None:
            address = self.settings.exporter_address
            ensure_exporter(str(Path(self.context.writer.path).parent), "" if address is None else str(address), logger)

    def _install_torch_probes(self) -> None:
        """Install the probes that need torch, now or when torch has been imported."""
        if self.context is None or self._probe_manager is None:
            return
        self.context.recorder.plain.thread = threading.get_ident()
        self._probe_manager.begin()
        self._dynamo.install(self.context.breaker("dynamo"))
        graph_safe.use_torch()
        error_guard.use_torch()
        call(CircuitBreaker("references"), let_tensors_be_swapped)

    def note_exit(self, code: int, leaving: SystemExit | None = None) -> None:
        """Record the exit code that the process is about to end with, and the reason, which ``torchobs run`` has."""
        if self._exit is None:
            self._exit = self._exits.leaving(code, leaving)

    def close(self) -> None:
        """Remove every hook, write pending records, close the file. Idempotent; in a forked child it does nothing."""
        with _lock:
            if (context := self.context) is None or self.pid != os.getpid():
                self._deactivate()
                return
            with contextlib.ExitStack() as steps:  # each is done, the last first, also if Ctrl-C comes in another
                steps.callback(remove_rank, logger)
                steps.callback(settle, CircuitBreaker("shutdown"), self._finish, context)
                if self._sampler is not None:
                    steps.callback(self._sampler.stop)
                if self._finalizer is not None:
                    steps.callback(self._finalizer.cancel)
                steps.callback(settle, CircuitBreaker("hooks"), self._remove_hooks, context)
                steps.callback(self._deactivate)
                steps.callback(settle, CircuitBreaker("ends"), context.hooks.ends.notify)
                if self.run is not None:
                    steps.callback(settle, CircuitBreaker("otel"), self.run.observe, 1.0)

    def _deactivate(self) -> None:
        global _current  # noqa: PLW0603  # the one session of the process
        self.context = None
        if _current is self:
            _current = None

    def _remove_hooks(self, context: ProbeContext) -> None:
        cancel(self._torch)
        settle(CircuitBreaker("cycle"), context.recorder.flush)  # while phases are still recorded
        if self._probe_manager is not None:
            self._probe_manager.remove_all()
        if self._children is not None:
            settle(CircuitBreaker("children"), self._children.remove)
        settle(CircuitBreaker("dynamo"), self._dynamo.remove)
        if self.run is not None:
            settle(CircuitBreaker("otel"), self.run.remove)
        for breaker in context.breakers.values():
            breaker.is_open = True  # hooks that others still hold do nothing

    def _finish(self, context: ProbeContext) -> None:
        context.recorder.flush()
        if self._sampler is not None:
            for breaker in context.breakers.values():
                breaker.is_open = False
            call(CircuitBreaker("sampler"), self._sampler.end)
            for name, finish in self._last:
                call(CircuitBreaker(name), finish)
            for breaker in context.breakers.values():
                breaker.is_open = True
        reason, code, _ = ended = self._exits.ended(self._exit)
        if reason != Exit.FINISHED and context.writer.hidden:
            call(CircuitBreaker("children"), context.writer.show)  # the launching process failed, which no rank's file shows
        if self._commands is not None:
            self._commands.close()
        context.event(catalog.EVENT_RUN_END, ended.attributes)
        if self.run is not None:
            self.run.end(failed=reason != Exit.FINISHED)
        context.writer.exit(reason, code)
        call(CircuitBreaker("exits"), spawned_ranks.hide_mistake, context, self._exits.last_error)
        context.writer.close()


def init(**overrides: object) -> Session:
    """Start recording this process's training. Idempotent and thread-safe; never raises because of the environment.

    Every setting (docs/settings.md) can be given by name; an argument beats the environment, which beats the default. A second
    call returns the session that there is; a warning names the settings of it that differ and are ignored. Where nothing can be
    recorded (no space, a system other than Linux or macOS, a worker process) the session is inert; one warning says why.

    Raises:
        TypeError: an argument names no setting.
    """
    global _current  # noqa: PLW0603  # the one session of the process
    with _lock:
        chosen, problems = settings.resolve(overrides)
        if _current is not None and _current.pid == os.getpid():
            _warn_ignored(_current, overrides, chosen)
            return _current
        if _is_worker():
            return Session()  # not kept: a child that is importing its main module may become a rank later
        inherited, session = _current, Session()
        if inherited is not None and inherited.context is not None:
            inherited._remove_hooks(inherited.context)  # noqa: SLF001  # the parent's inert hooks, in a forked child that is a rank itself
            session._inherited = inherited  # noqa: SLF001  # as above
        _current = session
        session.settings = chosen
        # an invalid argument is None here if the default is
        effective = {name: getattr(chosen, name) for name, value in overrides.items() if value is not None}
        session.arguments = {name: as_text(value) for name, value in effective.items() if value is not None}
        call(CircuitBreaker("init"), set_level, logger, chosen.log_level)
        breaker = CircuitBreaker("init")
        call(breaker, _begin, session, chosen, list(problems))
        for failure in breaker.failures:
            logger.warning(
                "torchobs: off, init() failed with %s at %s; training is not affected", failure.exception, failure.location
            )
        return session


def _warn_ignored(session: Session, overrides: Mapping[str, object], chosen: Settings) -> None:
    """Warn of the arguments of a second ``init()`` that differ from those in force."""
    names = sorted(name for name, value in overrides.items() if value is not None)
    other = [name for name in names if getattr(chosen, name) != getattr(session.settings, name)]
    if other:
        texts = ", ".join(f"{name}={as_text(getattr(chosen, name))}" for name in other)
        logger.warning("torchobs: ignored, since init() was called before: %s; torchobs.shutdown() ends that", texts)


def unpickle_token(arguments: dict[str, str], launcher: str) -> object:
    """Unpickle the token of a spawned child (:mod:`torchobs.runtime.spawned_ranks`)."""
    return spawned_ranks.unpickle_token(init, unpickle_token, arguments, launcher)


def _begin(session: Session, chosen: Settings, problems: list[settings.SettingsProblem]) -> None:
    if not chosen.enabled:
        return
    environ, this = settings.environment(), identity.this_process()
    rank_identity, more = identity.discover(environ, chosen, this)
    group = rank_and_size()
    if group is not None and rank_identity.launcher == "python" and chosen.rank is None:
        # ranks that a script started itself (torch.multiprocessing.spawn): only the process group has the rank
        rank_identity, more = identity.discover(environ, replace(chosen, rank=group[0], world_size=group[1]), this)
    name_rank(logger, rank_identity.rank, rank_identity.local_rank, rank_identity.world_size)
    for problem in dict.fromkeys([*problems, *more]):
        logger.warning("torchobs: %s; the default is used", problem)
    try:
        session.open(chosen, rank_identity)
    except NoPlaceError as error:
        logger.warning("torchobs: off, %s; training is not affected", error, extra=THIS_RANK if error.of_one_rank else None)
        remove_rank(logger)


def shutdown() -> None:
    """Stop recording and restore torch exactly; the flight file stays for the exporter. Idempotent."""
    session = _current
    if session is not None:
        session.close()


def current() -> Session | None:
    """Return the active session of this process, if there is one."""
    session = _current
    return session if session is not None and session.active else None


def _is_worker() -> bool:
    """Return whether this is a child that imports its main module, or a DataLoader worker: neither is a rank."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        return True
    data = imported("torch.utils.data")
    return data is not None and getattr(data, "get_worker_info", lambda: None)() is not None


def _versions() -> dict[str, str | int]:
    versions: dict[str, str | int] = {
        "torchobs_version": __version__,
        "python_version": ".".join(map(str, sys.version_info[:3])),
        "script": os.path.basename(sys.argv[0])[:128] if sys.argv else "",  # noqa: PTH119  # argv[0] is no path for sure
        "pid": os.getpid(),
    }
    torch = imported("torch")
    with contextlib.suppress(AttributeError):
        versions["torch_version"] = str(torch.__version__)  # None has no version: suppressed
    return versions


def _begun() -> dict[str, int]:
    """Return when the process began, for its first recording; empty for a second one: the time before was the first's."""
    begun_ms = None if _pids_recorded == [os.getpid()] else identity.begun_ms()
    _pids_recorded[:] = [os.getpid()]
    return {} if begun_ms is None else {PROCESS_BEGUN: begun_ms}


def _at_exit() -> None:
    # Ctrl-C in here has ended nothing: what it interrupted has been done, and Python would show a traceback of ours
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        shutdown()


def _after_fork() -> None:
    """Make an inherited session inert: its writer writes to private memory, its hooks do nothing."""
    session = _current
    if session is not None and session.context is not None:
        for breaker in session.context.breakers.values():
            breaker.is_open = True


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)
renew_in_child(sys.modules[__name__], _lock=threading.RLock)
