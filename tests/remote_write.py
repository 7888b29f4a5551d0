"""History for a Prometheus within seconds: series written by remote write (version 1), the newest sample up to now."""

from __future__ import annotations

import http.client
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

FLAG = "--web.enable-remote-write-receiver"
"""What Prometheus must be started with."""
STALE: float = np.array([0x7FF0000000000002], np.uint64).view(np.float64)[0]
"""The value that ends a series at once, as Prometheus itself writes it when a target is no more"""
BATCH = 4 << 20
"""Bytes of a request"""

_STALE_BITS = np.uint64(0x7FF0000000000002)
_SAMPLE = np.dtype([("head", "u1", 3), ("value", "<f8"), ("tag", "u1"), ("time", "u1", 6)])
"""A sample's 16 bytes with tag and length before them. A time in milliseconds has a varint of six bytes until the year 2109."""


def write(address: str, series: Iterable[tuple[Mapping[str, str], np.ndarray[Any, Any], np.ndarray[Any, Any]]]) -> int:
    """Write series (labels, Unix times in seconds, values), those of one series in order of time; return the number of samples.

    Raises:
        RuntimeError: Prometheus refused it; the message holds what it said.
    """
    connection = http.client.HTTPConnection(address, timeout=60)
    headers = {
        "Content-Encoding": "snappy",
        "Content-Type": "application/x-protobuf",
        "X-Prometheus-Remote-Write-Version": "0.1.0",
    }
    samples = 0
    for body, number in _requests(series):
        connection.request("POST", "/api/v1/write", _snappy(body), headers)
        answer = connection.getresponse()
        said = answer.read()
        if answer.status >= 300:
            raise RuntimeError(f"{answer.status}: {said.decode(errors='replace')}")
        samples += number
    connection.close()
    return samples


def _requests(series: Iterable[tuple[Mapping[str, str], Any, Any]]) -> Iterator[tuple[bytes, int]]:
    body, samples = bytearray(), 0
    for labels, times, given in series:
        values = np.ascontiguousarray(given, np.float64)
        there = np.isfinite(values) | (values.view(np.uint64) == _STALE_BITS)
        if not there.any():
            continue
        message = _labels(labels) + _samples(times[there], values[there])
        body += b"\x0a" + _varint(len(message)) + message
        samples += int(there.sum())
        if len(body) > BATCH:
            yield bytes(body), samples
            body, samples = bytearray(), 0
    if body:
        yield bytes(body), samples


def _labels(labels: Mapping[str, str]) -> bytes:
    message = bytearray()
    for pair in sorted(labels.items()):
        label = b"".join(
            tag + _varint(len(text)) + text for tag, text in zip((b"\x0a", b"\x12"), map(str.encode, pair), strict=True)
        )
        message += b"\x0a" + _varint(len(label)) + label
    return bytes(message)


def _samples(times: Any, values: Any) -> bytes:
    rows = np.zeros(len(values), _SAMPLE)
    rows["head"], rows["tag"], rows["value"] = (0x12, 16, 0x09), 0x10, values
    milliseconds = np.round(times * 1000).astype(np.uint64)
    for index in range(6):
        rows["time"][:, index] = (milliseconds >> np.uint64(7 * index)) & np.uint64(0x7F) | np.uint64(0x80 if index < 5 else 0)
    return rows.tobytes()


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*found, number))


def _snappy(data: bytes) -> bytes:
    """Return a block of one literal: valid, and not compressed."""
    return _varint(len(data)) + b"\xfc" + (len(data) - 1).to_bytes(4, "little") + data
