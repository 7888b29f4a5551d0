"""Catalog of every metric, event and span of torchobs, and of the findings. Names follow OpenTelemetry, units UCUM.

Derived from it are the flight file's series, the exporter's metrics page, the dashboards, the alert rules and
``docs/metrics.md``. A dashboard that names an unknown metric is an ``AttributeError``.
"""

from __future__ import annotations

from torchobs.catalog import machine, own, training
from torchobs.catalog.events import *
from torchobs.catalog.machine import *
from torchobs.catalog.model import *
from torchobs.catalog.model import Metric
from torchobs.catalog.own import *
from torchobs.catalog.training import *

METRICS: tuple[Metric, ...] = tuple(
    value for module in (training, machine, own) for value in vars(module).values() if isinstance(value, Metric)
)
BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}
