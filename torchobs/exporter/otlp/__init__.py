"""OTLP push to an OpenTelemetry Collector, or any other receiver; imported only where an endpoint is configured."""
