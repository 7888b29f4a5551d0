"""docs/guard.md: its examples run, and its table has every function."""

from pathlib import Path

import pytest

from tests import doc_examples
from torchobs import guard

PAGE = "docs/guard.md"


@pytest.mark.filterwarnings("ignore")  # of libraries that read model files
def test_the_examples_run(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a reader copies works, and prints what the page says."""
    assert doc_examples.run(checkout / PAGE) >= 9
    printed = capsys.readouterr().out
    assert "images: finite: 1 NaN among 768 values, the first at [2, 1, 0, 3]; expected finite values" in printed
    assert "torch.serialization.add_safe_globals" in printed


def test_every_function_is_in_the_table_and_in_an_example(checkout: Path) -> None:
    """None is missing, and none there is not in the package."""
    assert doc_examples.unexplained(checkout / PAGE, guard) == set()
    assert doc_examples.unknown(checkout / PAGE, guard) == set()
