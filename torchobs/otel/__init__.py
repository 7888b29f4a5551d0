"""The OpenTelemetry API implemented over a flight file: metrics and spans of the application and of torchobs."""

from torchobs.otel.metrics import FlightMeterProvider
from torchobs.otel.providers import install, observe, uninstall
from torchobs.otel.traces import FlightTracerProvider

__all__ = ["FlightMeterProvider", "FlightTracerProvider", "install", "observe", "uninstall"]
