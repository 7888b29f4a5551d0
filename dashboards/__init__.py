"""Renders dashboards and Prometheus rules into `deploy/`, from the catalog: `python -m dashboards`. Not in the wheel."""
