"""The OpenTelemetry API over a flight file: metrics and spans of the application itself, and of torchobs.

Only ``opentelemetry-api`` is imported here: the SDK belongs into the exporter.
"""

from torchobs.otel.global_providers import Installed, install, observe, uninstall
from torchobs.otel.meter_provider import FlightMeterProvider
from torchobs.otel.span import FlightSpan, SpanLimits
from torchobs.otel.tracer_provider import FlightTracerProvider

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
