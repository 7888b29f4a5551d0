"""The exporter's page of the documentation says what there is."""

import re
from pathlib import Path

import pytest

from torchobs import catalog
from torchobs.exporter.config import EVERY_OPTION


@pytest.fixture
def page(checkout: Path) -> str:
    """The page's text."""
    return (checkout / "docs" / "exporter.md").read_text()


def test_every_option_is_documented_with_its_variables(page: str) -> None:
    """And none that does not exist."""
    told = {
        option: tuple(re.findall(r"`(\w+)`", variables))
        for option, variables in re.findall(r"^\| `(--[\w.-]+)`[^|]*\| ([^|]*) \|$", page, re.MULTILINE)
    }
    assert told == {option.flag: option.variables for option in EVERY_OPTION}


def test_every_state_and_every_ending_is_documented(page: str) -> None:
    """In the catalog's words, and in its order."""
    assert tuple(re.findall(r"^\| `(\w+)` \| ", page.split("## Options", maxsplit=1)[0], re.MULTILINE)) == catalog.RANK_STATES
    for reason in catalog.EXIT_REASONS:
        assert f"`{reason}`" in page


def test_metrics_are_called_by_their_names(page: str) -> None:
    """Whatever looks like one of ours is one."""
    names = {metric.prometheus for metric in catalog.METRICS}
    for told, star in re.findall(r"\b(torchobs_\w+)(\*?)", page):
        assert told.startswith("torchobs_run") or told in names or (star and any(name.startswith(told) for name in names)), told
