"""Thresholds of panels: the alerts' own, so that a panel turns red when its alert fires."""

from __future__ import annotations

from dashboards.grafana.panels import BAD, FAIR, GOOD, Step
from torchobs.detect.speed import BEGINS, ENDS
from torchobs.ranks.state import UNRESPONSIVE_S

Steps = tuple[Step, ...]

NONE_IS_GOOD = (Step(None, GOOD), Step(1.0, BAD))
FEW_IS_FAIR = (Step(None, GOOD), Step(1.0, FAIR))
ONE_IS_GOOD = (Step(None, BAD), Step(1.0, GOOD))
BUSY = (Step(None, BAD), Step(0.5, FAIR), Step(0.8, GOOD))
STARVED = (Step(None, GOOD), Step(ENDS, FAIR), Step(BEGINS, BAD))
PROGRESS_AGE = (Step(None, GOOD), Step(60.0, FAIR), Step(600.0, BAD))
"""From 10 minutes on NCCL's watchdog ends a collective by default."""
HEARTBEAT_AGE = (Step(None, GOOD), Step(UNRESPONSIVE_S / 4, FAIR), Step(UNRESPONSIVE_S, BAD))
OVERHEAD = (Step(None, GOOD), Step(0.005, FAIR), Step(0.01, BAD))
"""The budget of docs/overhead.md: 0.5 % at steps of 50 ms, 1 % at steps of 1 ms."""
_DAY_S = 24 * 3600.0


def goodput(objective: float) -> Steps:
    """Return the steps of a productive share of time."""
    return (Step(None, BAD), Step(min(0.5, 0.625 * objective), FAIR), Step(objective, GOOD))


def used_up(limit: float) -> Steps:
    """Return the steps of a share in use, fair from a tenth below the limit on."""
    return (Step(None, GOOD), Step(max(limit - 0.1, limit / 2), FAIR), Step(limit, BAD))


def ratio(limit: float) -> Steps:
    """Return the steps of what is usually 1."""
    return (Step(None, GOOD), Step(min(1.2, (1 + limit) / 2), FAIR), Step(limit, BAD))


def count(limit: float) -> Steps:
    """Return the steps of a number, fair from half of the limit on."""
    return (Step(None, GOOD), Step(limit / 2, FAIR), Step(float(limit), BAD))


def share(limit: float) -> Steps:
    """Return the steps of a share of time that is to be small."""
    return (Step(None, GOOD), Step(limit, BAD))


def time_left(limit_s: float) -> Steps:
    """Return the steps of a time that is to be long."""
    return (Step(None, BAD), Step(float(limit_s), FAIR), Step(max(_DAY_S, 2 * limit_s), GOOD))


def percent(value: float) -> str:
    """Return a share as a description says it."""
    return f"{100 * value:.4g} %"
