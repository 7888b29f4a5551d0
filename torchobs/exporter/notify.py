"""Messages about runs that fail, hang, turn NaN or are in other trouble, and about long ones that end: to a URL or a command.

The URL is a secret: it is in no log line. It comes from the exporter's configuration, or from the environment of a run's ranks,
which only their own user can read. The event loop only passes snapshots on: slow work happens in threads.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import subprocess
import time
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from socket import gethostname
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from torchobs.catalog import EXIT_REASONS
from torchobs.catalog.findings import ORIGIN
from torchobs.config.settings import NOTIFY
from torchobs.diagnosis.health import ERROR, health
from torchobs.document.live import Choice
from torchobs.exporter.outcomes import has_ended
from torchobs.flight.directory import find_existing
from torchobs.ranks.state import FIRST_STEP_S, UNRESPONSIVE_S
from torchobs.support.rate_limit import RateLimiter
from torchobs.support.text import clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torchobs.exporter.config import ExporterConfig
    from torchobs.exporter.outcomes import Outcomes
    from torchobs.exporter.snapshot_cache import SnapshotCache
    from torchobs.ranks.rank_view import RankView, RunView
    from torchobs.ranks.snapshot import Snapshot

EVERY_S = 600.0
"""At most one message of a run and kind in this time"""
LONG_S = 600.0
"""Age from which the end of a run is worth a message by itself"""
SETTLED_S = 3.0
"""How long trouble lasts before a message: until the first failed rank, or the origin of a NaN, is known"""
STALE_S = 60.0
"""Runs that ended so long before the exporter began were reported by another one, or are old news"""
RETRIED_S, FIRST_PAUSE_S, LONGEST_PAUSE_S = 300.0, 1.0, 60.0
TIMEOUT_S = 10.0
_RELAXATION = 10.0
"""Pause after a look, in multiples of its duration"""
_MOST_UNSENT, _MOST_TEXT = 16, 3000
_RETRYABLE = frozenset({408, 425, 429, 500, 502, 503, 504})
_HANGS, _NANS = frozenset({"hung", "unresponsive"}), ("nonfinite_", ORIGIN)
_WHAT = {
    "failed": "failed", "hung": "hangs", "nan": "has NaN or infinity", "error": "is in trouble", "ended": "has ended",
}  # fmt: skip
_log = logging.getLogger(__name__)


class Message(NamedTuple):
    """A message: a URL gets its ``text``, a command all of it."""

    text: str
    kind: str
    job_name: str
    run_id: str
    host: str
    action: str | None
    """what to do after a run has ended"""


class Notifier:
    """Decides on messages, and sends them. To be used in one event loop."""

    def __init__(
        self, config: ExporterConfig, watch: SnapshotCache, outcomes: Outcomes, page: Callable[[], tuple[str, str]]
    ) -> None:
        """``page`` returns the page's URL, and how to reach it from elsewhere."""
        self._config, self._watch, self._outcomes, self._page = config, watch, outcomes, page
        self._limiter, self._began_s, self._closed = RateLimiter(EVERY_S), time.time(), Event()
        self._since: dict[tuple[str, str], float] = {}
        """trouble by run and kind, and since when it is seen"""
        self._said: set[tuple[str, str]] = set()
        self._targets: dict[str, str] = {}
        """the own targets of ranks, by incarnation; empty: none"""
        self._sending: list[Thread] = []
        self._dead, self._noticed = set[str](), set[str]()
        """incarnations that have ended, in the newest snapshot and in the one last looked at"""
        self._newest: Snapshot | None = None
        self._looking: asyncio.Task[None] | None = None

    @property
    def settled(self) -> bool:
        """Whether no end is left to be looked at, and no message to be sent."""
        waits = self._dead != self._noticed or self._since.keys() - self._said
        return not (waits or any(thread.is_alive() for thread in self._sending))

    def review(self, snapshot: Snapshot) -> None:
        """Review the runs of a snapshot soon. Returns at once."""
        targets, is_node = self._targets, self._config.mode == "node"  # a sidecar has process numbers of its own
        self._targets = {
            rank.incarnation: targets[rank.incarnation] if rank.incarnation in targets else target_of(rank.view.header.pid)
            for rank in snapshot.ranks
            if is_node and (rank.up or rank.incarnation in targets)
        }
        if not (self._config.notify or any(self._targets.values())):
            return
        self._newest, self._dead = snapshot, _dead(snapshot)
        if self._looking is None or self._looking.done():
            if self._looking is not None and (problem := self._looking.exception()) is not None:
                _log.error("a look at the runs failed, and is tried again: %r", problem, exc_info=problem)
                self._noticed = self._dead  # what cannot be looked at keeps no exporter from leaving
            self._looking = asyncio.get_running_loop().create_task(self._review_newest())

    def close(self) -> None:
        """Drop unsent messages."""
        self._closed.set()
        if self._looking is not None:
            self._looking.cancel()

    async def _review_newest(self) -> None:
        while (snapshot := self._newest) is not None:
            self._newest, began_s = None, time.perf_counter()
            runs = await self._watch.ask(lambda scan, snapshot=snapshot: self._outcomes.read(scan, snapshot))  # type: ignore[misc]
            await asyncio.to_thread(self._notice, runs)
            self._noticed = _dead(snapshot)
            await asyncio.sleep(_RELAXATION * (time.perf_counter() - began_s))

    def _notice(self, runs: Sequence[RunView]) -> None:
        """Send a message, once, for trouble that has lasted long enough."""
        now_s, troubles = time.monotonic(), {(run.key, kind): run for run in runs for kind in trouble(run, self._began_s)}
        self._since = {key: self._since.get(key, now_s) for key in troubles}
        self._said &= troubles.keys()
        for key in [key for key, since_s in self._since.items() if now_s - since_s >= SETTLED_S and key not in self._said]:
            self._said.add(key)
            run, (_, kind) = troubles[key], key
            target = next(filter(None, (self._targets.get(rank.incarnation) for rank in run.ranks)), self._config.notify)
            if target and self._limiter.take(now_s, key):
                self._start(target, self._message(run, kind))

    def _message(self, run: RunView, kind: str) -> Message:
        """Return the message: words of the page, the culprit, what to do, and links."""
        after = self._outcomes.verdict(run) if has_ended(run) else None
        url, tunnel = self._page()
        culprits = [proof.text for proof in after.evidence[:2]] if after else []
        directory = find_existing(self._config.flight_dir, self._config.runtime_dir) or ""
        lines = [
            f"torchobs: {clean(run.job_name, 80)} {clean(run.run_id, 80)} on {gethostname()} {_WHAT[kind]}.",
            health(run).text,
            *culprits,
            f"action: {after.action}. {after.reason}" if after else "",
            f"page: {url}{Choice(run=run.key).query}{tunnel}" if url else "",
            f"more: torchobs inspect {shlex.quote(directory)} --run {shlex.quote(run.run_id)}",
        ]
        text = "\n".join(filter(None, lines)).replace("<", "(").replace(">", ")")  # Slack would take them for markup
        return Message(text[:_MOST_TEXT], kind, run.job_name, run.run_id, gethostname(), after.action if after else None)

    def _start(self, target: str, message: Message) -> None:
        self._sending = [thread for thread in self._sending if thread.is_alive()]
        if len(self._sending) >= _MOST_UNSENT:
            _log.error("a message is dropped: %d others are unsent", len(self._sending))
            return
        self._sending.append(Thread(target=deliver, args=(target, message, self._closed), name="notify", daemon=True))
        self._sending[-1].start()


def trouble(run: RunView, began_s: float) -> Iterator[str]:
    """Yield the kinds of messages that a run is worth now; ``began_s``: when the exporter began, Unix time."""
    ended = has_ended(run)
    if ended and max(rank.last_s for rank in run.ranks) < began_s - STALE_S:
        return
    kinds = {kind_of(finding.kind) for finding in health(run).findings if finding.severity == ERROR}
    kinds -= set() if any(map(_hangs, run.ranks)) else {"hung"}
    yield from kinds
    if ended and "failed" not in kinds and max(rank.last_s - rank.begun_s for rank in run.ranks) > LONG_S:
        yield "ended"


def _hangs(rank: RankView) -> bool:
    """Return whether a rank hangs, as in the alert: before its first step it may import and load with Python's lock held."""
    is_lasting = rank.beat_age_s > UNRESPONSIVE_S and (rank.done > 0 or (rank.progress_age_s or 0.0) > FIRST_STEP_S)
    return rank.state == "hung" or (rank.state == "unresponsive" and is_lasting)


def _dead(snapshot: Snapshot) -> set[str]:
    return {rank.incarnation for rank in snapshot.ranks if not rank.up}


def kind_of(finding: str) -> str:
    """Return the kind of message for a finding of severity error."""
    if finding in EXIT_REASONS:
        return "failed"
    return "hung" if finding in _HANGS else "nan" if finding.startswith(_NANS) else "error"


def target_of(pid: int) -> str:
    """Return where a process of this user wants messages sent; empty if nowhere."""
    with suppress(OSError, ValueError):
        process = Path(f"/proc/{pid}")
        if process.stat().st_uid == os.geteuid():  # another user's command would run with our rights
            environ = dict(word.partition(b"=")[::2] for word in (process / "environ").read_bytes().split(b"\0"))
            return str(NOTIFY.kind.parse(os.fsdecode(environ.get(NOTIFY.variables[0].encode(), b"")).strip()))
    return ""


def deliver(target: str, message: Message, closed: Event) -> None:
    """Send a message, again and again for five minutes. Logs how that went, without the target."""
    until_s, pause_s = time.monotonic() + RETRIED_S, FIRST_PAUSE_S
    while True:
        problem, again = attempt(target, message)
        if not problem:
            _log.info("message %r about %s %s: sent", message.kind, message.job_name, message.run_id)
            return
        if not again or time.monotonic() + pause_s > until_s:
            _log.error("message %r about %s %s: given up: %s", message.kind, message.job_name, message.run_id, problem)
            return
        if closed.wait(pause_s):
            return
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class _NoRedirect(HTTPRedirectHandler):
    """Follows no redirect: it would turn a POST into a GET, and send the message to a host that no setting names."""

    def redirect_request(self, *_: Any) -> None:
        """See :class:`HTTPRedirectHandler`."""


def attempt(target: str, message: Message) -> tuple[str, bool]:
    """Send a message once. Return the error, empty if there is none, and whether it is worth another attempt."""
    url = target.removeprefix("ntfy:")
    try:
        if not url.startswith(("http://", "https://")):
            data = json.dumps(message._asdict()).encode()
            done = subprocess.run(shlex.split(target), input=data, capture_output=True, timeout=TIMEOUT_S, check=False)
            return f"exit status {done.returncode}" if done.returncode else "", True
        is_plain = url != target or (urlsplit(url).hostname or "").startswith("ntfy.")
        body = message.text.encode() if is_plain else json.dumps({"text": message.text}).encode()
        headers = {"Content-Type": "text/plain; charset=utf-8" if is_plain else "application/json", "User-Agent": "torchobs"}
        with build_opener(_NoRedirect).open(Request(url, body, headers), timeout=TIMEOUT_S):  # noqa: S310  # checked to be HTTP
            return "", False
    except HTTPError as refusal:
        refusal.close()
        return f"status {refusal.code}", refusal.code in _RETRYABLE
    except (OSError, HTTPException, ValueError, subprocess.SubprocessError) as problem:
        return type(getattr(problem, "reason", problem)).__name__, True  # its words may name the target
