"""Parse and check a request's parameters and body. Every error is a ``Problem`` that says what is allowed."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from torchobs.config.settings import PROBES
from torchobs.exporter.api.history import LONGEST_NAME
from torchobs.exporter.api.problems import Problem, bad
from torchobs.flight.files.control import LEVELS, MAX_PROFILE_STEPS

if TYPE_CHECKING:
    from collections.abc import Collection

    from starlette.requests import Request

    from torchobs.ranks.snapshot import Rank, Snapshot

RANK = r"[0-9]{1,9}(-g[0-9]{1,10})?(-[0-9a-f]{8})?|[0-9a-f]{32}"
"""Pattern of a rank's label, or of an incarnation."""

EVIDENCE = r"[0-9a-f]{16}"

DEFAULT_LENGTH = 100
MOST_BODY = 64 * 1024
_RANK, _EVIDENCE = re.compile(RANK), re.compile(EVIDENCE)


def only(request: Request, names: Collection[str] = ()) -> None:
    """Raise ``Problem`` for unknown query parameters, and for duplicate ones."""
    for name, _ in request.query_params.multi_items():
        if name not in names:
            raise bad(f"There is no query parameter {name[:64]!r} here; there is {', '.join(sorted(names)) or 'none'}.")
        if len(request.query_params.getlist(name)) > 1:
            raise bad(f"The query parameter {name} is given twice.")


def length(request: Request, name: str, most: int) -> int:
    """Return how much of a list is wanted, from 1 to ``most``, by a query parameter."""
    text = request.query_params.get(name)
    if text is None:
        return DEFAULT_LENGTH
    if not re.fullmatch(r"[0-9]{1,9}", text, re.ASCII) or not 1 <= int(text) <= most:
        raise bad(f"{name} is a whole number from 1 to {most}.")
    return int(text)


def kind(request: Request) -> str | None:
    """Return the event name to filter by, if given."""
    text = request.query_params.get("kind")
    if text is not None and not 1 <= len(text) <= LONGEST_NAME:
        raise bad(f"kind is an event's name, such as torchobs.anomaly, of 1 to {LONGEST_NAME} characters.")
    return text


def evidence_id(request: Request) -> str:
    """Return the artifact's id from the path."""
    text = str(request.path_params["id"])
    if not _EVIDENCE.fullmatch(text):
        raise Problem(404, "no-such-evidence", "The id of evidence is 16 hexadecimal digits: GET /api/v1/evidence lists them.")
    return text


def level(request: Request) -> int:
    """Return the level from the path, as an index."""
    text = str(request.path_params["level"])
    if text not in LEVELS:
        raise Problem(404, "no-such-level", f"The levels are {', '.join(LEVELS)}.")
    return LEVELS.index(text)


def ranks(snapshot: Snapshot, text: str | None) -> list[Rank]:
    """Return the ranks with that label or incarnation; all for ``None``."""
    if text is None:
        return list(snapshot.ranks)
    named = [rank for rank in snapshot.ranks if text in {rank.rank, rank.incarnation}] if _RANK.fullmatch(text) else []
    if not named:
        raise Problem(404, "no-such-rank", "There is no such rank: GET /api/v1/ranks lists those there are.")
    return named


def one_rank(snapshot: Snapshot, text: str | None) -> Rank:
    """Return the one rank with that label or incarnation; for ``None`` the only rank there is."""
    named = ranks(snapshot, text)
    if not named:
        raise Problem(404, "no-such-rank", "No rank has been seen yet.")
    if len(named) > 1:
        detail = "There are several: name one by its incarnation, of those that GET /api/v1/ranks lists."
        raise Problem(409, "ambiguous-rank", detail)
    return named[0]


def living(ranks: list[Rank]) -> list[Rank]:
    """Return the ranks that are alive."""
    up = [rank for rank in ranks if rank.up]
    if not up:
        raise Problem(409, "rank-ended", "The rank has ended, or no rank has been seen yet: there is nobody to tell.")
    return up


async def body(request: Request, required: Collection[str] = ()) -> dict[str, Any]:
    """Return the body, a JSON object with the ``required`` members and no others."""
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MOST_BODY:
            raise Problem(413, "too-large", f"The body may have {MOST_BODY} bytes.")
    try:
        content = json.loads(raw.decode(), parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise bad("The body is no JSON; where nothing is to be said it is {}.") from None
    if not isinstance(content, dict) or content.keys() != set(required):
        raise bad(f"The body is a JSON object with {', '.join(sorted(required)) or 'nothing in it'}.")
    return content


def steps(content: dict[str, Any]) -> int:
    """Return the number of steps to profile; 3.0 is an integer in JSON."""
    value = content["steps"]
    if type(value) not in {int, float} or not 1 <= value <= MAX_PROFILE_STEPS or value != int(value):
        raise bad(f"steps is a whole number from 1 to {MAX_PROFILE_STEPS}.")
    return int(value)


def _refuse(name: str) -> None:
    raise ValueError(name)  # NaN and Infinity are not JSON


def probes(content: dict[str, Any]) -> tuple[int, list[str]]:
    """Return the probes to switch off, as a bit mask and by name."""
    names = content["off"]
    if not isinstance(names, list) or any(not isinstance(name, str) or name not in PROBES for name in names):
        raise bad(f"off is a list of probes, which are {', '.join(PROBES)}.")
    off = [name for name in PROBES if name in names]
    return sum(1 << PROBES.index(name) for name in off), off
