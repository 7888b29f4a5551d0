"""The backlog's books balance whatever happens, and its memory is bounded."""

import math
import threading
from email.utils import formatdate
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from urllib3 import HTTPResponse

from tests.otlp import Fast
from torchobs.exporter.otlp.delivery import (
    FIRST_S,
    LONGEST_RETRY_AFTER_S,
    MOST_S,
    Backoff,
    Batch,
    RefusalCauses,
    RequestQueue,
    Sender,
)
from torchobs.exporter.otlp.http_transport import _retry_after_s
from torchobs.exporter.otlp.transport import Outcome, printable

LIMIT = 100
PUT = st.tuples(st.just("put"), st.integers(0, 150), st.integers(1, 9))
TAKE = st.tuples(st.sampled_from(["sent", "retry", "refused", "partial", "divide", "close"]), st.integers(0, 12), st.just(0))


@settings(max_examples=200)
@given(steps=st.lists(PUT | TAKE, max_size=40))
def test_recorded_is_sent_dropped_and_queued(steps: list[tuple[str, int, int]]) -> None:
    """After every step; no more than the limit waits, and what is sent was never dropped."""
    backlog, sent = RequestQueue(LIMIT, Fast()), 0
    for what, number, items in steps:
        if what == "put":
            backlog.put(Batch(b"x" * number, items))
        elif what == "close":
            backlog.close()
        elif what == "divide" and backlog._waiting and (batch := backlog.take()) is not None:
            parts = [Batch(b"y" * (len(batch.body) // batch.items + number), 1, "rank") for _ in range(batch.items)]
            backlog.divide(batch, parts)
        elif what != "divide" and backlog._waiting and (batch := backlog.take()) is not None:
            outcome = Outcome("sent", rejected=number) if what == "partial" else Outcome(what)  # type: ignore[arg-type]  # a kind
            backlog.settle(batch, outcome)
            sent += batch.items - min(outcome.rejected, batch.items) if outcome.kind == "sent" else 0
        counts = backlog.counts
        assert counts.sent == sent
        assert counts.queued == sum(batch.items for batch in backlog._waiting)
        assert sum(len(batch.body) for batch in backlog._waiting) == backlog._bytes <= LIMIT or backlog._closed


def test_the_oldest_makes_room() -> None:
    """The newest is worth most."""
    backlog = RequestQueue(LIMIT, Fast())
    for number in range(5):
        backlog.put(Batch(bytes([number]) * 40, 1))
    assert [batch.body[0] for batch in backlog._waiting] == [3, 4]
    assert backlog.counts.dropped["overflow"] == 3


def test_a_batch_that_comes_back_is_the_oldest() -> None:
    """Order is kept, so that cumulative points never arrive backwards."""
    backlog = RequestQueue(LIMIT, Fast())
    for number in range(2):
        backlog.put(Batch(bytes([number]), 1))
    first = backlog.take()
    assert first is not None
    backlog.settle(first, Outcome("retry"))
    assert backlog.take() is first


def test_the_books_are_right_while_another_thread_reads_them() -> None:
    """No reader sees a batch that is nowhere."""
    backlog, wrong, ended = RequestQueue(LIMIT, Fast()), [], threading.Event()

    def read() -> None:
        while not ended.is_set():
            counts = backlog.counts
            if counts.queued < 0 or counts.queued > LIMIT:
                wrong.append(counts)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(3000):
        backlog.put(Batch(b"x" * 10, 1))
        batch = backlog.take()
        assert batch is not None
        backlog.settle(batch, Outcome("sent"))
    ended.set()
    reader.join()
    assert wrong == []


def test_waiting_times_double_with_chance_up_to_a_minute() -> None:
    """And begin anew after a success."""
    backoff = Backoff(Random(1))
    waits = [backoff.next_s(None) for _ in range(12)]
    for number, wait_s in enumerate(waits):
        most_s = min(FIRST_S * 2**number, MOST_S)
        assert most_s / 2 <= wait_s <= most_s
    assert len(set(waits)) == len(waits)
    backoff.succeeded()
    assert backoff.next_s(None) <= FIRST_S


class Waits(Fast):
    """A clock that notes what was waited for, and goes on at once."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def now(self) -> float:
        """The sum of what was waited for."""
        return math.fsum(self.waits)

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        """See :class:`Fast`."""
        condition.wait(0)
        self.waits.append(seconds)


class Away:
    """A receiver that is away; `hurries`: the attempt at which the exporter is told to end, `last`: that of its end."""

    def __init__(self, backlog: RequestQueue, *, hurries: int, last: int, after_s: float | None) -> None:
        self._backlog, self._hurries, self._last, self._after_s = backlog, hurries, last, after_s
        self._attempts = 0

    def pack(self, message: bytes) -> bytes:
        """See Transport."""
        return message

    def unpack(self, body: bytes) -> bytes:
        """See Transport."""
        return body

    def send(self, body: bytes) -> Outcome:
        """See Transport."""
        assert body
        self._attempts += 1
        if self._attempts == self._hurries:
            self._backlog.hurry()
        elif self._attempts == self._last:
            self._backlog.close()
        return Outcome("retry", after_s=self._after_s)

    def cancel(self) -> None:
        """See Transport."""

    def close(self) -> None:
        """See Transport."""


def test_a_cause_is_logged_once_and_again_when_it_comes_back_after_an_hour() -> None:
    """Whatever numbers it has: a refusal at each push would fill the log. What others write does not fill the memory."""
    causes = RefusalCauses()
    said = [causes.is_new(f"400: out of bounds at {now_s}", now_s) for now_s in (0.0, 60.0, 3000.0, 6000.0, 9601.0)]
    assert said == [True, False, False, False, True]
    assert causes.is_new("label name is empty", 9602.0)
    for number in range(1000):
        causes.is_new("x" * number, 9603.0)
    assert len(causes._latest_s) <= 100


@pytest.mark.parametrize(("after_s", "expected"), [(None, [2.0] * 4), (1.0, [2.0] * 4), (120.0, [120.0] * 4)])
def test_after_an_outage_an_exporter_that_ends_tries_again_and_again(after_s: float | None, expected: list[float]) -> None:
    """At once, and then soon, not after the minute that the outage has taught it; never before the receiver wants it."""
    clock = Waits()
    backlog = RequestQueue(LIMIT, clock)
    backlog.put(Batch(b"x", 1))
    Sender("metrics", backlog, Away(backlog, hurries=10, last=15, after_s=after_s))._run()
    before, then = clock.waits[:9], clock.waits[9:]
    assert before[-1] >= MOST_S / 2
    assert then == pytest.approx(expected)


def test_a_receiver_is_not_asked_before_it_wants_to_be() -> None:
    """Within reason: a year is a mistake."""
    assert Backoff().next_s(30.0) == 30.0
    assert Backoff().next_s(31_536_000.0) == LONGEST_RETRY_AFTER_S
    assert Backoff().next_s(0.0) > 0


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None), ("", None), ("5", 5.0), (" 120 ", 120.0), ("-1", None), ("1.5", None), ("soon", None), ("٣", None),
        ("9" * 9000, None), (formatdate(10, usegmt=True), 0.0), ("Fri, 99 Foo 2000 00:00:00 GMT", None),
    ],
)  # fmt: skip
def test_retry_after_is_a_number_or_a_date(header: str | None, seconds: float | None) -> None:
    """RFC 9110; what is neither says nothing."""
    assert _retry_after_s(HTTPResponse(headers={} if header is None else {"Retry-After": header})) == seconds


def test_what_a_receiver_says_is_one_short_line() -> None:
    """It forges no line of the log."""
    assert printable("a\nlevel=error\x1b[31m" + "x" * 1000) == ("a level=error [31m" + "x" * 1000)[:200].strip()
