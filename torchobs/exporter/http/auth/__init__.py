"""TLS, client certificates and passwords, configured as in every Prometheus exporter: ``--web.config.file``."""
