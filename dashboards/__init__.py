"""Grafana dashboards and Prometheus rules, rendered from the catalog: `python -m dashboards`. Not in the wheel."""
