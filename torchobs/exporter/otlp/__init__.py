"""OTLP push: export the ranks' metrics, spans and events to an OpenTelemetry Collector or any other OTLP receiver.

Imported only where an endpoint is configured, except ``options``. ``push`` runs it: ``metrics`` makes data points of the
snapshots, ``rings`` makes spans and log records of the event rings, ``messages`` makes requests of these, ``send`` sends them.
"""
