"""What has survived a collection is left alone, and nothing that became garbage stays for ever."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from tests.exporters import frozen_gc
from tests.support import freeze
from torchobs.exporter import daemon


class Loop:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


class Clock:
    """Seconds, as a test sets them."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Iterator[Clock]:
    """That of the keeping; nothing is kept before, nor afterwards."""
    gc.unfreeze()
    made = Clock()
    yield made
    assert gc.get_freeze_count() == 0
    freeze()


def test_what_has_survived_is_not_looked_at_again_for_an_hour(clock: Clock) -> None:
    """Young garbage goes at once; what was alive at a full collection goes an hour later, should it be garbage by then."""
    with frozen_gc(clock):
        old = Loop()
        gc.collect()
        assert gc.get_freeze_count() > 0
        young, forgotten = Loop(), weakref.ref(old)
        gone = weakref.ref(young)
        del young, old
        gc.collect()
        assert gone() is None
        assert forgotten() is not None
        clock.seconds = daemon.THOROUGH_S
        gc.collect()
        assert forgotten() is None
        assert gc.get_freeze_count() > 0


def test_younger_collections_are_what_they_are(clock: Clock) -> None:
    """They take what is young, and keep nothing."""
    with frozen_gc(clock):
        young = Loop()
        gone = weakref.ref(young)
        del young
        gc.collect(1)
        assert gone() is None
        assert gc.get_freeze_count() == 0


def test_in_the_end_everything_is_as_it_was(clock: Clock) -> None:
    """Nothing is called any more, and nothing is kept; the youngest are looked at as often as before."""
    before = list(gc.callbacks), gc.get_threshold()
    with frozen_gc(clock):
        assert gc.get_threshold() == (daemon.YOUNG, *before[1][1:])
        gc.collect()
    assert (list(gc.callbacks), gc.get_threshold()) == before
