"""A toolbox costs nothing until one of its functions is asked for."""

from __future__ import annotations

import pkgutil
import sys
from subprocess import run

import pytest

import torchobs


@pytest.mark.parametrize("name", ["debug", "guard", "tune"])
def test_toolbox_is_an_attribute(name: str) -> None:
    """Promise: ``torchobs.debug`` works after ``import torchobs``."""
    assert getattr(torchobs, name).__name__ == f"torchobs.{name}"


def test_unknown_names_are_attribute_errors() -> None:
    """Promise: a misspelt function is Python's own error."""
    with pytest.raises(AttributeError, match=r"module 'torchobs.debug' has no attribute 'nonsense'"):
        torchobs.debug.nonsense  # noqa: B018


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
