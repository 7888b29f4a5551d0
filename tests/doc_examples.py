"""Runs the examples of a documentation page, as a reader would type them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(page: Path) -> int:
    """Run every fenced Python block in one namespace; an error's traceback has the line of the page. Return their number."""
    text = page.read_text()
    names: dict[str, Any] = {"__name__": "__main__"}
    state = torch.get_rng_state()
    try:
        for block in BLOCK.finditer(text):
            before = text[: block.start(1)].count("\n")
            exec(compile("\n" * before + block[1], str(page), "exec"), names)  # noqa: S102  # it is what is tested
    finally:
        torch.set_rng_state(state)
    return len(BLOCK.findall(text))


def unexplained(page: Path, toolbox: Any) -> set[str]:
    """Return public functions of a toolbox that the page's tables do not name, or that no example of it calls."""
    rows = "".join(line for line in page.read_text().splitlines() if line.startswith("| ["))
    named = set(re.findall(r"[`@ ](\w+)[(`]", rows))
    return _functions(toolbox) - (named & _called(page, toolbox))


def unknown(page: Path, toolbox: Any) -> set[str]:
    """Return what the page's examples call of a toolbox that is not there."""
    return _called(page, toolbox) - set(toolbox.__all__)


def _functions(toolbox: Any) -> set[str]:
    return {name for name in toolbox.__all__ if callable(getattr(toolbox, name)) and name.islower()}


def _called(page: Path, toolbox: Any) -> set[str]:
    name = toolbox.__name__.rpartition(".")[2]
    return set(re.findall(rf"\b{name}\.(\w+)", "".join(BLOCK.findall(page.read_text()))))
