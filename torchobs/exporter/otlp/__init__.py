"""OTLP push: export the ranks' metrics, spans and events to an OpenTelemetry Collector or any other OTLP receiver.

Imported only where an endpoint is configured. ``push`` runs it: ``source`` makes requests of the snapshots and the event rings,
``send`` sends them.
"""
