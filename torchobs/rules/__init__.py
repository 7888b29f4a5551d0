"""Alerts and recording rules for Prometheus, made from the catalog, and the configuration of Alertmanager that fits them."""
