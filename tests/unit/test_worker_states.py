"""What is read of a data loader's workers: from /proc."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support import wait_until
from torchobs.probes.data import state_of


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_process_that_waits_is_sleeping() -> None:
    """This machine's own kernel says so; of a process that is gone nothing is known."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as waiting:
        assert wait_until(lambda: state_of(waiting.pid).startswith("sleeping"))
    assert state_of(waiting.pid) == "unknown"
    assert state_of(os.getpid()) == "running"
