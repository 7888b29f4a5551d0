"""The Prometheus page: from snapshots to lines of the text format."""
