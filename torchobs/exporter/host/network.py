"""Network interfaces: bytes, errors, drops. Source: proc(5), /proc/net/dev."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torchobs import catalog
from torchobs.exporter.exporter_metrics import Sample
from torchobs.exporter.host.tree import Tree, bounded, count, is_physical, read

if TYPE_CHECKING:
    from collections.abc import Iterator

_FIELDS = 16
_TRANSMIT = 8
"""Of so many fields the second half begins here."""


class Interface(NamedTuple):
    """One interface. The pairs are for receiving and for transmitting."""

    name: str
    io: tuple[int, int]
    errors: tuple[int, int]
    dropped: tuple[int, int]


def parse(net_dev: str) -> list[Interface]:
    """Return what the text of /proc/net/dev says; lines that say nothing are left out."""
    found = []
    for line in net_dev.splitlines():
        name, _, numbers = line.rpartition(":")
        words = numbers.split()
        if len(words) == _FIELDS and name:
            try:
                fields = [count(word) for word in words]
            except ValueError:
                continue
            pairs = [(fields[index], fields[_TRANSMIT + index]) for index in (0, 2, 3)]
            found.append(Interface(name.strip(), *pairs))
    return found


def collect(tree: Tree) -> Iterator[Sample]:
    """Yield what there is to say of the physical interfaces. Raises one of ``tree.FAILS``."""
    interfaces = parse(_net_dev(tree))
    # a bond's or a bridge's traffic is that of its members; a pod has nothing but a virtual interface
    physical = [one for one in interfaces if is_physical(f"{tree.sysfs}/class/net/{one.name}")]
    for interface in bounded(physical or [one for one in interfaces if one.name != "lo"], "network interfaces"):
        for index, direction in enumerate(catalog.NETWORK_DIRECTION.values):
            own = {catalog.NETWORK_INTERFACE.name: interface.name, catalog.NETWORK_DIRECTION.name: direction}
            yield Sample(catalog.SYSTEM_NETWORK_IO, own, interface.io[index])
            yield Sample(catalog.SYSTEM_NETWORK_ERRORS, own, interface.errors[index])
            yield Sample(catalog.SYSTEM_NETWORK_DROPPED, own, interface.dropped[index])


def _net_dev(tree: Tree) -> str:
    """Return the interfaces of a mounted tree's first process: ``net`` itself is always the reader's own namespace."""
    if tree.procfs != Tree().procfs:
        try:
            return read(f"{tree.procfs}/1/net/dev")
        except OSError:
            pass
    return read(f"{tree.procfs}/net/dev")
