"""InfiniBand, RoCE and EFA ports: state, rate, bytes, errors, congestion.

Source: the kernel's Documentation/ABI/stable/sysfs-class-infiniband. ``counters`` are the port's own (the PortCounters of the
InfiniBand Architecture, volume 1), ``hw_counters`` the driver's, here by mlx5's names; a driver that lacks some shows others.
Each read asks the adapter's firmware, which can take its time: nothing of this runs where somebody waits.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.exporter.exporter_metrics import Sample
from torchobs.exporter.host.tree import bounded, names_in, number_in, read

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchobs.exporter.host.tree import Tree

_WORD = 4
"""``port_xmit_data`` and ``port_rcv_data`` count words of so many bytes."""
_MOST = 1 << 63
_STATE = re.compile(r"([1-5]): ", re.ASCII)
_RATE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?) Gb/sec", re.ASCII)
_IO = {"receive": ("port_rcv_data", "rx_bytes"), "transmit": ("port_xmit_data", "tx_bytes")}
_ERRORS = {
    "symbol": "counters/symbol_error",
    "link_recovery": "counters/link_error_recovery",
    "link_downed": "counters/link_downed",
    "link_integrity": "counters/local_link_integrity_errors",
    "receive": "counters/port_rcv_errors",
    "remote_physical": "counters/port_rcv_remote_physical_errors",
    "transmit_discard": "counters/port_xmit_discards",
    "buffer_overrun": "counters/excessive_buffer_overrun_errors",
    "out_of_sequence": "hw_counters/out_of_sequence",
    "packet_sequence": "hw_counters/packet_seq_err",
    "ack_timeout": "hw_counters/local_ack_timeout_err",
    "rnr_retry": "hw_counters/rnr_nak_retry_err",
    "retries_exceeded": "hw_counters/req_transport_retries_exceeded",
    "out_of_buffer": "hw_counters/out_of_buffer",
    "icrc": "hw_counters/rx_icrc_encapsulated",
}
_CONGESTION = {
    "ecn_marked": "hw_counters/np_ecn_marked_roce_packets",
    "cnp_sent": "hw_counters/np_cnp_sent",
    "cnp_handled": "hw_counters/rp_cnp_handled",
}


def state(text: str) -> str | None:
    """Return one of ``catalog.INFINIBAND_STATES`` for a port's ``state``, such as ``4: ACTIVE``; ``None`` for others."""
    found = _STATE.match(text)
    return catalog.INFINIBAND_STATES[int(found[1]) - 1] if found else None


def rate(text: str) -> float | None:
    """Return bytes per second for a port's ``rate``, such as ``400 Gb/sec (4X NDR)``; ``None`` for others."""
    found = _RATE.match(text)
    return float(found[1]) * 1e9 / 8 if found else None


def collect(tree: Tree) -> Iterator[Sample]:
    """Yield what there is to say of every port; nothing where there is none. Raises one of ``tree.FAILS``."""
    devices = f"{tree.sysfs}/class/infiniband"
    ports = [(device, port) for device in names_in(devices) for port in names_in(f"{devices}/{device}/ports")]
    for device, port in bounded(ports, "InfiniBand ports"):
        own = {catalog.INFINIBAND_DEVICE.name: device, catalog.INFINIBAND_PORT.name: port}
        yield from _port(f"{devices}/{device}/ports/{port}", own)


def _port(path: str, own: dict[str, str]) -> Iterator[Sample]:
    yield from _link(path, own)
    for direction, (words, plain) in _IO.items():
        if (number := _bytes(path, words, plain)) is not None:
            yield Sample(catalog.HOST_INFINIBAND_IO, {**own, catalog.NETWORK_DIRECTION.name: direction}, number)
    if (waited := number_in(f"{path}/counters/port_xmit_wait")) is not None:
        yield Sample(catalog.HOST_INFINIBAND_WAIT, own, waited)
    for kind, file in _ERRORS.items():
        if (number := number_in(f"{path}/{file}")) is not None:
            yield Sample(catalog.HOST_INFINIBAND_ERRORS, {**own, catalog.INFINIBAND_ERROR.name: kind}, number)
    for kind, file in _CONGESTION.items():
        if (number := number_in(f"{path}/{file}")) is not None:
            yield Sample(catalog.HOST_INFINIBAND_CONGESTION, {**own, catalog.INFINIBAND_CONGESTION.name: kind}, number)


def _link(path: str, own: dict[str, str]) -> Iterator[Sample]:
    if (now := state(_text(f"{path}/state"))) is not None:
        for known in catalog.INFINIBAND_STATES:
            yield Sample(catalog.HOST_INFINIBAND_STATE, {**own, catalog.INFINIBAND_STATE.name: known}, float(known == now))
    if (speed := rate(_text(f"{path}/rate"))) is not None:
        yield Sample(catalog.HOST_INFINIBAND_RATE, own, speed)


def _bytes(path: str, words: str, plain: str) -> int | None:
    counted = number_in(f"{path}/counters/{words}")
    if counted is None:
        return number_in(f"{path}/hw_counters/{plain}")  # EFA, which has no port counters
    return counted * _WORD if counted * _WORD < _MOST else None


def _text(path: str) -> str:
    try:
        return read(path)
    except OSError:
        return ""  # the device may have gone since it was listed
