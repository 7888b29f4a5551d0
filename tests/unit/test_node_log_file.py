"""The exporter's log stays small."""

import logging
import os
from pathlib import Path

from torchobs.node import log_file


def record(message: str, *arguments: object, logger: str = "exporter") -> logging.LogRecord:
    """A record as a logger makes it."""
    return logging.LogRecord(logger, logging.WARNING, __file__, 1, message, arguments, None)


def test_a_line_comes_once_a_minute() -> None:
    """A file that is bad every second does not fill the log, and the next line says how often it was not mentioned."""
    now = 0.0
    once = log_file.OncePerMinute(60.0, lambda: now)
    passed = []
    for now in range(0, 130, 10):
        line = record("%s is bad", "r.flight")
        if once.filter(line):
            passed.append((now, line.getMessage()))
    assert passed == [
        (0, "r.flight is bad"),
        (60, "r.flight is bad [and 5 more like it]"),
        (120, "r.flight is bad [and 5 more like it]"),
    ]


def test_what_is_wrong_next_is_a_line_of_its_own() -> None:
    """Another error in the same words' frame within the minute is logged, up to a number that no file of hundreds exceeds."""
    now = 0.0
    once = log_file.OncePerMinute(60.0, lambda: now)
    assert [once.filter(record("%s", problem)) for problem in ("line 3: no such key", "line 4: no YAML")] == [True, True]
    assert sum(once.filter(record("%s is bad", f"r{number}.flight")) for number in range(500)) == log_file.BURST
    now = 61.0
    line = record("%s is bad", "r.flight")
    assert once.filter(line)
    assert line.getMessage() == "r.flight is bad [and 490 more like it]"


def test_good_news_are_never_held_back() -> None:
    """What is mended twice within a minute is said twice, and what breaks again after it, too; others stay as quiet."""
    once = log_file.OncePerMinute(60.0, lambda: 0.0)

    def passes(message: str, *, good_news: bool = False, logger: str = "exporter") -> bool:
        line = record("%s", message, logger=logger)
        line.good_news = good_news
        return once.filter(line)

    assert passes("broken")
    assert passes("other", logger="other")
    for _ in range(20):
        assert not passes("broken")
        assert passes("in force", good_news=True)
        assert passes("broken")
        assert not passes("other", logger="other")


def test_different_causes_do_not_silence_each_other() -> None:
    """Another message, or the same of another logger, is another cause."""
    once = log_file.OncePerMinute(60.0, lambda: 0.0)
    assert once.filter(record("one"))
    assert once.filter(record("two"))
    assert once.filter(record("one", logger="uvicorn"))
    assert not once.filter(record("one"))


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
    assert max(len(once._texts._states), len(once._messages._states)) <= 1000


def test_the_older_half_goes_when_the_log_is_too_long(tmp_path: Path) -> None:
    """Whole lines are left, the newest among them, and what is written next comes after them."""
    directory = os.open(tmp_path, os.O_RDONLY)
    file = log_file.open_log(directory)
    fd = file.number()
    for number in range(1000):
        os.write(fd, b"line %03d\n" % number)
    log_file.shorten(fd, limit=9000)
    assert os.fstat(fd).st_size == 9000
    log_file.shorten(fd, limit=1000)
    os.write(fd, b"next\n")
    lines = (tmp_path / log_file.NAME).read_text().splitlines()
    file.close()
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
