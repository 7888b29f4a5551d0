"""The parts of `make demo`: the exporter, the job, Prometheus, reading a page of metrics and showing it."""
