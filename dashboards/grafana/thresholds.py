"""Thresholds of panels: the alerts' own, so that a panel turns red when its alert fires."""

from __future__ import annotations

from dashboards.alerts import MOST_SKIPS
from dashboards.alerts_ranks import SLOWER, UNRESPONSIVE_S
from dashboards.alerts_resources import MANY_RECOMPILES, THROTTLED, TIME_TO_ACT_S
from dashboards.grafana.panels import BAD, FAIR, GOOD, Step
from torchobs.detect.starvation import BEGINS, ENDS

FULL = 0.9
"""Share of a resource from which on it is nearly used up."""

NONE_IS_GOOD = (Step(None, GOOD), Step(1.0, BAD))
FEW_IS_FAIR = (Step(None, GOOD), Step(1.0, FAIR))
ONE_IS_GOOD = (Step(None, BAD), Step(1.0, GOOD))
USED_UP = (Step(None, GOOD), Step(FULL - 0.1, FAIR), Step(FULL, BAD))
GOODPUT = (Step(None, BAD), Step(0.5, FAIR), Step(0.8, GOOD))
BUSY = (Step(None, BAD), Step(0.5, FAIR), Step(0.8, GOOD))
STARVED = (Step(None, GOOD), Step(ENDS, FAIR), Step(BEGINS, BAD))
STRAGGLER = (Step(None, GOOD), Step(1.2, FAIR), Step(SLOWER, BAD))
PROGRESS_AGE = (Step(None, GOOD), Step(60.0, FAIR), Step(600.0, BAD))
"""From 10 minutes on NCCL's watchdog ends a collective by default."""
HEARTBEAT_AGE = (Step(None, GOOD), Step(UNRESPONSIVE_S / 4, FAIR), Step(float(UNRESPONSIVE_S), BAD))
SKIP_STREAK = (Step(None, GOOD), Step(MOST_SKIPS / 2, FAIR), Step(float(MOST_SKIPS), BAD))
TIME_LEFT = (Step(None, BAD), Step(float(TIME_TO_ACT_S), FAIR), Step(24 * 3600.0, GOOD))
RECOMPILES = (Step(None, GOOD), Step(MANY_RECOMPILES / 2, FAIR), Step(float(MANY_RECOMPILES), BAD))
THROTTLING = (Step(None, GOOD), Step(THROTTLED, BAD))
QUOTA_THROTTLING = (Step(None, GOOD), Step(0.25, BAD))
FRAGMENTED = (Step(None, GOOD), Step(0.2, BAD))
OVERHEAD = (Step(None, GOOD), Step(0.005, FAIR), Step(0.01, BAD))
"""The budget of docs/overhead.md: 0.5 % at steps of 50 ms, 1 % at steps of 1 ms."""
