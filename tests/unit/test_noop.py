"""On systems that torchobs does not support."""

import inspect
import subprocess
import sys

import pytest

import torchobs
from tests.support import ROOT
from torchobs.runtime import noop

SCRIPT = f"""
import os, sys
sys.path[:0] = [{str(ROOT)!r}]
{{system}}
import torchobs
for _ in range(2):
    with torchobs.init(exporter=True) as session:
        assert not session.active
        with torchobs.phase("data"):
            torchobs.log(loss=1.0, tokens=3, extra=2)
        torchobs.step(); torchobs.event("x", y=1); torchobs.watch(None)
    torchobs.shutdown()
"""


WINDOWS = 'sys.platform = "win32"; sys.modules["fcntl"] = None; del os.register_at_fork'
WITHOUT_GIL = "sys._is_gil_enabled = lambda: False"
"""As a free-threaded build has it"""


@pytest.mark.parametrize(
    ("system", "said"),
    [
        (WINDOWS, "does nothing on win32; Linux and macOS are supported"),
        (WITHOUT_GIL, "needs the GIL and does nothing in a free-threaded Python; PYTHON_GIL=1 turns the GIL on"),
    ],
)
def test_init_says_once_that_it_does_nothing(system: str, said: str) -> None:
    """Without fcntl and fork, as on Windows, and without the interpreter's lock: no exception, one line."""
    script = SCRIPT.format(system=system)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.splitlines() == [f"torchobs: {said}; training is not affected"]


def test_a_free_threaded_python_with_the_lock_turned_on_is_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """By PYTHON_GIL=1, or by an extension that needs it."""
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True, raising=False)
    assert not noop.why_here()


def test_it_has_all_that_the_package_has() -> None:
    """A public function that is added is there, too, and every call that is right here is right there."""
    for name in set(torchobs.__all__) - {
        "AnomalyReport",
        "NonFiniteError",
        "Settings",
        "__version__",
        "on_anomaly",
    }:  # the same anywhere
        here, there = getattr(torchobs, name), getattr(noop, name)
        assert inspect.isclass(here) == inspect.isclass(there), name
