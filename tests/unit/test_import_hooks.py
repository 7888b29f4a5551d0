"""A module that another thread is importing is not there yet."""

from __future__ import annotations

import importlib
import sys
import threading
from typing import TYPE_CHECKING

from torchobs.probes.lifecycle import distributed
from torchobs.support.import_hooks import imported

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_module_is_imported_once_its_import_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own import in another thread, held up in the middle; whoever asks there must not wait for it."""
    (tmp_path / "slow_to_import.py").write_text("import sys\nsys.held.wait()\ngiven = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    held = threading.Event()
    monkeypatch.setattr(sys, "held", held, raising=False)
    assert imported("slow_to_import") is None
    thread = threading.Thread(target=importlib.import_module, args=("slow_to_import",))
    thread.start()
    try:
        while "slow_to_import" not in sys.modules:
            thread.join(0.001)
        assert imported("slow_to_import") is None
        with monkeypatch.context() as half_made:
            for name in ("megatron.core.parallel_state", "torch.distributed._composable_state", "torch.distributed.fsdp"):
                half_made.setitem(sys.modules, name, sys.modules["slow_to_import"])
            assert distributed.of_frameworks() == {}
            assert distributed.recognise([], ddp=False).kinds == ()
    finally:
        held.set()
        thread.join()
    assert imported("slow_to_import").given == 1
    del sys.modules["slow_to_import"]
