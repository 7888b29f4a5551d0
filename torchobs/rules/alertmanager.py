"""Configuration for Alertmanager: one notification per run, and none for what follows from something worse."""

from __future__ import annotations

from typing import Any

import yaml

from torchobs.rules.promql import RUN
from torchobs.rules.rule_file import HEADER

ABOUT = """\
# One notification per training run, pages apart from tickets; what follows from something worse is not told.
# Put your receivers in place of the two webhooks, or take route and inhibit_rules over into your own configuration.
"""
_FOLLOWS = (
    (
        ("TorchobsRunDown", "TorchobsCrashLoop"),
        ("TorchobsRankFailed", "TorchobsRankHung", "TorchobsRunHung", "TorchobsRanksMissing", "TorchobsStraggler",
         "TorchobsSlowdown", "TorchobsGoodputLow", "TorchobsCheckpointOverdue", "TorchobsTelemetryGone"),
    ),
    (
        ("TorchobsRankFailed",),
        ("TorchobsRankHung", "TorchobsRanksMissing", "TorchobsStraggler", "TorchobsSlowdown", "TorchobsDataStarvation"),
    ),
    (
        ("TorchobsRunHung",),
        ("TorchobsRankHung", "TorchobsStraggler", "TorchobsSlowdown", "TorchobsDataStarvation", "TorchobsCheckpointOverdue",
         "TorchobsGoodputLow"),
    ),
    (("TorchobsDataStarvation",), ("TorchobsGoodputLow",)),
    (("TorchobsRankHung", "TorchobsStraggler"), ("TorchobsSlowdown",)),
    (("TorchobsLossNotFinite",), ("TorchobsGradientExplosion", "TorchobsLossScaleStuck")),
    (("TorchobsLossScaleStuck",), ("TorchobsGradientExplosion",)),
    (("TorchobsGpuFault",), ("TorchobsNvlinkDown", "TorchobsGpuThrottled", "TorchobsStraggler")),
    (("TorchobsCgroupOomKill",), ("TorchobsOutOfMemoryNear", "TorchobsMemoryGrowth", "TorchobsLoaderWorkerDied")),
    (("TorchobsTelemetryGone",), ("TorchobsRanksMissing", "TorchobsGoodputLow")),
    (("TorchobsCheckpointFailed",), ("TorchobsCheckpointOverdue", "TorchobsCheckpointNever")),
)  # fmt: skip
"""Alerts of a run, each with those of the same run that it explains. No ticket silences a page: a run that hangs because a rank
died wakes somebody up."""


def config() -> dict[str, Any]:
    """Return the configuration."""
    return {
        "route": {
            "receiver": "tickets",
            "group_by": list(RUN),
            "group_wait": "30s",
            "group_interval": "5m",
            "repeat_interval": "24h",
            "routes": [
                {
                    "matchers": ['severity="page"'],
                    "receiver": "pager",
                    "group_wait": "10s",
                    "group_interval": "1m",
                    "repeat_interval": "4h",
                }
            ],
        },
        "inhibit_rules": [
            {
                "source_matchers": [_is_one_of(sources)],
                "target_matchers": [_is_one_of(targets)],
                "equal": list(RUN),
            }
            for sources, targets in _FOLLOWS
        ],
        "receivers": [
            {"name": "pager", "webhook_configs": [{"url": "https://pager.example.org/torchobs", "send_resolved": True}]},
            {"name": "tickets", "webhook_configs": [{"url": "https://tickets.example.org/torchobs", "send_resolved": True}]},
        ],
    }


def render() -> str:
    """Return the file."""
    return f"{HEADER}#\n{ABOUT}{yaml.safe_dump(config(), sort_keys=False, width=4096)}"


def _is_one_of(alerts: tuple[str, ...]) -> str:
    names = "|".join(alerts)
    return f'alertname=~"{names}"'
