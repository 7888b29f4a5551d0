"""The metrics page for Prometheus: renders snapshots in the text formats."""
