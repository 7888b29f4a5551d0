"""Frames of signal handlers, and what a handler raises that breaks into our code: it is the user's."""

from __future__ import annotations

import functools
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest

from torchobs.support import error_guard
from torchobs.support.error_guard import CircuitBreaker, settle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Give the signals back."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def helper() -> None:
    """Fail, on behalf of a handler."""
    raise LookupError


def fail(*_: Any) -> None:
    """Handle a signal by failing."""
    helper()


@pytest.mark.parametrize("number", SIGNALS)
def test_the_signal_that_a_shared_handler_was_called_for(number: signal.Signals) -> None:
    """By its argument."""
    for one in SIGNALS:
        signal.signal(one, fail)
    with pytest.raises(LookupError) as caught:
        signal.raise_signal(number)
    assert error_guard.raising(caught.value) == number
    with pytest.raises(LookupError) as plain:
        helper()
    assert error_guard.raising(plain.value) is None


def test_a_handler_that_runs() -> None:
    """And what it calls; not what runs after it."""
    seen = []

    class Handler:
        def handle(self, number: int, _: Any) -> None:
            seen.append((number, error_guard.running(sys._getframe())))

    signal.signal(signal.SIGUSR1, Handler().handle)
    signal.raise_signal(signal.SIGUSR1)
    assert seen == [(signal.SIGUSR1, signal.SIGUSR1)]
    assert error_guard.running(sys._getframe()) is None


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


class Limits:
    """Other things that may be a handler."""

    def method(self, signum: int, frame: object) -> None:
        """A bound method."""
        limit(signum, frame)

    def __call__(self, signum: int, frame: object) -> None:
        """An object."""
        limit(signum, frame)


HANDLERS = (limit, Limits().method, Limits(), functools.partial(limit))


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
@pytest.mark.parametrize(
    "use", [lambda breaker: breaker.guard(interrupted)(), lambda breaker: error_guard.call(breaker, interrupted)]
)
def test_what_a_handler_raises_in_our_code_passes(use: Callable[[error_guard.CircuitBreaker], None]) -> None:
    """The user's time limit works wherever it strikes, and no probe is switched off for it."""
    breaker = error_guard.CircuitBreaker("probe")
    with pytest.raises(TimeIsUpError):
        use(breaker)
    assert (breaker.is_open, breaker.failures) == (False, [])


@pytest.mark.usefixtures("handled")
def test_the_same_exception_of_our_own_goes_no_further() -> None:
    """It is not the class that decides."""
    breaker = error_guard.CircuitBreaker("probe")
    error_guard.call(breaker, wrong)
    assert breaker.is_open
    assert [failure.exception for failure in breaker.failures] == ["TimeIsUpError"]


def test_the_end_is_written_though_workers_die_meanwhile() -> None:
    """Each one's signal breaks in; the work is begun anew until it is done."""
    left = [3]
    done = []

    def work() -> None:
        if left[0]:
            left[0] -= 1
            signal.raise_signal(signal.SIGUSR1)
        done.append(True)

    before = signal.signal(signal.SIGUSR1, limit)
    try:
        error_guard.settle(error_guard.CircuitBreaker("exits"), work)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert done == [True]
