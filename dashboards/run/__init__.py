"""The dashboard of a training run: health, progress, use of time, gradients, and torchobs itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards import template
from dashboards.layout import arrange
from dashboards.run import gradients, health, itself, phases, progress

if TYPE_CHECKING:
    from grafana_foundation_sdk.models.dashboard import Dashboard


def dashboard() -> Dashboard:
    """Return the dashboard."""
    frame = template.frame("torchobs-run", "torchobs: run", "A PyTorch training run, as torchobs sees it.")
    frame.panels = arrange([part.section() for part in (health, progress, phases, gradients, itself)])
    return frame


def render() -> str:
    """Return the dashboard as JSON in the classic model, which every Grafana version imports."""
    return f"{JSONEncoder(indent=2).encode(dashboard())}\n"
