"""The machine itself, for nodes without node_exporter: one module per collector, off unless asked for (``--collect.host``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchobs.exporter.config import ExporterConfig
    from torchobs.exporter.host.look import Host


def of(config: ExporterConfig) -> Host | None:
    """Return what collects the machine's numbers; ``None``, and nothing of it is imported, if none are to be."""
    if not config.collect_host:
        return None
    from torchobs.exporter.host.look import Host

    return Host(config)
