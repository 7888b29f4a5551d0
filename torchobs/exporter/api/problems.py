"""Errors of requests as problem JSON (RFC 9457); ``detail`` says what to do."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

TYPES = "urn:torchobs:problem:"
MEDIA_TYPE = "application/problem+json"


class Problem(Exception):  # noqa: N818  # RFC 9457's word
    """A refused request: the HTTP status, the kind of problem, and what to do about it."""

    def __init__(self, status: int, kind: str, detail: str, **headers: str) -> None:
        super().__init__(detail)
        self.status, self.kind, self.detail = status, kind, detail
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def content(self) -> dict[str, Any]:
        """Return the members of the problem object."""
        title = HTTPStatus(self.status).phrase
        return {"type": TYPES + self.kind, "title": title, "status": self.status, "detail": self.detail}


def bad(detail: str) -> Problem:
    """Return the problem for an invalid parameter or body."""
    return Problem(400, "bad-request", detail)
