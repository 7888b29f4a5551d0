"""What the exporter of a pod advises on its page and in its log: no rank has appeared, or the pod's grace is too short."""

from __future__ import annotations

import logging
from math import ceil
from typing import TYPE_CHECKING

from torchobs.ranks.scanner import END_S

if TYPE_CHECKING:
    from torchobs.exporter.config import ExporterConfig
    from torchobs.exporter.metrics_page import ScrapeTracker
    from torchobs.ranks.snapshot import Snapshot

NO_RANK_S = 120.0
"""Seconds without a rank before that is worth a word: a training imports torch within the first two minutes."""

NO_RANK = (
    "no rank has appeared: does the training call torchobs.init(), and does its image have torchobs? With the label "
    "torchobs.io/inject: auto it needs neither, but a virtual environment needs the annotation torchobs.io/pythonpath as well"
)

_log = logging.getLogger(__name__)


class PodAdvice:
    """Advice of one pod's exporter; each piece is logged once. Times are CLOCK_MONOTONIC in seconds."""

    def __init__(self, config: ExporterConfig) -> None:
        self._grace_s = config.drain_timeout_s + END_S
        self._has_rank = False
        self._begun_s: float | None = None
        self._logged: set[str] = set()
        self.advice: tuple[str, ...] = ()

    def look(self, snapshot: Snapshot, scrapers: ScrapeTracker, now_s: float, *, ends: bool = False) -> None:
        """Look again at the pod's ranks and scrapers. ``ends``: the trainings have ended."""
        self._begun_s = now_s if self._begun_s is None else self._begun_s
        self._has_rank = self._has_rank or bool(snapshot.ranks)
        advice = {}
        if not self._has_rank and (ends or now_s - self._begun_s >= NO_RANK_S):
            advice["no rank"] = NO_RANK
        interval_s = scrapers.interval_s(now_s)
        if interval_s is not None and (needed_s := interval_s + scrapers.timeout_s + END_S) > self._grace_s:
            advice["grace"] = (
                f"the pod's grace of {self._grace_s:.0f} s is too short for its scrapes, which need {ceil(needed_s)} s: their "
                "interval, their timeout and 5 s. The training's last steps may be lost: raise terminationGracePeriodSeconds"
            )
        for kind in advice.keys() - self._logged:
            _log.warning("%s", advice[kind])
        self._logged |= advice.keys()
        self.advice = tuple(advice.values())
