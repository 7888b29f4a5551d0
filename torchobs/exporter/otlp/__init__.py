"""OTLP push: export the ranks' metrics, spans and events to an OpenTelemetry Collector or any other OTLP receiver.

Imported only where an endpoint is configured, except ``options``. ``pipeline`` runs it: ``batches`` builds the requests from
the snapshots (``metric_source``, ``metric_encoder``) and the event rings (``ring_reader``, ``span_encoder``, ``log_encoder``)
in requests of a ``request_size`` that receivers accept, and ``delivery`` queues and sends them, by ``http_transport``
(http/protobuf) or ``grpc_transport``.
"""
