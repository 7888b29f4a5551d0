"""Where commands are taken without a token: the path of the API's own Unix socket, whose mode says who comes in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torchobs.exporter.http.unix_socket import UnixAddress
from torchobs.flight.files.location import find_existing

if TYPE_CHECKING:
    from torchobs.exporter.config import ExporterConfig

OFF = "off"
NAME = "exporter.sock"
"""In the flight directory of a node, where the other programs look for it."""


def is_wanted(config: ExporterConfig) -> bool:
    """Return True if there is to be one: as set, none for ``off``; of itself a node's exporter has one."""
    return config.api_socket != OFF and (config.api_socket is not None or config.mode == "node")


def address(config: ExporterConfig) -> UnixAddress | None:
    """Return where it is to be; ``None`` while there is no place for it."""
    if config.api_socket is not None:
        return UnixAddress(str(Path(config.api_socket).absolute()))
    directory = find_existing(config.flight_dir, config.runtime_dir)
    return None if directory is None else UnixAddress(str(Path(directory) / NAME))
