"""A fork while a thread of the parent holds a lock: the child can be a rank of its own all the same."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.training import recording, train
from torchobs.support.after_fork import importing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LIMIT_S = 30.0
"""A child takes a tenth of a second; what waits for a lock waits for ever"""
_LOCKS = (type(threading.Lock()), type(threading.RLock()))


class Place(NamedTuple):
    """Where a lock is kept."""

    owner: Any
    attribute: str

    def __str__(self) -> str:
        """Say which."""
        return f"{getattr(self.owner, '__name__', type(self.owner).__qualname__)}.{self.attribute}"


def kept(owner: Any) -> Iterator[Place]:
    """The locks among an object's attributes, those within its events and conditions included."""
    slots = [name for kind in type(owner).__mro__ for name in getattr(kind, "__slots__", ())]
    for name in {*getattr(owner, "__dict__", {}), *slots}:
        value = getattr(owner, name, None)
        if isinstance(value, _LOCKS):
            yield Place(owner, name)
        elif isinstance(value, threading.Event):
            yield Place(value._cond, "_lock")  # type: ignore[attr-defined]  # there is no other way to it


def locks() -> list[Place]:
    """Every lock of ours that there is: in our modules, and in our objects."""
    gc.unfreeze()  # which are not listed
    gc.collect()
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "torchobs"]
    objects = [each for each in gc.get_objects() if str(type(each).__module__).split(".")[0] == "torchobs"]
    gc.freeze()
    return [place for owner in (*modules, *objects) for place in kept(owner)]


def code_of(act: Callable[[], None], lock: Any) -> int:
    """Fork while another thread holds the lock; do it in the child and return its exit code, or that of a kill."""
    let_go, holding = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            holding.set()
            let_go.wait(LIMIT_S)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert holding.wait(LIMIT_S)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that threads and forks do not mix is what is tested
        child = os.fork()
    if not child:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    let_go.set()
    thread.join()
    deadline = time.monotonic() + LIMIT_S
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.001)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_fork_while_any_lock_is_held_leaves_a_child_that_can_be_a_rank(flight_dir: Path) -> None:
    """Each lock of ours in turn, and those of logging: the child begins, trains, is seen by its sampler, and ends."""

    def be_a_rank() -> None:
        for run in recording(flight_dir, rank=1):
            train(2)
            run.whole_round()
            assert len(run.steps()) == 2

    for _ in recording(flight_dir):
        train(2)
        found = locks()
        assert len(found) >= 15
        assert any(isinstance(place.owner, type(sys)) for place in found)
        stuck = [str(place) for place in found if code_of(be_a_rank, getattr(place.owner, place.attribute))]
        assert stuck == []
        for handler in logging.getLogger().handlers:
            if handler.lock is not None:
                assert code_of(be_a_rank, handler.lock) == 0


def test_a_fork_waits_for_what_our_threads_import(flight_dir: Path) -> None:
    """A module half imported by a thread that is not there could never be imported in the child."""
    order: list[str] = []
    begun = threading.Event()

    def load() -> None:
        with importing():
            begun.set()
            time.sleep(0.05)
            order.append("imported")

    for _ in recording(flight_dir):
        thread = threading.Thread(target=load)
        thread.start()
        begun.wait()
        code = code_of(lambda: None, threading.Lock())
        order.append("forked")
        thread.join()
        assert (code, order) == (0, ["imported", "forked"])
