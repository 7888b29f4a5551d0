"""What is wrong with a request, as RFC 9457 has it: problem JSON whose ``detail`` says what to do."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

TYPES = "urn:torchobs:problem:"
MEDIA_TYPE = "application/problem+json"


class Problem(Exception):  # noqa: N818  # RFC 9457's word
    """A request that is refused: the HTTP status, a word for the kind of problem, and what to do about it."""

    def __init__(self, status: int, kind: str, detail: str, **headers: str) -> None:
        super().__init__(detail)
        self.status, self.kind, self.detail = status, kind, detail
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def content(self) -> dict[str, Any]:
        """Return the members of the problem object."""
        title = HTTPStatus(self.status).phrase
        return {"type": TYPES + self.kind, "title": title, "status": self.status, "detail": self.detail}


def bad(detail: str) -> Problem:
    """Return the problem of a parameter or a body that is not allowed."""
    return Problem(400, "bad-request", detail)
