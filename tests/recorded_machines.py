"""Machines from text: `tests/machines/NAME.txt` becomes a tree of `proc` and `sys`.

A section begins with `@@ PATH`: a file, whose lines follow. `@@ PATH -> TARGET` is a symbolic link, and after `@@ PATH/`, with
a slash at its end, each line `NAME = TEXT` is a file below. What stands before the first section says what machine it is.
"""

import os
from pathlib import Path

from torchobs.exporter.host.tree import Tree

MACHINES = Path(__file__).parent / "machines"


def unpack(name: str, root: Path) -> Tree:
    """Write a machine's files below `root`."""
    _, *sections = (MACHINES / f"{name}.txt").read_text().split("@@ ")
    for section in sections:
        head, _, body = section.partition("\n")
        path, _, target = head.partition(" -> ")
        if target:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).symlink_to(target)
        elif path.endswith("/"):
            for line in body.splitlines():
                file, _, text = line.partition(" = ")
                _write(root / path / file, f"{text}\n")
        else:
            _write(root / path, body)
    return Tree(os.fspath(root / "proc"), os.fspath(root / "sys"))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
