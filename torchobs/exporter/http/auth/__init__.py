"""TLS, client certificates and passwords, by the file that every Prometheus exporter takes: ``--web.config.file``."""
