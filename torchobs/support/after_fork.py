"""Locks and a fork: a thread of the parent may hold one, and in the child there is nobody who will ever let go of it.

So every lock of ours is made anew in a forked child. Python does that for its own (``threading``, ``logging``), but not for a
module that a thread is importing at that moment: in the child its import would wait for ever. A fork waits for what our
threads import, which is done in milliseconds, a second at most.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LONGEST_IMPORT_S = 1.0
_owners: WeakKeyDictionary[Any, dict[str, Callable[[], object]]] = WeakKeyDictionary()
_importing = RLock()
_waited: list[bool] = []


def renew_in_child(owner: Any, **locks: Callable[[], object]) -> None:
    """Set these attributes to what the functions return in every forked child that has the owner."""
    _owners.setdefault(owner, {}).update(locks)


@contextmanager
def importing() -> Iterator[None]:
    """No fork in here: for what a thread of ours imports."""
    with _importing:
        yield


def _before() -> None:
    _waited.append(_importing.acquire(timeout=_LONGEST_IMPORT_S))


def _in_parent() -> None:
    if _waited and _waited.pop():
        _importing.release()


def _in_child() -> None:
    global _importing  # noqa: PLW0603  # a lock cannot be told that its holder is gone
    _importing = RLock()
    _waited.clear()
    for owner, locks in list(_owners.items()):
        for name, make in locks.items():
            setattr(owner, name, make())


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
