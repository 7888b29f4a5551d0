"""Report a run's progress to Kubeflow Trainer, which shows it in the TrainJob's ``status.trainerStatus``.

Kubeflow Trainer 2.2 and later, with its feature gate TrainJobStatus, gives the training's containers an address, a certificate
and a token that is good for this TrainJob alone; the injection hands them to the exporter. The exporter in the pod of rank 0
reports. Specification: KEP-2779 of kubeflow/trainer.
"""

from __future__ import annotations

import http.client
import json
import logging
import ssl
import time
from datetime import datetime, timezone
from functools import partial
from http import HTTPStatus
from math import isnan
from pathlib import Path
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from torchobs import catalog
from torchobs._version import __version__
from torchobs.diagnosis.status import last_loss, left_s, newest
from torchobs.flight.metrics.throughput import RECORDS, pace
from torchobs.ranks.metric_values import readings_of
from torchobs.ranks.rank_file import READ_ERRORS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torchobs.exporter.snapshot_cache import Scan, SnapshotCache
    from torchobs.flight.format.step_record import StepRecord
    from torchobs.ranks.metric_values import Readings
    from torchobs.ranks.snapshot import Rank, Snapshot

INTERVAL_S = 30.0
"""Between two reports. The specification asks for at least 5 s; each one is a write to the cluster's API server."""
TIMEOUT_S = 5.0
_COMPLETE = 100
_INT32_MAX = 2**31 - 1
_log = logging.getLogger(__name__)


class StatusServer(NamedTuple):
    """Where Kubeflow Trainer takes the status of this TrainJob."""

    url: str
    token_file: str
    """read for each request: kubelet replaces the token every hour"""
    certificate: str | None = None
    """certificates to trust; None: the system's"""


Status = dict[str, Any]
"""A ``TrainJobTrainerStatus`` of Kubeflow's API"""


class TrainJobReporter:
    """Reports in a thread of its own. To be called from one event loop."""

    def __init__(self, server: StatusServer) -> None:
        self.failures = 0
        """number of reports that were not accepted"""
        self._server = server
        self._next_s = 0.0
        self._told_end_of = ""
        self._problem = ""
        self._changed = Condition()
        self._waiting: Status | None = None
        self._deadline_s: float | None = None
        """until when a report is waited for; None: there is none on its way"""
        self._thread: Thread | None = None

    @property
    def settled(self) -> bool:
        """True if no report is on its way, or if it has taken too long to be waited for."""
        with self._changed:
            return self._deadline_s is None or time.monotonic() > self._deadline_s

    async def look(self, snapshots: SnapshotCache, snapshot: Snapshot, *, final: bool = False) -> None:
        """Report what is due: every 30 s, at the run's end, and with ``final``, for the exporter ends. Does not wait for it."""
        rank = reporting(snapshot.ranks)
        if rank is None or self._told_end_of == rank.incarnation or (rank.up and not final and time.monotonic() < self._next_s):
            return
        self._next_s = time.monotonic() + INTERVAL_S
        self._told_end_of = "" if rank.up else rank.incarnation
        self._send(await snapshots.ask(partial(_read, rank)))

    def _send(self, status: Status) -> None:
        with self._changed:
            self._waiting, self._deadline_s = status, time.monotonic() + 2 * TIMEOUT_S  # one may be on its way
            self._changed.notify_all()
        if self._thread is None:
            self._thread = Thread(target=self._run, name="trainjob", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._waiting is None:
                    self._changed.wait()
                status, self._waiting = self._waiting, None
            self._note(post(self._server, status))
            with self._changed:
                if self._waiting is None:
                    self._deadline_s = None

    def _note(self, problem: str) -> None:
        if problem:
            self.failures += 1
        if problem and problem != self._problem:
            _log.warning("Kubeflow Trainer does not take the TrainJob's progress: %s", problem)
        self._problem = problem


def reporting(ranks: Iterable[Rank]) -> Rank | None:
    """Return the rank whose progress is the run's: rank 0, the one that lives or the last one that did."""
    first = [rank for rank in ranks if rank.rank == "0"]
    return max(first, key=lambda rank: (rank.up, rank.view.header.wall_ns), default=None)


def _read(rank: Rank, scan: Scan) -> Status:
    try:
        with scan.flight_file(rank.incarnation) as file:
            records = file.latest(RECORDS)
    except READ_ERRORS:
        records = []
    return status_of(rank, records, datetime.now(timezone.utc))


def status_of(rank: Rank, records: Sequence[StepRecord], now: datetime) -> Status:
    """Return what a rank has done and what is left, as far as it is known.

    Progress is of the whole run, also after a restart from a checkpoint: the planned steps are those from there on. It is
    complete when the training has finished, and not before, for an evaluation or a checkpoint may follow the last step.
    """
    readings, finished = readings_of(rank), rank.reason == "finished"
    before, steps, planned = (
        readings.get(metric) or 0.0 for metric in (catalog.STEPS_RESUMED_FROM, catalog.STEPS, catalog.STEPS_PLANNED)
    )
    status: Status = {"lastUpdatedTime": now.strftime("%Y-%m-%dT%H:%M:%SZ")}
    if finished:
        status |= {"progressPercentage": _COMPLETE, "estimatedRemainingSeconds": 0}
    elif planned:
        done = _COMPLETE * (before + steps) / (before + planned)
        status["progressPercentage"] = max(0, min(int(done), _COMPLETE - 1))
    found = pace(records) if rank.state == "alive" else None
    remaining_s = left_s(readings.get, found)
    if remaining_s is not None and not finished:
        status["estimatedRemainingSeconds"] = min(round(remaining_s), _INT32_MAX)
    metrics = {"step": f"{before + steps:.0f}", **dict(_metrics(readings, newest(records).loss))}
    status["metrics"] = [{"name": name, "value": text} for name, text in metrics.items()]
    return status


def _metrics(readings: Readings, known_loss: float | None) -> Iterator[tuple[str, str]]:
    """Yield names and values, by the names that transformers logs them by."""
    rates = readings.of(catalog.LEARNING_RATE)
    values = {
        "loss": last_loss(readings.get, known_loss),
        "learning_rate": rates.get(("0",), next(iter(rates.values()), None)),
    }
    for name, value in values.items():
        if value is not None:
            yield name, "NaN" if isnan(value) else f"{value:.6g}"


def post(server: StatusServer, status: Status) -> str:
    """Send a status; return the problem, or nothing.

    No proxy and no redirect is followed: the token is for this server alone.
    """
    try:
        token = Path(server.token_file).read_text(encoding="ascii").strip()
        if not token:
            return f"{server.token_file} is empty"
        address = urlsplit(server.url)
        context = ssl.create_default_context(cafile=server.certificate)
        connection = http.client.HTTPSConnection(address.hostname or "", address.port, timeout=TIMEOUT_S, context=context)
        headers = {
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/json",
            "User-Agent": f"torchobs-exporter/{__version__}",
        }
        try:
            connection.request("POST", address.path or "/", json.dumps({"trainerStatus": status}), headers)
            answer = connection.getresponse()
        finally:
            connection.close()
    except (OSError, http.client.HTTPException) as problem:
        return f"{type(problem).__name__}: {problem}"
    except ValueError:  # its message may quote the token
        return "the token or the address is not one"
    return "" if answer.status < HTTPStatus.MULTIPLE_CHOICES else f"{answer.status} {answer.reason}"
