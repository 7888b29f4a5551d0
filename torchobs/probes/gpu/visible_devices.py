"""GPUs that this process may use according to ``CUDA_VISIBLE_DEVICES``, parsed as the CUDA driver does."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_ORDINAL = re.compile(r"\s*([+-]?\d+)")


class Board(NamedTuple):
    """UUIDs of a physical GPU and of its MIG instances. In MIG mode only an instance is usable."""

    uuid: str
    instances: tuple[str, ...] = ()
    mig: bool = False


def visible(variable: str | None, boards: Sequence[Board]) -> list[str]:
    """Return the UUIDs of the devices that CUDA would list, in its order.

    Ordinals are NVML's, which equal CUDA's if all GPUs are alike or CUDA_DEVICE_ORDER is PCI_BUS_ID. The list ends at the first
    invalid name, and a duplicate makes it empty, as in CUDA (CUDA C++ Programming Guide, "CUDA Environment Variables").
    """
    found: list[str] = []
    for uuid in _named(variable, boards):
        if uuid in found:
            return []
        found.append(uuid)
    return found


def _named(variable: str | None, boards: Sequence[Board]) -> Iterator[str]:
    if variable is None:
        yield from (uuid for board in boards if (uuid := _usable(board)) is not None)
        return
    for name in variable.split(","):
        uuid = _by_uuid(name.strip(), boards) if "-" in name[1:] else _by_ordinal(name, boards)
        if uuid is None:
            return
        yield uuid


def _usable(board: Board) -> str | None:
    if not board.mig:
        return board.uuid
    return board.instances[0] if board.instances else None


def _by_ordinal(name: str, boards: Sequence[Board]) -> str | None:
    number = _ORDINAL.match(name)  # `2GB` is 2, as for strtol
    index = int(number[1]) if number else -1
    return _usable(boards[index]) if 0 <= index < len(boards) else None


def _by_uuid(name: str, boards: Sequence[Board]) -> str | None:
    """Return the only device with this UUID prefix; an instance's old name is ``MIG-<GPU's UUID>/<GI>/<CI>``."""
    known = {uuid: uuid for board in boards for uuid in board.instances}
    known |= {board.uuid: usable for board in boards if (usable := _usable(board)) is not None}
    matches = {device for uuid, device in known.items() if uuid.startswith(name)}
    return matches.pop() if len(matches) == 1 else None
