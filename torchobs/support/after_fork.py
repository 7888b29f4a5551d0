"""Makes locks usable after a fork: in the child, a lock that another thread of the parent held would never be released.

Every lock of ours is therefore replaced in a forked child. Python does this for its own (``threading``, ``logging``), but not
for the import lock of a module that a thread is importing: its import would block forever in the child. A fork therefore
waits for imports in our threads: milliseconds, at most a second.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_IMPORT_TIMEOUT_S = 1.0
_owners: WeakKeyDictionary[Any, dict[str, Callable[[], object]]] = WeakKeyDictionary()
_importing = RLock()
_waited: list[bool] = []


def renew_in_child(owner: Any, **locks: Callable[[], object]) -> None:
    """Replace these attributes by new values of the functions in every forked child that has the owner."""
    _owners.setdefault(owner, {}).update(locks)


@contextmanager
def importing() -> Iterator[None]:
    """Delay forks during the block; for imports in our own threads."""
    with _importing:
        yield


def _before() -> None:
    _waited.append(_importing.acquire(timeout=_IMPORT_TIMEOUT_S))


def _in_parent() -> None:
    if _waited and _waited.pop():
        _importing.release()


def _in_child() -> None:
    global _importing  # noqa: PLW0603  # a lock cannot be released for a thread that is gone
    _importing = RLock()
    _waited.clear()
    for owner, locks in list(_owners.items()):
        for name, make in locks.items():
            setattr(owner, name, make())


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
