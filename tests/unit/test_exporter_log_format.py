"""The exporter's log: one line per fact, and a machine can read it."""

import json
import logging
import sys

import pytest

from torchobs.exporter import log_format


def record(message: str, *arguments: object, level: int = logging.WARNING) -> logging.LogRecord:
    """A record as a logger makes it."""
    made = logging.LogRecord("torchobs.ranks.scanner", level, __file__, 1, message, arguments, None)
    made.created, made.msecs = 1_700_000_000.25, 250
    return made


def test_a_line_of_logfmt() -> None:
    """Time in UTC, level, source, message; quoted where it has to be."""
    line = log_format.Formatter("logfmt").format(record("cannot listen on %s", ":80"))
    assert line == 'time=2023-11-14T22:13:20.250Z level=warn source=torchobs.ranks.scanner msg="cannot listen on :80"'
    assert (
        log_format.Formatter("logfmt")
        .format(record("ready", level=logging.INFO))
        .endswith("level=info source=torchobs.ranks.scanner msg=ready")
    )


@pytest.mark.parametrize("text", ['a"b', "a\nb level=error", "a=b", "\x1b[31m", ""])
def test_nothing_in_a_message_makes_a_second_line_or_field(text: str) -> None:
    """File names are whatever somebody chose."""
    line = log_format.Formatter("logfmt").format(record("%s", text))
    assert len(line.splitlines()) == 1
    assert line.endswith(f"msg={json.dumps(text)}")
    assert json.loads(log_format.Formatter("json").format(record("%s", text)))["msg"] == text


def test_json_has_the_trace_of_an_exception() -> None:
    """On the same line."""
    problem = record("a scan failed")
    try:
        int("why")
    except ValueError:
        problem.exc_info = sys.exc_info()
    assert "ValueError: invalid literal" in json.loads(log_format.Formatter("json").format(problem))["trace"]
    assert len(log_format.Formatter("logfmt").format(problem).splitlines()) == 1
