"""Path of the API's own Unix socket, over which commands need no token: its file's mode controls access."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torchobs.exporter.unix_socket import UnixAddress
from torchobs.flight.files.location import find_existing

if TYPE_CHECKING:
    from torchobs.exporter.config import ExporterConfig

OFF = "off"
NAME = "exporter.sock"
"""File name in a node's flight directory, where the command-line tools look for it."""


def is_wanted(config: ExporterConfig) -> bool:
    """Return True if the socket is wanted: as configured (``off``: no); by default only in a node's exporter."""
    return config.api_socket != OFF and (config.api_socket is not None or config.mode == "node")


def address(config: ExporterConfig) -> UnixAddress | None:
    """Return the socket's address; ``None`` while the flight directory does not exist."""
    if config.api_socket is not None:
        return UnixAddress(str(Path(config.api_socket).absolute()))
    directory = find_existing(config.flight_dir, config.runtime_dir)
    return None if directory is None else UnixAddress(str(Path(directory) / NAME))
