"""Ranks that a script starts itself with ``multiprocessing``, and programs that turn out to be no run.

``torchobs run`` does not reach a child of ``torch.multiprocessing.spawn``, ``mp.Process`` or a notebook, and its rank is known
only when ``init_process_group`` is called: recording starts there, as a rank of this process's run. A forked child inherits the
patch that detects the call. Children started by spawn or a fork server get a token in the configuration that
``multiprocessing`` passes to every child; unpickling it installs the patch. Children that join no process group (DataLoader
workers, pools) are not ranks.

The launching process takes no steps: its own file, a second rank 0, is hidden once ranks' files exist, unless it fails.

A program that a person started by mistake (an import that fails, a wrong argument, ``--help``) leaves no run behind: it would
be shown as the newest run from then on. Under a scheduler, and in Kubernetes, a program that does not reach its first step is a
failure that people have to see, and stays.
"""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.process
import multiprocessing.spawn
import os
import sys
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

from torchobs.config import settings
from torchobs.config.launchers import LAUNCHED_BY
from torchobs.flight import reader
from torchobs.flight.directory import KUBERNETES_MOUNT
from torchobs.flight.layout import BadFlightFileError
from torchobs.support.error_guard import CircuitBreaker, call
from torchobs.support.import_hooks import after_import, cancel
from torchobs.support.process_group import rank_and_size
from torchobs.taps.patch import Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from importlib.abc import MetaPathFinder

    from torchobs.flight.writer import FlightWriter
    from torchobs.probes.context import ProbeContext

    UnpickleToken = Callable[[dict[str, str], str], object]


_LAUNCHERS = frozenset({"python", "torchrun"})
_UNATTENDED = frozenset({"KUBERNETES_SERVICE_HOST", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"})
"""Variables of a pod and of schedulers' jobs, where nobody sees the output"""
_HELP = frozenset({"-h", "--help", "--helpfull", "--version"})
_USAGE = 2
"""Status with which argparse, click and the shell refuse a command line"""


def is_mistake(error: BaseException) -> bool:
    """Return whether the program cannot begin, by its exception: its module is missing, or it only printed its help."""
    if not isinstance(error, SystemExit):
        return isinstance(error, (ImportError, SyntaxError))
    return error.code == _USAGE or (not error.code and not _HELP.isdisjoint(sys.argv[1:]))


def hide_mistake(context: ProbeContext, error: BaseException | None) -> None:
    """Remove the flight file of a program that ends by that exception, if it is a mistake and nothing has begun."""
    if error is None or not is_mistake(error):
        return
    resource, environ = context.writer.header.resource, settings.environment()
    attended = resource.get("launcher") in _LAUNCHERS and _UNATTENDED.isdisjoint(environ)
    if not attended or context.writer.path.startswith(KUBERNETES_MOUNT):
        return
    alone = resource.get("world_size", 1) == 1
    if not alone and not isinstance(error, SystemExit):
        return  # the other ranks may wait for this one
    begun = context.recorder.ended or context.recorder.has_begun() or rank_and_size() is not None
    if not begun and not context.writer.hidden:
        context.writer.hide()


GROUPS = "torch.distributed.distributed_c10d"
_KEY = "torchobs"
_OWN = frozenset({"rank", "local_rank", "world_size", "traceparent", "tracestate"})
"""Settings that children do not inherit."""
_launcher = ""


class SpawnedRanks:
    """Turns this process's children into ranks while it is installed.

    ``begin`` is ``init``; ``unpickle`` the public function that the token's pickle calls in a child; ``given`` the arguments of
    ``init`` there, as text; ``launcher`` this process's incarnation.
    """

    def __init__(self, begin: Callable[..., object], unpickle: UnpickleToken, texts: Mapping[str, str], launcher: str) -> None:
        self._arguments = {name: text for name, text in texts.items() if name not in _OWN}
        self._begin, self._launcher, self._pid = begin, launcher, os.getpid()
        self.token = _Token(unpickle, self._arguments, launcher)
        self._patch: Patch | None = None
        self._handle: MetaPathFinder | None = None
        self._breaker = CircuitBreaker("children")

    def install(self) -> None:
        """Patch the creation of the process group; add the token to the children's configuration."""
        self._handle = after_import(GROUPS, self._breaker.guard(self._patch_groups))
        # a child run by another Python may lack torchobs, and would fail to start
        if os.fsdecode(multiprocessing.spawn.get_executable()) == sys.executable:
            _configuration()[_KEY] = self.token

    def remove(self) -> None:
        """Undo :meth:`install`. Idempotent."""
        cancel(self._handle)
        if self._patch is not None:
            self._patch.undo()
        if _configuration().get(_KEY) is self.token:
            del _configuration()[_KEY]

    def _patch_groups(self) -> None:
        """Patch the last function that ``init_process_group`` calls: scripts may have imported the latter by name."""
        self._patch = Patch(sys.modules[GROUPS], "_update_default_pg", self._wrap)  # torch has no hook for it

    def _wrap(self, original: Any) -> Any:
        @functools.wraps(original)
        def update(group: Any) -> Any:
            result = original(group)
            if group is not None and (self.in_child or os.getpid() != self._pid):
                call(self._breaker, self._become_rank)
            return result

        return update

    in_child = False
    """True in the child process"""

    def _become_rank(self) -> None:
        global _launcher  # noqa: PLW0603  # of the session that begins now
        _launcher = self._launcher
        try:
            self._begin(**self._arguments)
        finally:
            _launcher = ""


class _Token:
    """Pickles as a call that installs the patch in a spawned child."""

    def __init__(self, unpickle: UnpickleToken, arguments: Mapping[str, str], launcher: str) -> None:
        self._unpickle, self._arguments, self._launcher = unpickle, dict(arguments), launcher

    def __reduce__(self) -> tuple[UnpickleToken, tuple[dict[str, str], str]]:
        return self._unpickle, (self._arguments, self._launcher)


def unpickle_token(begin: Callable[..., object], unpickle: UnpickleToken, texts: Mapping[str, str], launcher: str) -> object:
    """Install the patch in a spawned child, before its main module runs. Returns the token for the child's own children."""
    children = SpawnedRanks(begin, unpickle, texts, launcher)
    children.in_child = True
    call(CircuitBreaker("children"), children.install)
    return children.token


def launcher_attributes() -> dict[str, str]:
    """Return resource attributes that name the process which launched this one."""
    return {LAUNCHED_BY: _launcher} if _launcher else {}


def hide_launcher_file(context: ProbeContext) -> None:
    """Hide this process's file while it only launches ranks and takes no steps itself. For the sampler thread."""
    writer = context.writer
    if context.recorder.ended:
        writer.hidden = False
    elif not writer.hidden and _has_launched(writer):
        writer.hide()


def _has_launched(writer: FlightWriter) -> bool:
    place, incarnation = writer.place, writer.header.incarnation.hex()
    if place is None:
        return False
    return any(_launcher_of(place.fd, name) == incarnation for name in reader.names(place.fd) if name != writer.name)


def _launcher_of(directory_fd: int, name: str) -> object:
    with suppress(OSError, BadFlightFileError), closing(reader.open_file(directory_fd, name)) as file:
        return file.header.resource.get(LAUNCHED_BY)
    return None


def _configuration() -> dict[str, Any]:
    configuration: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # noqa: SLF001
    return configuration
