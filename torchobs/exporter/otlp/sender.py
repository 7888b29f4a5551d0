"""Thread that sends one signal's batches, oldest first, and retries each until it is accepted or refused."""

from __future__ import annotations

import logging
from random import Random
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchobs.exporter.otlp.queue import RequestQueue
    from torchobs.exporter.otlp.transport import Outcome, Transport

FIRST_S, MOST_S = 1.0, 60.0
"""First and longest pause between attempts: doubled each time, half of it random, as in OpenTelemetry's exporters."""

LONGEST_RETRY_AFTER_S = 300.0
"""Upper limit of ``Retry-After``: a mistaken value of a year must not stop the push."""

_log = logging.getLogger(__name__)


class Backoff:
    """Exponential backoff with jitter."""

    def __init__(self, random: Random | None = None) -> None:
        self._random = random or Random()  # noqa: S311  # spreads retries, protects nothing
        self._failures = 0

    def succeeded(self) -> None:
        """Reset the pause to its first value."""
        self._failures = 0

    def next_s(self, after_s: float | None) -> float:
        """Return the seconds to wait after a failure; at least ``after_s``, up to :data:`LONGEST_RETRY_AFTER_S`."""
        longest_s = min(FIRST_S * 2.0**self._failures, MOST_S)
        self._failures = min(self._failures + 1, 16)
        waiting_s = longest_s * (0.5 + self._random.random() / 2)
        return waiting_s if after_s is None else max(waiting_s, min(after_s, LONGEST_RETRY_AFTER_S))


class Sender:
    """Sends one signal, so that a receiver of spans that hangs does not delay metrics."""

    def __init__(self, signal: str, backlog: RequestQueue, transport: Transport) -> None:
        self._signal, self._backlog, self._transport = signal, backlog, transport
        self._backoff = Backoff()
        self._thread = Thread(target=self._run, name=f"otlp-{signal}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Stop: unsent batches are dropped, and a request in progress is cancelled."""
        self._backlog.close()
        self._transport.cancel()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (batch := self._backlog.take()) is not None:
            outcome = self._transport.send(batch.body)
            self._backlog.settle(batch, outcome)
            self._say(outcome)
            if outcome.kind == "retry":
                self._backlog.pause(self._backoff.next_s(outcome.after_s), outcome.after_s or 0.0)
            else:
                self._backoff.succeeded()
        self._transport.close()

    def _say(self, outcome: Outcome) -> None:
        if outcome.kind == "refused":
            _log.error("OTLP %s: the receiver refuses them: %s", self._signal, outcome.words)
        elif outcome.kind == "retry":
            _log.warning("OTLP %s: not sent, they will be sent again: %s", self._signal, outcome.words)
        elif outcome.rejected or outcome.words:
            _log.warning("OTLP %s: the receiver rejected %d: %s", self._signal, outcome.rejected, outcome.words)
