"""What is read of a data loader's workers: from /proc."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support import wait_until
from torchobs.probes.data.worker_states import in_words, parse_call, parse_channel, parse_state, state_of


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


@pytest.mark.parametrize(
    ("syscall", "machine", "call"),
    [
        ("202 0x7f 0x80 0x0 0x0", "x86_64", ("futex", 0x7F)),
        ("98 0x7f 0x80 0x0 0x0", "aarch64", ("futex", 0x7F)),
        ("0 0x5 0x7ffc 0x1000", "x86_64", ("read", 5)),
        ("999 0x5", "x86_64", ("999", 5)),
        ("202 0x7f", "riscv64", ("202", 0x7F)),
        ("running", "x86_64", ("", 0)),
        ("-1 0x7ffc 0x7f", "x86_64", ("", 0)),
        ("202 what", "x86_64", ("", 0)),
        ("", "x86_64", ("", 0)),
    ],
)
def test_a_system_call_is_named_where_it_is_known(syscall: str, machine: str, call: tuple[str, int]) -> None:
    """By number otherwise; empty while it runs, and where the kernel does not let it be read."""
    assert parse_call(syscall, machine) == call


def test_a_state_in_words_has_what_could_be_read() -> None:
    """A wait channel that may not be read is 0."""
    assert in_words("sleeping", "futex_do_wait", "futex", "") == "sleeping in futex_do_wait, system call futex"
    assert in_words("sleeping", parse_channel("0"), "", "") == "sleeping"
    assert in_words("in uninterruptible sleep", "", "read", "/data/a.tar") == (
        "in uninterruptible sleep, system call read of /data/a.tar"
    )
    assert in_words("running", "futex_do_wait", "futex", "") == "running"
    assert in_words("", "", "", "") == "unknown"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_process_that_waits_is_sleeping() -> None:
    """This machine's own kernel says so; of a process that is gone nothing is known."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as waiting:
        assert wait_until(lambda: state_of(waiting.pid).startswith("sleeping"))
    assert state_of(waiting.pid) == "unknown"
    assert state_of(os.getpid()) == "running"
