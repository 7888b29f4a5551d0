"""Checkpoints that are complete or not there: written beside their place, then renamed."""

from __future__ import annotations

import errno
import os
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import IO, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchobs.support.torch_files import DAMAGE

_COUNTS = frozenset({"step", "epoch", "batches", "total_steps", "counts_steps"})


def save(state: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a state to a file. Whenever the process or the machine dies, the old file or the new one is there, whole.

    The file is as readable as any that this process writes; of a link, what it leads to is replaced. What a process that was
    killed while it saved has left beside it is removed.

    Raises:
        OSError: the folder is missing, or has no room; an old file is untouched.
    """
    path = Path(os.path.realpath(path))
    _remove_left(path)
    with _locked(path) as (file, temporary):
        try:
            with _checksums(), _own_errors():
                torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)  # it is renamed by then, but for an error
    _sync_folder(path.parent)


@contextmanager
def _checksums() -> Iterator[None]:
    """Have torch write the checksums that :func:`load` compares, also where the process has switched them off."""
    try:
        from torch.serialization import get_crc32_options, set_crc32_options
    except ImportError:  # before torch 2.6, which always writes them
        yield
        return
    before = get_crc32_options()
    set_crc32_options(compute_crc32=True)
    try:
        yield
    finally:
        set_crc32_options(before)


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise what writing raised: torch covers that up by a complaint of its archive, which it cannot end then."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


@contextmanager
def _locked(path: Path) -> Iterator[tuple[IO[bytes], Path]]:
    """Yield a new file beside a place, which is locked for as long as this process writes it."""
    while True:
        temporary = path.with_name(f".{path.name}.{token_hex(4)}.tmp")
        with temporary.open("xb") as file:
            with suppress(OSError):  # a file system without locks
                _lock(file.fileno())
            if temporary.exists():  # nobody has taken it for left before it was locked
                yield file, temporary
                return


def _remove_left(path: Path) -> None:
    """Remove what nobody writes any more: whoever does, holds a lock, which ends with the process."""
    with suppress(OSError):
        for left in path.parent.iterdir():
            if left.name.startswith(f".{path.name}.") and left.name.endswith(".tmp"):
                with suppress(OSError), left.open("rb") as file:
                    _lock(file.fileno())
                    left.unlink()


def _lock(descriptor: int) -> None:
    """Raise ``OSError`` if another process has locked the file, or nobody can here."""
    try:
        import fcntl
    except ImportError as error:  # Windows
        raise OSError(errno.ENOLCK, "no locks here") from error
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


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
            _check_sums(file)
            return torch.load(file, map_location="cpu" if device.type == "cpu" else None, weights_only=True)
        except torch.OutOfMemoryError:
            raise
        except (*DAMAGE, OSError, pickle.UnpicklingError) as error:
            raise ValueError(f"{path} is no checkpoint, or damaged: {str(error).partition(chr(10))[0]}") from error


def _check_sums(file: IO[bytes]) -> None:
    """Raise BadZipFile where a record is not what was written, by its checksum: torch reads records without comparing it."""
    if zipfile.is_zipfile(file):  # or else it is of torch's former format, or no file of torch's
        with zipfile.ZipFile(file) as archive:
            if (record := archive.testzip()) is not None:
                raise zipfile.BadZipFile(f"the checksum of its record {record} is another")
    file.seek(0)


def check(state: Any, parts: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Return if a file's content can be loaded into these parts of a pipeline; nothing is loaded yet.

    Raises:
        ValueError: it is of something else, of a pipeline with other parts, or with another optimizer or scheduler.
    """
    if not isinstance(state, Mapping) or "counts" not in state:
        raise ValueError(f"{path} is no checkpoint of tune.pipeline(): of weights alone, load_state_dict() takes them")
    missing = [name for name in (*parts, "loss_sum") if name not in state]
    counts = state["counts"]
    if missing or not isinstance(counts, Mapping) or not counts.keys() >= _COUNTS:
        raise ValueError(f"{path} is no whole checkpoint of tune.pipeline(): it lacks {', '.join(missing) or 'counts'}")
    own_scheduler = parts["scheduler"]
    if ("num_bad_epochs" in state["scheduler"]) != ("num_bad_epochs" in own_scheduler.state_dict()):  # a plateau's
        raise ValueError(f"{path} was saved with another scheduler than {type(own_scheduler).__name__}")
    saved, own = (each["param_groups"] for each in (state["optimizer"], parts["optimizer"].state_dict()))
    if [set(group) for group in saved] != [set(group) for group in own]:
        raise ValueError(f"{path} was saved with another optimizer than {type(parts['optimizer']).__name__}")
    if [len(group["params"]) for group in saved] != [len(group["params"]) for group in own]:
        raise ValueError(f"{path} is of a model with another number of parameters")


def load_state(part: Any, state: dict[str, Any]) -> None:
    """Give a part its state.

    Raises:
        RuntimeError: it is of another module, which is as it was, as it is after whatever a module raises for such a state.
    """
    kept = _before_other(part, state) if isinstance(part, nn.Module) else []
    try:
        part.load_state_dict(state)
    except BaseException:  # by then torch has loaded all that fits
        for tensor, before in kept:
            tensor.copy_(before)
        raise


def _before_other(module: nn.Module, state: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a module's tensors, each with a copy, where a state looks like another module's; else nothing."""
    whole = module.state_dict()
    names, own = whole.keys(), {name: x for name, x in whole.items() if isinstance(x, torch.Tensor) and not is_lazy(x)}
    others = {name: x.shape for name, x in state.items() if isinstance(x, torch.Tensor)}
    is_alike = names == state.keys() and {name: x.shape for name, x in own.items()} == others
    return [] if is_alike else [(x, x.clone()) for x in own.values()]


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable, where the system can (Windows cannot open a folder)."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
