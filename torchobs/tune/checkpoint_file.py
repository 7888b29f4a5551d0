"""Checkpoints that are complete or not there: written beside their place, then renamed."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch

from torchobs.support.torch_files import DAMAGE, damaged_entry

_COUNTS = frozenset({"step", "epoch", "batches", "total_steps", "counts_steps", "losses"})


def save(state: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a state to a file. Whenever the process or the machine dies, the old file or the new one is there, whole.

    The file has the permissions of any that this process writes; a link stays, and its target is replaced. The new file is
    written beside the old one, always under the same name: the next save overwrites the rest that a kill left.

    Raises:
        OSError: the folder is missing, or has no room; the old file is untouched.
    """
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            with _own_errors():
                torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # there only after an error
    _sync_folder(path.parent)


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise the disk's error, Ctrl-C or an exit: torch hides them behind a complaint about its incomplete archive."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, (OSError, KeyboardInterrupt, SystemExit)):
            raise error.__context__ from error
        raise


def check_place(path: str | os.PathLike[str]) -> None:
    """Raise OSError if a checkpoint cannot be written there: its folder is missing, or it is a folder itself."""
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} for the checkpoint {path.name}")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: a checkpoint is a file")


def load(path: str | os.PathLike[str], device: torch.device) -> Any:
    """Read a file of :func:`save`, without running any code in it.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no file of ``torch.save``, or damaged.
    """
    with Path(path).open("rb") as file:
        try:
            _check_sums(file)
            return torch.load(file, map_location="cpu" if device.type == "cpu" else None, weights_only=True)
        except torch.OutOfMemoryError:
            raise
        except (*DAMAGE, OSError, pickle.UnpicklingError) as error:
            raise ValueError(f"{path} is no checkpoint, or damaged") from error  # torch's words advise to load it all the same


def _check_sums(file: IO[bytes]) -> None:
    """Raise BadZipFile for a record with a wrong checksum: torch reads records without comparing it."""
    if zipfile.is_zipfile(file):  # else it has torch's former format, or is no file of torch
        with zipfile.ZipFile(file) as archive:
            if (record := damaged_entry(archive)) is not None:
                raise zipfile.BadZipFile(f"the checksum of its record {record} is another")
    file.seek(0)


def check(state: Any, parts: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Return if a file's content can be loaded into these parts of a pipeline; load nothing.

    Raises:
        ValueError: it is no checkpoint, or one of another model, other parts or another optimizer.
    """
    if not isinstance(state, Mapping) or "counts" not in state:
        raise ValueError(f"{path} is no checkpoint of tune.pipeline(): of weights alone, load_state_dict() takes them")
    missing = [name for name in parts if name not in state]
    counts = state["counts"]
    if missing or not isinstance(counts, Mapping) or not counts.keys() >= _COUNTS:
        raise ValueError(f"{path} is no whole checkpoint of tune.pipeline(): it lacks {', '.join(missing) or 'counts'}")
    if _shapes(state["model"]) != _shapes(parts["model"].state_dict()):
        raise ValueError(f"{path} is of another model: its parameters have other names or shapes")
    saved, current = (state_dict["param_groups"] for state_dict in (state["optimizer"], parts["optimizer"].state_dict()))
    if [(set(group), len(group["params"])) for group in saved] != [(set(group), len(group["params"])) for group in current]:
        name = type(parts["optimizer"]).__name__
        raise ValueError(f"{path} was saved with another optimizer than {name}, or with one of other parameters")


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.shape if isinstance(value, torch.Tensor) else None for name, value in state.items()}


def _sync_folder(folder: Path) -> None:
    """Make the rename durable, if the system can (Windows cannot open a folder)."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
