"""docs/debug.md, tune.md, guard.md: their examples run, as a reader would type them, and their tables have every function."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import doc_examples
from torchobs import debug, guard, tune

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

PRINTED = {
    "debug": ["TensorStats"],
    "tune": ["Plan: mode amp"],
    "guard": [
        "images: finite: 1 NaN among 768 values, the first at [2, 1, 0, 3]; expected finite values",
        "torch.serialization.add_safe_globals",
    ],
}


@pytest.mark.filterwarnings("ignore")  # of libraries that read model files
@pytest.mark.parametrize(("name", "least"), [("debug", 12), ("tune", 4), ("guard", 9)])
def test_the_examples_run(
    name: str, least: int, checkout: Path, flight_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Promise: every fenced Python block, in one namespace, with the page's line in a traceback; it prints what it says."""
    monkeypatch.setenv("TORCHOBS_DIR", str(flight_dir))
    monkeypatch.setenv("TORCHOBS_EXPORTER", "false")
    monkeypatch.chdir(flight_dir)
    assert doc_examples.run(checkout / f"docs/{name}.md") >= least
    printed = capsys.readouterr().out
    assert [text for text in PRINTED[name] if text not in printed] == []


@pytest.mark.parametrize("toolbox", [debug, tune, guard])
def test_every_function_is_in_the_table_and_in_an_example(toolbox: ModuleType, checkout: Path) -> None:
    """Promise: none is missing, and none there is not in the package."""
    page = checkout / f"docs/{toolbox.__name__.rpartition('.')[2]}.md"
    assert doc_examples.unexplained(page, toolbox) == set()
    assert doc_examples.unknown(page, toolbox) == set()
