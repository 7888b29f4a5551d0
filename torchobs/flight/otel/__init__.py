"""The OpenTelemetry API over a flight file: metrics and spans of the application itself, and of torchobs.

Only ``opentelemetry-api`` is imported here: the SDK belongs into the exporter.
"""

from torchobs.flight.otel.installed import Installed, install, observe, uninstall
from torchobs.flight.otel.metrics import FlightMeterProvider
from torchobs.flight.otel.spans import FlightSpan, SpanLimits
from torchobs.flight.otel.traces import FlightTracerProvider

__all__ = [
    "FlightMeterProvider",
    "FlightSpan",
    "FlightTracerProvider",
    "Installed",
    "SpanLimits",
    "install",
    "observe",
    "uninstall",
]
