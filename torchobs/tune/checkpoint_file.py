"""Checkpoints that are complete or not there: written beside their place, then renamed."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch

_DAMAGE = (
    RuntimeError,
    OSError,
    EOFError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    AssertionError,
    struct.error,
    pickle.UnpicklingError,
)
"""What torch.load raises for a damaged file"""


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


def check_place(path: str | os.PathLike[str]) -> None:
    """Raise OSError where a checkpoint cannot be written to, since its folder is missing or it is a folder itself."""
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} for the checkpoint {path.name}")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: a checkpoint is a file")


def load(path: str | os.PathLike[str], device: torch.device) -> Any:
    """Read what :func:`save` wrote, without running any code of the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no file of ``torch.save``, or damaged.
    """
    with Path(path).open("rb") as file:
        try:
            return torch.load(file, map_location="cpu" if device.type == "cpu" else None, weights_only=True)
        except torch.OutOfMemoryError:
            raise
        except _DAMAGE as error:
            raise ValueError(f"{path} is no checkpoint, or damaged: {str(error).partition(chr(10))[0]}") from error


def check(state: Any, parts: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Return if a file's content can be loaded into these parts of a pipeline; nothing is loaded yet.

    Raises:
        ValueError: it is of something else, of a pipeline with other parts, or with another optimizer.
    """
    if not isinstance(state, Mapping) or "counts" not in state:
        raise ValueError(f"{path} is no checkpoint of tune.pipeline(): of weights alone, load_state_dict() takes them")
    if ("ema" in state) != ("ema" in parts):
        raise ValueError(f"{path} was saved with{'' if 'ema' in state else 'out'} ema_decay: resume it likewise")
    saved, own = (
        [set(group) for group in each["param_groups"]] for each in (state["optimizer"], parts["optimizer"].state_dict())
    )
    if saved != own:
        raise ValueError(f"{path} was saved with another optimizer than {type(parts['optimizer']).__name__}")


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable, where the system can (Windows cannot open a folder)."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
