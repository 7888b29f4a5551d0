"""What is read of a data loader's workers: from /proc."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support import wait_until
from torchobs.probes.data.worker_states import in_words, parse_state, state_of


@pytest.mark.parametrize(
    ("stat", "state"),
    [
        ("12 (python) S 1 12 12", "sleeping"),
        ("12 (a) R) D 1 12", "in uninterruptible sleep"),
        ("12 (python) ? 1", ""),
        ("", ""),
        ("12 (python)", ""),
    ],
)
def test_a_state_is_the_field_after_the_name(stat: str, state: str) -> None:
    """A program's name may hold parentheses and spaces."""
    assert parse_state(stat) == state


def test_a_state_in_words_has_what_could_be_read() -> None:
    """A wait channel that may not be read is 0."""
    assert in_words("sleeping", "futex_do_wait") == "sleeping in futex_do_wait"
    assert in_words("sleeping", "0") == in_words("sleeping", "") == "sleeping"
    assert in_words("running", "futex_do_wait") == "running"
    assert in_words("", "") == "unknown"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_process_that_waits_is_sleeping() -> None:
    """This machine's own kernel says so; of a process that is gone nothing is known."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as waiting:
        assert wait_until(lambda: state_of(waiting.pid).startswith("sleeping"))
    assert state_of(waiting.pid) == "unknown"
    assert state_of(os.getpid()) == "running"
