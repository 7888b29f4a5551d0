"""Fixtures of the tests in which several parts run together."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.otlp import Receiver

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def golden(pytestconfig: pytest.Config) -> Callable[[str, str], None]:
    """Compare a text with the golden file of that name; with `--update-golden` write it, to be looked at in the diff."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if pytestconfig.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert text == path.read_text(), f"`pytest --update-golden` writes {name} again"

    return compare


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """Of OTLP, one that takes everything."""
    with Receiver() as made:
        yield made
