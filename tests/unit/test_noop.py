"""On systems that torchobs does not support."""

import inspect
import subprocess
import sys

import torchobs
from tests.support import ROOT
from torchobs.runtime import noop

SCRIPT = f"""
import os, sys
sys.path[:0] = [{str(ROOT)!r}]
sys.platform = "win32"
sys.modules["fcntl"] = None
del os.register_at_fork
import torchobs
for _ in range(2):
    with torchobs.init(exporter=True) as session:
        assert not session.active
        with torchobs.phase("data"):
            torchobs.log(loss=1.0, tokens=3, extra=2)
        torchobs.step(); torchobs.event("x", y=1); torchobs.watch(None)
    torchobs.shutdown()
"""


def test_init_says_once_that_it_does_nothing() -> None:
    """Without fcntl and fork, as on Windows: no exception, one line."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.splitlines() == ["torchobs: does nothing on win32; Linux and macOS are supported"]


def test_it_has_all_that_the_package_has() -> None:
    """A function added to the facade is there, too, and every call that is right here is right there."""
    for name in set(torchobs.__all__) - {"Settings", "__version__"}:
        here, there = getattr(torchobs, name), getattr(noop, name)
        assert inspect.isclass(here) == inspect.isclass(there), name
