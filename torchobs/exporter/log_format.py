"""Logging of the exporter to standard error, as logfmt or JSON lines, each line at most once a minute."""

from __future__ import annotations

import json
import logging
import re
import time
from typing import TextIO

from torchobs.node.lifetime import OncePerMinute

FORMATS = ("logfmt", "json")
_PLAIN = re.compile(r"[^\s\"=\\\x00-\x1f\x7f]+")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}
LEVELS = tuple(_LEVELS)
_QUIET = ("uvicorn", "asyncio", "urllib3")


class Handler(logging.StreamHandler[TextIO]):
    """Writes to standard error, and counts the lines that could not be written (full disk, closed pipe)."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = 0

    def handleError(self, _: logging.LogRecord) -> None:  # noqa: N802  # logging's own name
        """See :class:`logging.Handler`. Only counts: there is nowhere else to report it."""
        self.lost += 1


class Formatter(logging.Formatter):
    """Formats lines as Prometheus does: time, level, source, message."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self._json = form == "json"

    def format(self, record: logging.LogRecord) -> str:
        """See :class:`logging.Formatter`."""
        fields = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": next((name for name, level in reversed(_LEVELS.items()) if record.levelno >= level), "debug"),
            "source": record.name,
            "msg": record.getMessage(),
        }
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        if self._json:
            return json.dumps(fields)
        return " ".join(f"{key}={value if _PLAIN.fullmatch(value) else json.dumps(value)}" for key, value in fields.items())


def configure(level: str, form: str) -> None:
    """Log everything from ``level`` on to standard error; of libraries only warnings and errors."""
    handler = Handler()
    handler.addFilter(OncePerMinute())
    handler.setFormatter(Formatter(form))
    logging.basicConfig(level=_LEVELS[level], handlers=[handler], force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


def lost() -> int:
    """Return the number of lines that could not be written."""
    return sum(handler.lost for handler in logging.getLogger().handlers if isinstance(handler, Handler))
