"""The exporter's log on standard error: one line per fact, as logfmt or JSON, at most one per cause and minute."""

from __future__ import annotations

import json
import logging
import re
import time

from torchobs.nodemode.log import OncePerMinute

FORMATS = ("logfmt", "json")
LEVELS = ("debug", "info", "warn", "error")
_PLAIN = re.compile(r"[^\s\"=\\\x00-\x1f\x7f]+")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}
_QUIET = ("uvicorn", "asyncio")


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
    handler = logging.StreamHandler()
    handler.addFilter(OncePerMinute())
    handler.setFormatter(Formatter(form))
    logging.basicConfig(level=_LEVELS[level], handlers=[handler], force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
