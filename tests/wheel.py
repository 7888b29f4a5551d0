"""What an installed wheel could lack: `python -m tests.wheel CHECKOUT`, with the Python that the wheel is installed for.

The wheel has the checkout's files and the rendered dashboards, byte for byte and no others, so that the checkout's tests are
tests of it, too. Left to be shown is what the files alone do not: that every module is imported from there, and that the entry
points load.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from importlib.metadata import distribution
from pathlib import Path

import torchobs


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a package by their path inside it, but for what Python, compilers and editors make of them."""
    generated = ("__pycache__", ".so")
    paths = (path for path in folder.rglob("*") if path.is_file() and not {*path.parts, path.suffix}.intersection(generated))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def expected(checkout: Path) -> dict[str, bytes]:
    """What the package should have: the checkout's, and what is rendered into `deploy/` for commands that write it out."""
    ours, rendered = contents(checkout / "torchobs"), "deploy/grafana/dashboards"
    return {**ours, **{f"{rendered}/{name}": text for name, text in contents(checkout / rendered).items()}}


def main(checkout: Path) -> str:
    """Return what is wrong, empty if nothing is."""
    installed = Path(torchobs.__file__).parent
    if not installed.is_relative_to(sys.prefix):
        return f"torchobs is imported from {installed}, which is not the installed wheel"
    ours, theirs = expected(checkout), contents(installed)
    if different := sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)):
        return f"the wheel lacks, or has otherwise than the checkout: {different}"
    modules = pkgutil.walk_packages(torchobs.__path__, "torchobs.")
    names = [module.name for module in modules if not module.name.endswith("__main__")]  # whose import runs nothing
    for name in names:
        importlib.import_module(name)
    declared = list(distribution("torchobs").entry_points)
    for point in declared:
        point.load()
    licenses = distribution("torchobs").metadata.get_all("License-File") or []
    if len(declared) < 2 or licenses != ["LICENSE"]:
        return f"entry points {declared}, licenses {licenses}"
    print(f"the wheel: {len(names)} modules, {len(declared)} entry points")  # noqa: T201  # for who looks at the log
    return ""


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])) or 0)
