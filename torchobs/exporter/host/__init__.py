"""The machine itself, for nodes without node_exporter: one module per collector, off unless asked for (``--collect.host``)."""
