"""Write the exporter's address to a file for Prometheus' file-based service discovery (``file_sd_configs``).

https://prometheus.io/docs/prometheus/latest/configuration/configuration/#file_sd_config
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from torchobs.config.options import Address
from torchobs.flight import files
from torchobs.flight.directory import opened

if TYPE_CHECKING:
    from collections.abc import Iterable

_HOST = "%h"
"""Placeholder in the path for the host name, so that many exporters can share one command line and one directory."""
_MODE = 0o644
"""Readable by all: Prometheus runs as another user, and nothing in the file is secret."""

_log = logging.getLogger(__name__)


class TargetFile:
    """The file, written when its content changes, and removed at the end."""

    def __init__(self, path: str, host: str) -> None:
        """``host``: this machine's name, which stands for the address of all interfaces."""
        self.problem = ""
        self.failures = 0
        """number of failed writes"""
        self._path, self._host = Path(path.replace(_HOST, host)), host
        self._written = ""
        self._identity = 0, 0  # a successor's file may get the number of ours

    def update(self, addresses: Iterable[Address], telemetry_path: str, *, tls: bool) -> None:
        """Write the file if its content changes. A failed write is a problem, and retried by the next call."""
        targets = sorted({str(self._dialled(address)) for address in addresses})
        labels = {"torchobs_host": self._host, "__metrics_path__": telemetry_path, **({"__scheme__": "https"} if tls else {})}
        text = json.dumps([{"targets": targets, "labels": labels}] if targets else [], indent=2) + "\n"
        if text == self._written and not self.problem:
            return
        try:
            with opened(self._path.parent, link=True) as directory_fd:
                files.replace(directory_fd, self._path.name, text.encode(), _MODE)
                self._identity = (status := self._path.lstat()).st_ino, status.st_mtime_ns
            self._written, self.problem = text, ""
        except OSError as problem:
            self.failures += 1
            self.problem = f"--web.file-sd {self._path}: {problem.strerror or problem}"
            _log.error("%s", self.problem)

    def remove(self) -> None:
        """Remove the file, unless another exporter has replaced it. Idempotent."""
        with contextlib.suppress(OSError):
            if ((status := self._path.lstat()).st_ino, status.st_mtime_ns) == self._identity:
                self._path.unlink()

    def _dialled(self, address: Address) -> Address:
        everywhere = ip_address(address.host.partition("%")[0]).is_unspecified
        return Address(self._host, address.port) if everywhere else address


def listened_on(bound: Iterable[socket.socket]) -> list[Address]:
    """Return the addresses that the TCP sockets among ``bound`` are bound to."""
    return [Address(*listener.getsockname()[:2]) for listener in bound if listener.family in {socket.AF_INET, socket.AF_INET6}]
