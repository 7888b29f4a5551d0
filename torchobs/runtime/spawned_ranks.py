"""Ranks that a script starts itself, by ``multiprocessing``: ``torch.multiprocessing.spawn``, ``mp.Process``, a notebook's way.

Nothing runs ``python train.py`` again for such a child, so that ``torchobs run`` does not reach it, and it knows its rank no
sooner than ``init_process_group`` does: from then on it is recorded, as a rank of this process's run. A forked child inherits
the patch that sees this. To a spawned one, and to a fork server's, goes a token in the configuration that ``multiprocessing``
hands on to every child: to unpickle it is to be patched. A child that joins no process group (a loader's worker, a pool's) is
none of ours.

The process that started the ranks takes no step; its own file, of a second rank 0, goes when theirs are there, and comes back
if that process fails.
"""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.process
import multiprocessing.spawn
import os
import sys
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.flight.format.layout import BadFlightFileError
from torchobs.flight.reader import reader
from torchobs.probes.core.patch import Patch
from torchobs.support.error_guard import CircuitBreaker, call
from torchobs.support.import_hooks import after_import, cancel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from importlib.abc import MetaPathFinder

    from torchobs.flight.writer.writer import FlightWriter
    from torchobs.probes.core.context import ProbeContext

    Arrive = Callable[[dict[str, str], str], object]

LAUNCHED_BY = "launched_by"
"""What a child's flight file says of its parent: the incarnation of that one's."""
GROUPS = "torch.distributed.distributed_c10d"
_KEY = "torchobs"
_OWN = frozenset({"rank", "local_rank", "world_size", "traceparent", "tracestate"})
"""Settings that are this process's own, and not its children's."""
_launcher = ""


class SpawnedRanks:
    """Makes ranks of this process's children while it is installed.

    ``begin`` is ``init``, ``again`` the public function that the token becomes a call of in a child, ``given`` the arguments
    of ``init`` there, as text, ``launcher`` this process's incarnation.
    """

    def __init__(self, begin: Callable[..., object], again: Arrive, given: Mapping[str, str], launcher: str) -> None:
        self._given = {name: text for name, text in given.items() if name not in _OWN}
        self._begin, self._launcher, self._pid = begin, launcher, os.getpid()
        self.token = _Token(again, self._given, launcher)
        self._patch: Patch | None = None
        self._handle: MetaPathFinder | None = None
        self._breaker = CircuitBreaker("children")

    def install(self) -> None:
        """Watch for the process group; hand the token on."""
        self._handle = after_import(GROUPS, self._breaker.guard(self._patch_groups))
        # a child run by another Python might have no torchobs, and could not even begin
        if os.fsdecode(multiprocessing.spawn.get_executable()) == sys.executable:
            _configuration()[_KEY] = self.token

    def remove(self) -> None:
        """Undo it. Idempotent."""
        if self._handle is not None:
            cancel(self._handle)
        if self._patch is not None:
            self._patch.undo()
        if _configuration().get(_KEY) is self.token:
            del _configuration()[_KEY]

    def _patch_groups(self) -> None:
        """``init_process_group`` itself may have been imported by its name; what it calls at last is looked up."""
        self._patch = Patch(sys.modules[GROUPS], "_update_default_pg", self._watched)  # torch has no hook for it

    def _watched(self, original: Any) -> Any:
        @functools.wraps(original)
        def update(group: Any) -> Any:
            result = original(group)
            if group is not None and (self.arrived or os.getpid() != self._pid):
                call(self._breaker, self._become_rank)
            return result

        return update

    arrived = False
    """Whether this is the child, and not its parent."""

    def _become_rank(self) -> None:
        global _launcher  # noqa: PLW0603  # of the session that begins now
        _launcher = self._launcher
        try:
            self._begin(**self._given)
        finally:
            _launcher = ""


class _Token:
    """What a spawned child is given."""

    def __init__(self, again: Arrive, given: Mapping[str, str], launcher: str) -> None:
        self._again, self._given, self._launcher = again, dict(given), launcher

    def __reduce__(self) -> tuple[Arrive, tuple[dict[str, str], str]]:
        return self._again, (self._given, self._launcher)


def arrive(begin: Callable[..., object], again: Arrive, given: Mapping[str, str], launcher: str) -> object:
    """In a spawned child, before its main module: watch for the process group. Returns the token for its own children."""
    children = SpawnedRanks(begin, again, given, launcher)
    children.arrived = True
    call(CircuitBreaker("children"), children.install)
    return children.token


def described() -> dict[str, str]:
    """Return what the flight file of a session that begins now says of who launched its process."""
    return {LAUNCHED_BY: _launcher} if _launcher else {}


_counted: set[bytes] = set()
"""Incarnations that have told of their children"""


def hide_launcher_file(context: ProbeContext) -> None:
    """Hide this process's file while all that it does is to have launched ranks. For the sampler thread."""
    writer = context.writer
    if context.recorder.ended:
        writer.hidden = False
    elif not writer.hidden and _has_launched(writer):
        writer.hide()


def tell_of_children(context: ProbeContext) -> None:
    """Write an event, once, if a process that makes no steps has children: Hogwild's train, and are no ranks. As above."""
    incarnation = context.writer.header.incarnation
    count = 0 if context.recorder.ended or incarnation in _counted else _started()
    if count:
        _counted.add(incarnation)
        context.writer.event(catalog.EVENT_CHILDREN.name, {"count": count})


def _started() -> int:
    """Count the children that ``multiprocessing`` knows, but for daemons: loaders' workers and pools'.

    Their state is not asked for, since the main thread may be waiting for them.
    """
    known: set[multiprocessing.process.BaseProcess] = getattr(multiprocessing.process, "_children", set())
    return sum(not child.daemon for child in tuple(known))


def _has_launched(writer: FlightWriter) -> bool:
    place, own = writer.place, writer.header.incarnation.hex()
    if place is None:
        return False
    return any(_launcher_of(place.fd, name) == own for name in reader.names(place.fd) if name != writer.name)


def _launcher_of(directory_fd: int, name: str) -> object:
    try:
        file = reader.open_file(directory_fd, name)
    except (OSError, BadFlightFileError):
        return None
    try:
        return file.header.resource.get(LAUNCHED_BY)
    finally:
        file.close()


def _configuration() -> dict[str, Any]:
    configuration: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # noqa: SLF001
    return configuration
