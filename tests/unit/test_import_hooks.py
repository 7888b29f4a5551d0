"""A toolbox costs nothing until it is used; a module that another thread is importing is not there yet."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import threading
from subprocess import run
from typing import TYPE_CHECKING

import pytest

import torchobs
from torchobs.probes import distributed
from torchobs.support.import_hooks import imported

if TYPE_CHECKING:
    from pathlib import Path


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


def test_import_brings_no_torch() -> None:
    """Promise: naming a toolbox does not import torch."""
    code = "import sys, torchobs; torchobs.debug, torchobs.guard, torchobs.tune; sys.exit('torch' in sys.modules)"
    assert run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["debug", "guard", "tune"])
def test_no_function_has_the_name_of_a_module(name: str) -> None:
    """Promise: importing a toolbox's module does not put it in the place of the function of that name."""
    package = getattr(torchobs, name)
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert modules.isdisjoint(package._HOMES)
    assert sorted(package._HOMES) == sorted(package.__all__)
    assert set(package._HOMES.values()) <= modules
