"""Frames of signal handlers, and what is retried if one raises."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest

from torchobs.support import signal_handlers
from torchobs.support.error_guard import CircuitBreaker, settle

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    assert signal_handlers.raising(caught.value) == number
    with pytest.raises(LookupError) as plain:
        helper()
    assert signal_handlers.raising(plain.value) is None


def test_a_handler_that_runs() -> None:
    """And what it calls; not what runs after it."""
    seen = []

    class Handler:
        def handle(self, number: int, _: Any) -> None:
            seen.append((number, signal_handlers.running(sys._getframe())))

    signal.signal(signal.SIGUSR1, Handler().handle)
    signal.raise_signal(signal.SIGUSR1)
    assert seen == [(signal.SIGUSR1, signal.SIGUSR1)]
    assert signal_handlers.running(sys._getframe()) is None


def test_names() -> None:
    """Real-time signals have none."""
    assert (signal_handlers.name(15), signal_handlers.name(40)) == ("SIGTERM", "signal 40")


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
