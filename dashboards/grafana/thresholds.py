"""Thresholds of panels: the alerts' own, so that a panel turns red when its alert fires."""

from __future__ import annotations

from dashboards.grafana.panels import BAD, FAIR, GOOD, Step
from torchobs.detect.starvation import BEGINS, ENDS
from torchobs.rules.alerts_ranks import UNRESPONSIVE_S
from torchobs.rules.values import DEFAULT

ALERTS = DEFAULT.thresholds

NONE_IS_GOOD = (Step(None, GOOD), Step(1.0, BAD))
FEW_IS_FAIR = (Step(None, GOOD), Step(1.0, FAIR))
ONE_IS_GOOD = (Step(None, BAD), Step(1.0, GOOD))
USED_UP = (Step(None, GOOD), Step(ALERTS.memory - 0.1, FAIR), Step(ALERTS.memory, BAD))
GOODPUT = (Step(None, BAD), Step(0.5, FAIR), Step(ALERTS.goodput, GOOD))
BUSY = (Step(None, BAD), Step(0.5, FAIR), Step(0.8, GOOD))
STARVED = (Step(None, GOOD), Step(ENDS, FAIR), Step(BEGINS, BAD))
STRAGGLER = (Step(None, GOOD), Step(1.2, FAIR), Step(ALERTS.straggler, BAD))
PROGRESS_AGE = (Step(None, GOOD), Step(60.0, FAIR), Step(600.0, BAD))
"""From 10 minutes on NCCL's watchdog ends a collective by default."""
HEARTBEAT_AGE = (Step(None, GOOD), Step(UNRESPONSIVE_S / 4, FAIR), Step(UNRESPONSIVE_S, BAD))
SKIP_STREAK = (Step(None, GOOD), Step(ALERTS.skipped / 2, FAIR), Step(float(ALERTS.skipped), BAD))
TIME_LEFT = (Step(None, BAD), Step(float(ALERTS.time_to_limit_s), FAIR), Step(24 * 3600.0, GOOD))
RECOMPILES = (Step(None, GOOD), Step(ALERTS.recompiles / 2, FAIR), Step(float(ALERTS.recompiles), BAD))
THROTTLING = (Step(None, GOOD), Step(ALERTS.gpu_throttled, BAD))
QUOTA_THROTTLING = (Step(None, GOOD), Step(ALERTS.cpu_throttled, BAD))
FRAGMENTED = (Step(None, GOOD), Step(ALERTS.fragmented, BAD))
OVERHEAD = (Step(None, GOOD), Step(0.005, FAIR), Step(0.01, BAD))
"""The budget of docs/overhead.md: 0.5 % at steps of 50 ms, 1 % at steps of 1 ms."""
