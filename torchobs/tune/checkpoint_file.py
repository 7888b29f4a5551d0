"""Checkpoints that are complete or not there: written beside their place, then renamed."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch


def save(state: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a state to a file. Whenever the process or the machine dies, the old file or the new one is there, whole.

    Raises:
        OSError: the folder is missing, or has no room; an old file is untouched.
    """
    path = Path(path)
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp", delete=False) as file:
        temporary = Path(file.name)
        try:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)  # it is renamed by then, but for an error
    _sync_folder(path.parent)


def load(path: str | os.PathLike[str], device: torch.device) -> dict[str, Any]:
    """Read what :func:`save` wrote, without running any code of the file."""
    state: dict[str, Any] = torch.load(path, map_location="cpu" if device.type == "cpu" else None, weights_only=True)
    return state


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable, where the system can (Windows cannot open a folder)."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
