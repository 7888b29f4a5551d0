"""Modules that the program may import, and nothing of ours before it; packages that import their functions on first use.

``init()`` may come before ``import torch`` (under ``torchobs run`` it does), and ``torch._dynamo`` takes a second to import, so
nothing of ours may be the first to import it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class _Loader(Loader):
    """The module's own loader, followed by the callback."""

    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = self._loader  # as the module itself and its tools expect it
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._finder.done()


class _Finder(MetaPathFinder):
    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self.name, self._callback = name, callback
        self._searching = False

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        del path, target
        if fullname != self.name or self._searching:
            return None
        self._searching = True
        try:
            spec = find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec

    def done(self) -> None:
        cancel(self)
        self._callback()


def imported(name: str) -> Any:
    """Return a module that the program has imported, ``None`` if it has not, or has not finished.

    ``sys.modules`` has a module from the beginning of its import on: another thread sees it there without most of its names,
    for minutes where ``import torch`` reads from a slow file system.
    """
    module = sys.modules.get(name)
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module


def after_import(name: str, callback: Callable[[], None]) -> MetaPathFinder | None:
    """Call ``callback`` once ``name`` is imported; return a handle for :func:`cancel` if that is still to come."""
    if imported(name) is not None:
        callback()
        return None
    finder = _Finder(name, callback)
    sys.meta_path.insert(0, finder)
    return finder


def cancel(handle: MetaPathFinder | None) -> None:
    """Cancel a callback if it is pending. Idempotent."""
    if handle is not None and handle in sys.meta_path:
        sys.meta_path.remove(handle)


def attach(
    package: str, homes: Mapping[str, str], namespace: dict[str, Any]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package (PEP 562).

    Args:
        package: the package's ``__name__``.
        homes: for each public name the module, relative to the package, that defines it.
        namespace: the package's ``globals()``, where a name is kept once it is imported.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = namespace[name] = getattr(import_module(f"{package}.{homes[name]}"), name)
        return value

    return get, lambda: sorted(homes)
