"""Basic authentication with bcrypt hashes. Their comparison is slow: it runs off the event loop, and results are cached."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import os
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import bcrypt

if TYPE_CHECKING:
    from collections.abc import Mapping

_REMEMBERED = 100
_WAITING = 16
"""Most comparisons in the queue: at 50 ms each (cost 10) the last one waits for a second."""
_LONGEST = 4096
_BCRYPT_BYTES = 72
"""Longest password of bcrypt; Go's and Apache's implementations truncate longer ones, Python's raises."""
_NOBODY = "$2b$10$NDTPvuJp.Y6.k7P5xOPl9uHMGmHin0gthQKVMWozjAxUPresC9eq2"
"""A hash for unknown users, so that the time of a refusal does not reveal whether a user exists."""


class BusyError(Exception):
    """The queue of password comparisons is full."""


class Passwords:
    """Checks passwords, one at a time. To be used in one event loop.

    Results are cached by a hash of user, bcrypt hash and password, keyed with a random key of this process, so that no password
    stays in memory. Accepted and refused ones have separate caches, so that guessing does not evict a scraper's entry.
    """

    def __init__(self) -> None:
        self._key = os.urandom(32)
        self._accepted: OrderedDict[bytes, None] = OrderedDict()
        self._refused: OrderedDict[bytes, None] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "bcrypt")
        self._waiting = 0
        self.compared = 0
        """number of bcrypt comparisons"""

    async def allowed(self, header: str | None, users: Mapping[str, str]) -> bool:
        """Return True if an ``Authorization`` header has a valid user and password. Raises :class:`BusyError`."""
        given = _credentials(header)
        if given is None:
            return False
        user, password = given
        hashed = users.get(user)
        key = self._digest(user.encode(), (hashed or _NOBODY).encode(), password)
        known = key in self._accepted
        if not known and key not in self._refused:
            known = await self._compare(password, hashed or _NOBODY) and hashed is not None
            self._remember(self._accepted if known else self._refused, key)
        return known

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _compare(self, password: bytes, hashed: str) -> bool:
        if self._waiting >= _WAITING:
            raise BusyError
        self._waiting += 1
        self.compared += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, bcrypt.checkpw, password[:_BCRYPT_BYTES], hashed.encode())
        finally:
            self._waiting -= 1

    def _digest(self, *parts: bytes) -> bytes:
        mac = hmac.new(self._key, digestmod=hashlib.sha256)
        for part in parts:
            mac.update(len(part).to_bytes(8, "big") + part)
        return mac.digest()

    def _remember(self, known: OrderedDict[bytes, None], key: bytes) -> None:
        known[key] = None
        while len(known) > _REMEMBERED:
            known.popitem(last=False)


def _credentials(header: str | None) -> tuple[str, bytes] | None:
    """Return the user and password of an ``Authorization`` header (RFC 7617), or ``None``."""
    scheme, _, encoded = (header or "").partition(" ")
    if scheme.lower() != "basic" or len(encoded) > _LONGEST:
        return None
    try:
        user, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        return (user.decode(), password) if colon and b"\0" not in password else None
    except (binascii.Error, ValueError):
        return None
