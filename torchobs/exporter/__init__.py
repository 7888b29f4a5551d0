"""The exporter: reads flight files, judges the state of ranks from outside, and serves both. It never imports torch."""
