"""The exporter's log stays small."""

import logging
import os
from pathlib import Path

from torchobs.node import log_file


def record(message: str, *arguments: object, logger: str = "exporter") -> logging.LogRecord:
    """A record as a logger makes it."""
    return logging.LogRecord(logger, logging.WARNING, __file__, 1, message, arguments, None)


def test_one_line_per_cause_and_minute() -> None:
    """A file that is bad every second does not fill the log, and the next line says how often it was not mentioned."""
    now = 0.0
    once = log_file.OncePerMinute(60.0, lambda: now)
    passed = []
    for now in range(0, 130, 10):
        line = record("%s is bad", f"r{now}.flight")
        if once.filter(line):
            passed.append((now, line.getMessage()))
    assert passed == [
        (0, "r0.flight is bad"),
        (60, "r60.flight is bad [and 5 more like it]"),
        (120, "r120.flight is bad [and 5 more like it]"),
    ]


def test_different_causes_do_not_silence_each_other() -> None:
    """Another message, or the same of another logger, is another cause."""
    once = log_file.OncePerMinute(60.0, lambda: 0.0)
    assert once.filter(record("one"))
    assert once.filter(record("two"))
    assert once.filter(record("one", logger="uvicorn"))
    assert not once.filter(record("one"))


def test_a_record_may_say_its_cause() -> None:
    """What is true of two addresses is two lines, and each of them comes once."""
    once = log_file.OncePerMinute(60.0, lambda: 0.0)

    def passes(address: str) -> bool:
        line = record("listening on %s", address)
        line.cause = address
        return once.filter(line)

    assert [passes(address) for address in (":1", ":2", ":1", ":2")] == [True, True, False, False]


def test_a_line_with_what_was_left_out_keeps_its_arguments() -> None:
    """The count is added to a message that may hold a percent sign of its own."""
    now = 0.0
    once = log_file.OncePerMinute(60.0, lambda: now)
    assert [once.filter(record("full: 100%")) for _ in range(3)] == [True, False, False]
    now = 61.0
    line = record("full: 100%")
    assert once.filter(line)
    assert line.getMessage() == "full: 100% [and 2 more like it]"


def test_causes_without_number_take_no_memory_without_limit() -> None:
    """Messages that are formatted beforehand each look like a cause of their own."""
    once = log_file.OncePerMinute(60.0, lambda: 0.0)
    for number in range(5000):
        once.filter(record(f"line {number}"))
    assert len(once._limiter._states) <= 1000


def test_the_older_half_goes_when_the_log_is_too_long(tmp_path: Path) -> None:
    """Whole lines are left, the newest among them, and what is written next comes after them."""
    directory = os.open(tmp_path, os.O_RDONLY)
    fd = log_file.open_log(directory)
    for number in range(1000):
        os.write(fd, b"line %03d\n" % number)
    log_file.shorten(fd, limit=9000)
    assert os.fstat(fd).st_size == 9000
    log_file.shorten(fd, limit=1000)
    os.write(fd, b"next\n")
    lines = (tmp_path / log_file.NAME).read_text().splitlines()
    os.close(fd)
    os.close(directory)
    assert lines == [*(f"line {number}" for number in range(945, 1000)), "next"]


def test_a_log_that_is_no_file_is_left_alone() -> None:
    """Started by hand, the exporter writes to a terminal or a pipe."""
    read_end, write_end = os.pipe()
    os.write(write_end, b"x" * 100)
    log_file.shorten(write_end, limit=10)
    assert os.read(read_end, 200) == b"x" * 100
    os.close(read_end)
    os.close(write_end)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """Whoever could plant one in the directory would have us append to any file of this user."""
    (tmp_path / log_file.NAME).symlink_to(tmp_path / "target")
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        log_file.open_log(directory)
    except OSError:
        assert not (tmp_path / "target").exists()
    else:
        raise AssertionError
    finally:
        os.close(directory)
