"""The exporter's log on standard error: one line per fact, as logfmt or JSON, at most one per cause and minute."""

from __future__ import annotations

import json
import logging
import re
import time
from typing import TextIO

from torchobs.node.log_file import OncePerMinute

FORMATS = ("logfmt", "json")
LEVELS = ("debug", "info", "warn", "error")
_PLAIN = re.compile(r"[^\s\"=\\\x00-\x1f\x7f]+")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}
_QUIET = ("uvicorn", "asyncio", "urllib3")


class Handler(logging.StreamHandler[TextIO]):
    """Writes to standard error; counts the lines that it could not write, on a full disk or into a pipe that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = 0

    def handleError(self, _: logging.LogRecord) -> None:  # noqa: N802  # logging's own name
        """See :class:`logging.Handler`. Nothing is said: this is how it is said."""
        self.lost += 1


class Formatter(logging.Formatter):
    """Prometheus' own log lines: time, level, where it comes from, what it is."""

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
    """Send everything from ``level`` on to standard error; of the libraries only what is wrong."""
    handler = Handler()
    handler.addFilter(OncePerMinute())
    handler.setFormatter(Formatter(form))
    logging.basicConfig(level=_LEVELS[level], handlers=[handler], force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


def lost() -> int:
    """Return how many lines could not be written."""
    return sum(handler.lost for handler in logging.getLogger().handlers if isinstance(handler, Handler))
