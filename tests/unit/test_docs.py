"""The generated page says what the catalog says, and every page's commands are ones that there are."""

import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from torchobs import catalog
from torchobs.catalog import Event, Metric, Span
from torchobs.cli.__main__ import COMMANDS


def generate(checkout: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the generator."""
    argv = [sys.executable, str(checkout / "docs" / "generate.py"), *map(str, arguments)]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def test_the_page_is_up_to_date(checkout: Path) -> None:
    """A metric that is added, renamed or described anew is on the page, or CI fails."""
    checked = generate(checkout, "--check")
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_a_stale_or_missing_page_is_told_and_left_alone(checkout: Path, tmp_path: Path) -> None:
    """`--check` fails and changes nothing; without it the page is written, and then the check is content."""
    page = tmp_path / "metrics.md"
    assert generate(checkout, "--check", "--out", tmp_path).returncode == 1
    assert list(tmp_path.iterdir()) == []
    page.write_text("stale")
    checked = generate(checkout, "--check", "--out", tmp_path)
    assert (checked.returncode, page.read_text()) == (1, "stale")
    assert f"{page} is stale" in checked.stdout
    assert generate(checkout, "--out", tmp_path).returncode == 0
    assert generate(checkout, "--check", "--out", tmp_path).returncode == 0
    assert page.read_text() == (checkout / "docs" / "metrics.md").read_text()


def test_every_entry_has_its_row(checkout: Path) -> None:
    """Each metric, event and span, with its Prometheus name and its attributes."""
    page = (checkout / "docs" / "metrics.md").read_text()
    metrics, rest = page.split("## Events\n")
    events, spans = rest.split("## Spans\n")
    entries: list[tuple[str, Metric | Event | Span]] = [
        *((metrics, metric) for metric in catalog.METRICS),
        *((events, event) for event in catalog.EVENTS),
        *((spans, span) for span in catalog.SPANS),
    ]
    for section, entry in entries:
        name = f"`{entry.prometheus}` `{entry.name}`" if isinstance(entry, Metric) else f"`{entry.name}`"
        (row,) = (line for line in section.splitlines() if line.startswith(f"| {name} |"))
        assert entry.brief in row
        assert all(f"`{attribute.name}`" in row for attribute in entry.attributes)


def test_the_page_says_what_a_dead_rank_still_shows(checkout: Path) -> None:
    """Counters, exits and the last loss stay for the grace; ages and other states of a living process end at once."""
    rows = (checkout / "docs" / "metrics.md").read_text().splitlines()
    ends = {
        row.split("`")[3] for row in rows if row.startswith("| `") and re.search(r"\*[^*]*ends\.\* \|$", row, re.IGNORECASE)
    }
    assert {catalog.RANK_PROGRESS_AGE.name, catalog.ANOMALY_ACTIVE.name} <= ends
    kept = (catalog.STEPS, catalog.LOSS, catalog.RANK_EXIT, catalog.STEP_DURATION, catalog.EXPORTER_FILES)
    assert not ends & {metric.name for metric in kept}


WRITTEN = ("top", "inspect", "report", "compare", "runs", "stacks", "profile", "level", "doctor", "exporter")
STANDS_FOR = {"LEVEL": "advanced", "N": "3", "NUMBER": "3", "…": "x"}


def _commands(checkout: Path) -> list[tuple[str, str, str]]:
    """Page, command and arguments of each call of ours in a console block, or in the running text."""
    pages = [checkout / "README.md", *(checkout / "docs").rglob("*.md"), *(checkout / "deploy").rglob("*.md")]
    called = rf"torchobs ({'|'.join(WRITTEN)})\b"
    found = []
    for page in pages:
        text = page.read_text()
        for line in re.findall(r"^\$ (.*)$", text, re.MULTILINE):
            inner = re.sub(r"(.*)bash -c '(.*)'", r"\2", line)
            found += [(page.name, *one) for one in re.findall(rf"{called}((?:'[^']*'|[^|#>])*)", inner)]
        found += [(page.name, *one) for one in re.findall(rf"`{called}( [^`|#>]*)`", text)]
    return found


def test_every_documented_command_is_taken(checkout: Path) -> None:
    """An option or an argument that there is not would be found by whoever was woken up."""
    found = _commands(checkout)
    assert len({command for _, command, _ in found}) == len(WRITTEN)
    for page, command, rest in found:
        given = [STANDS_FOR.get(word, word) for word in shlex.split(rest)]
        file, function, _ = COMMANDS[command]
        parser = getattr(import_module(f"torchobs.cli.{file}"), "parser" if function == "main" else f"{function}_parser")
        try:
            (parser(lenient=True) if command == "exporter" else parser()).parse_args(given)
        except SystemExit as ended:
            if ended.code:
                pytest.fail(f"{page}: torchobs {command} {rest}")
