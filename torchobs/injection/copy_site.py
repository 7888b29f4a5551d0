"""Copy torchobs and its requirements onto a volume: ``python -m torchobs.injection.copy_site DIR``, in an init container.

``DIR/user`` is for ``PYTHONUSERBASE`` and ``DIR/start`` for ``PYTHONPATH``. Both have nothing but
:mod:`torchobs.injection.sitecustomize`, so that no module of the image is hidden; ``DIR/packages`` has the packages,
``DIR/fit.json`` has their requirements on the image's Python and libc, and ``DIR/torchobs`` is the command. Problems are
printed, and the exit status is 0: an init container that fails keeps the training from starting.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from torchobs.support.error_guard import CircuitBreaker, call

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TAG = re.compile(r"Tag: cp(\d)(\d+)-(\w+)-(?:many)?linux(?:_(\d+)_(\d+)|(1|2010|2014))?_(\w+)")
# PEP 600: the glibc of the older names.
_OLD_NAMES = {"1": (2, 5), "2010": (2, 12), "2014": (2, 17)}
_MINIMUM_PYTHON = [3, 10]
_COMMAND = """\
import sys
sys.path.append(sys.path.pop(0) + "/packages")  # last: the image's packages win
from torchobs.cli.__main__ import main
sys.exit(main())
"""
_MINORS = range(10, 20)
"""Minor versions of Python that find the module: the present ones, and those of the next years"""


def copy_site(target: Path) -> None:
    """Copy everything into the directory ``target``, which exists. Raises OSError where it cannot be written."""
    distributions = _required("torchobs", {})
    for installed in distributions.values():
        _copy(installed, target / "packages")
    package = target / "packages" / "torchobs"
    if not (package / "__init__.py").is_file():  # an editable install has no files of its own
        shutil.copytree(Path(__file__).parent.parent, package, dirs_exist_ok=True)
    wheels = [text for installed in distributions.values() if (text := installed.read_text("WHEEL"))]
    (target / "fit.json").write_text(json.dumps(fit_of(wheels)))
    # Last: without it nothing begins.
    module = Path(__file__).with_name("sitecustomize.py")
    for minor in _MINORS:
        user = target / "user" / "lib" / f"python3.{minor}" / "site-packages"
        user.mkdir(parents=True, exist_ok=True)
        shutil.copy2(module, user / "torchobs_start.py")
        (user / "torchobs.pth").write_text("import torchobs_start\n")
    (target / "torchobs").write_text(_COMMAND)
    start = target / "start"
    start.mkdir(exist_ok=True)
    shutil.copy2(module, start / "sitecustomize.py")


def fit_of(wheels: Iterable[str]) -> dict[str, object]:
    """Return the requirements of compiled wheels, from the texts of their ``WHEEL`` files (PEP 427, PEP 600).

    ``python``: the least version, or the only one if ``exact``; ``glibc``: the least version; ``machine``: of ``os.uname()``.
    ``None``: anything.
    """
    fit: dict[str, object] = {"python": _MINIMUM_PYTHON, "exact": False, "glibc": None, "machine": None}
    for text in wheels:
        if not (tags := list(_TAG.finditer(text))):
            continue  # pure Python
        fit["machine"] = tags[0][7]
        if tags[0][3] != "abi3":
            fit["python"], fit["exact"] = [int(tags[0][1]), int(tags[0][2])], True
        glibc = [_OLD_NAMES[tag[6]] if tag[6] else (int(tag[4]), int(tag[5])) for tag in tags if tag[6] or tag[4]]
        fit["glibc"] = list(min(glibc)) if glibc else [0, 0]  # several tags of one wheel: all of them hold
    return fit


def _required(name: str, distributions: dict[str, Distribution]) -> dict[str, Distribution]:
    """Return ``distributions`` with that of this name, and those that it requires without an extra."""
    if name not in distributions:
        distributions[name] = distribution(name)
        for requirement in distributions[name].requires or ():
            if "extra ==" not in requirement and (match := _NAME.match(requirement)):
                try:
                    _required(match[0], distributions)
                except PackageNotFoundError:
                    continue  # for another system or Python
    return distributions


def _copy(installed: Distribution, target: Path) -> None:
    """Copy a distribution's files with their times, by which Python accepts their compiled forms."""
    for path in installed.files or ():
        if ".." not in path.parts and path.suffix != ".pth" and (source := Path(str(path.locate()))).is_file():
            to = target / path
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, to)


def main(arguments: list[str]) -> int:
    """Copy into the directory of the first argument; always 0."""
    breaker = CircuitBreaker("injection")
    problem = call(breaker, lambda: _problem(Path(arguments[0])))
    for reason in [problem] if problem else [f"{failure.exception} at {failure.location}" for failure in breaker.failures]:
        print(f"torchobs: not copied, the training runs unobserved: {reason}", file=sys.stderr)  # noqa: T201  # the pod's log
    return 0


def _problem(target: Path) -> str | None:
    try:
        copy_site(target)
    except OSError as error:
        return str(error)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
