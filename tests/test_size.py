"""Ceilings on what one person has to read: they only ever go down."""

from __future__ import annotations

from pathlib import Path

import pytest

CEILINGS = {"torchobs": (64_450, 271), "tests": (52_960, 252)}
"""Lines of Python and files, by folder"""


@pytest.mark.parametrize("folder", CEILINGS)
def test_nothing_grows_beyond_its_ceiling(checkout: Path, folder: str) -> None:
    """Promise: what is added somewhere is deleted elsewhere; a folder that has shrunk takes its ceiling down with it."""
    files = list((checkout / folder).rglob("*.py"))
    lines = sum(len(path.read_text().splitlines()) for path in files)
    most_lines, most_files = CEILINGS[folder]
    assert (lines <= most_lines, len(files) <= most_files) == (True, True), f"{folder}: {lines:,} lines in {len(files)} files"
