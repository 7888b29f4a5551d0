"""Begins torchobs once torch is imported, in an image that has none; found by Python's own ``site`` module.

As ``torchobs_start``, by a ``.pth`` file of the user's site-packages, to which ``PYTHONUSERBASE`` leads: an image's own
``PYTHONPATH``, which no policy can see, stays in force. As ``sitecustomize`` on ``PYTHONPATH`` where the pod says what that is:
a virtual environment has no user's site-packages.

Copied to directories of its own (:mod:`torchobs.injection.copy_site`), so it uses the standard library only, and every Python
program of the container runs it: it costs one entry of ``sys.meta_path``. A ``sitecustomize`` that the image has runs as well.
Nothing here may raise; a misfit is reported on one line of standard error, and the training goes on.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  # pathlib is not loaded yet, and most programs need it not
_SITE = _HERE.partition("/user/")[0] if __name__ == "torchobs_start" else os.path.dirname(_HERE)  # noqa: PTH120  # as above
# Beside this volume, which is mounted read-only, there is that of the flight files; the exporter reads none with such a name.
_REPORTED = os.path.join(os.path.dirname(_SITE), "flight", ".injection-reported")  # noqa: PTH118, PTH120  # as above
_UNRESOLVED = "$(PYTHONPATH_OF_POD)"


def misfit(fit: dict[str, Any]) -> str | None:
    """Return why the packages do not fit this interpreter, ``None`` if they do; ``fit`` is ``fit_of``'s result."""
    needed, version = tuple(fit["python"]), sys.version_info[:2]
    dotted = ".".join(map(str, needed))
    if sys.implementation.name != "cpython":
        return f"this is {sys.implementation.name}, and CPython is needed"
    if version < needed or (fit["exact"] and version != needed):
        return f"this is Python {version[0]}.{version[1]}, and {dotted}{'' if fit['exact'] else ' or later'} is needed"
    if fit["machine"] is None:
        return None
    if "t" in getattr(sys, "abiflags", ""):
        return "this Python is free-threaded, and psutil is compiled for one that is not"
    if fit["machine"] != os.uname().machine:
        return f"this machine is {os.uname().machine}, and psutil is compiled for {fit['machine']}"
    return _libc_misfit(tuple(fit["glibc"]))


def _libc_misfit(needed: tuple[int, ...]) -> str | None:
    try:
        library, _, number = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (ValueError, OSError):
        library = number = ""  # musl has no such name
    if library != "glibc":
        return "this C library is not glibc"
    version = tuple(int(part) for part in number.split(".")[:2])
    return f"this is glibc {number}, and {'.'.join(map(str, needed))} is needed" if version < needed else None


def begin() -> None:
    """Begin torchobs in this process, unless it only starts others or the image has a torchobs of its own. Never raises."""
    try:
        if find_spec("torchobs") is not None:
            return  # the image's own: begun by its own init() or `torchobs run`
        with open(os.path.join(_SITE, "fit.json"), encoding="utf-8") as file:  # noqa: PTH118, PTH123  # as above
            reason = misfit(json.load(file))
        if reason is not None:
            _report(reason)
            return
        sys.path.append(os.path.join(_SITE, "packages"))  # noqa: PTH118  # as above. Last: the image's packages win
        import torchobs  # neither was there before
        from torchobs.support.command_line import starts_others

        if not starts_others(sys.orig_argv):
            torchobs.init()
    except Exception as error:  # noqa: BLE001  # whatever it is, the training goes on
        _report(f"{type(error).__name__}: {error}")


def _report(reason: str) -> None:
    """Print the reason once for all processes of the pod: by the process that creates the file."""
    try:
        open(_REPORTED, "x").close()  # noqa: PTH123  # as above
    except FileExistsError:
        return
    except OSError:
        pass  # no such volume, or full: better often than never
    print(f"torchobs: off, the training runs unobserved: {reason}", file=sys.stderr, flush=True)  # noqa: T201  # the pod's log


class _Loader:
    """Torch's own loader, followed by :func:`begin`."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        spec: Any = module.__spec__
        spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        spec._initializing = False  # noqa: SLF001  # it is complete; else torchobs waits for the end of its import in vain
        begin()


class _Finder:
    """Finds torch as the other finders would, however often, until it is imported."""

    def __init__(self) -> None:
        self._searching = False

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        del path, target
        if name != "torch" or self._searching:
            return None
        self._searching = True
        try:
            spec = find_spec(name)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment]  # a class of importlib.abc costs its import
        return spec


def remove_unresolved() -> None:
    """Remove from the path what Kubernetes leaves of a reference to a variable that does not exist.

    The policy cannot see what a ConfigMap or Secret sets, so it puts a reference to it behind its own directory.
    """
    if any(entry.endswith(_UNRESOLVED) for entry in sys.path):
        sys.path[:] = [entry for entry in sys.path if not entry.endswith(_UNRESOLVED)]
        entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in entries if entry != _UNRESOLVED)


def restore_user_site() -> None:
    """Put the user's own site-packages where ours stands on the path: an image may have torch there."""
    import site  # Python's own, which runs this

    site.USER_BASE = os.path.join(os.path.expanduser("~"), ".local")  # noqa: PTH111, PTH118  # as above. PEP 370's default
    site.USER_SITE = os.path.join(site.USER_BASE, "lib", os.path.basename(os.path.dirname(_HERE)), "site-packages")  # noqa: PTH118, PTH119, PTH120  # as above
    sys.path.remove(_HERE)
    if os.path.isdir(site.USER_SITE):  # noqa: PTH112  # as above
        site.addsitedir(site.USER_SITE)
    if os.path.basename(_program()).rstrip("0123456789.") == "pip":  # noqa: PTH119  # as above
        os.environ.pop("PYTHONUSERBASE", None)  # it installs where it always did


def _program() -> str:
    """Return the module or script that Python was started with; ``-c`` where it was neither."""
    return sys.orig_argv[-len(sys.argv)].removeprefix("-m") if sys.argv[:1] == ["-m"] else "".join(sys.argv[:1])


def run_next() -> None:
    """Run the ``sitecustomize`` that this one hides, under its name. Its exceptions are shown by Python, as ever."""
    others = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]  # noqa: PTH100  # as above
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "torchobs_start":
    restore_user_site()
    sys.meta_path.insert(0, _Finder())
elif __name__ == "sitecustomize":
    remove_unresolved()
    sys.meta_path.insert(0, _Finder())
    run_next()
