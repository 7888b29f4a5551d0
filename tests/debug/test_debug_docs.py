"""docs/debug.md: its examples run, one after another as a reader would type them, and its table has every function."""

from pathlib import Path

import pytest

from tests import doc_examples
from torchobs import debug

PAGE = "docs/debug.md"


def test_the_examples_run(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every fenced Python block, in one namespace, with the line of the page in a traceback."""
    assert doc_examples.run(checkout / PAGE) >= 12
    assert "TensorStats" in capsys.readouterr().out


def test_every_function_is_in_the_table_and_in_an_example(checkout: Path) -> None:
    """None is missing, and none there is not in the package."""
    assert doc_examples.unexplained(checkout / PAGE, debug) == set()
    assert doc_examples.unknown(checkout / PAGE, debug) == set()
