"""Frames of signal handlers, and what a handler raises that breaks into our code: it is the user's."""

from __future__ import annotations

import functools
import signal
from typing import TYPE_CHECKING

import pytest

from torchobs.support import error_guard
from torchobs.support.error_guard import CircuitBreaker, settle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_is_interrupted_is_done_again_and_the_interrupt_comes_out(kind: type[BaseException]) -> None:
    """An end that is not recorded would be shown as a crash."""
    calls = []

    def work() -> None:
        calls.append(1)
        if len(calls) < 3:
            raise kind

    with pytest.raises(kind):
        settle(CircuitBreaker("shutdown"), work)
    assert len(calls) == 3


class TimeIsUpError(Exception):
    """What the user's time limit raises."""


def limit(signum: int, frame: object) -> None:
    """The user's handler."""
    raise TimeIsUpError(signum, frame is not None)


class Limit:
    """An object that is a handler, and so is its method."""

    def __call__(self, signum: int, frame: object) -> None:
        """As the function."""
        limit(signum, frame)


HANDLERS = (limit, Limit().__call__, Limit(), functools.partial(limit))


@pytest.fixture(params=HANDLERS, ids=["function", "method", "object", "partial"])
def handled(request: pytest.FixtureRequest) -> Iterator[None]:
    """SIGUSR1 is handled so."""
    before = signal.signal(signal.SIGUSR1, request.param)
    yield
    signal.signal(signal.SIGUSR1, before)


def interrupted() -> None:
    """Code of ours into which the signal breaks."""
    signal.raise_signal(signal.SIGUSR1)


def wrong() -> None:
    """Code of ours with a mistake."""
    raise TimeIsUpError


@pytest.mark.usefixtures("handled")
@pytest.mark.parametrize("use", [lambda breaker, work: breaker.guard(work)(), error_guard.call])
def test_what_a_handler_raises_in_our_code_passes(use: Callable[[CircuitBreaker, Callable[[], None]], None]) -> None:
    """The user's time limit works wherever it strikes, and switches no probe off; the same exception of ours ends there."""
    breaker = CircuitBreaker("probe")
    with pytest.raises(TimeIsUpError):
        use(breaker, interrupted)
    assert (breaker.is_open, breaker.failures) == (False, [])
    use(breaker, wrong)
    assert breaker.is_open
    assert [failure.exception for failure in breaker.failures] == ["TimeIsUpError"]
