"""Frames of other threads, looked at while no garbage is collected."""

from __future__ import annotations

import gc
import threading
import traceback

import pytest

from torchobs.probes.core import training_state as module
from torchobs.probes.core.training_state import ThreadFrames


def test_all_threads_have_all_their_frames() -> None:
    """This one as well, from where it is asked for outwards."""
    begun, over = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        over.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    begun.wait()
    with ThreadFrames() as frames:
        names = {ident: [each.name for each in traceback.extract_stack(frame)] for ident, frame in frames.items()}
    over.set()
    thread.join()
    assert thread.ident is not None
    assert "wait" in names[thread.ident]
    assert names[threading.get_ident()][-2:] == ["test_all_threads_have_all_their_frames", "__enter__"]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch, enabled: object) -> None:
    """Also when what is done with the frames raises."""
    monkeypatch.setattr(module, "_COLLECTS_MEANWHILE", True)
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(KeyError, match="False"), ThreadFrames():
            raise KeyError(gc.isenabled())
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
