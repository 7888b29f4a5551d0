"""OTLP push: the ranks' metrics and spans to an OpenTelemetry Collector, or to whatever else takes OTLP.

Imported only where an endpoint is configured (``options`` alone is always). ``push`` composes: ``metrics`` and ``spans`` make
requests of what ``rings`` and the snapshots hold, ``backlog`` keeps them, ``sender`` brings them to the receiver by ``web``
(http/protobuf) or ``rpc`` (gRPC), ``ledger`` counts them.
"""
