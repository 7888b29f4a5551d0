"""The generated page says what the catalog says."""

import subprocess
import sys
from pathlib import Path

from torchobs import catalog
from torchobs.catalog import Event, Metric, Span


def generate(checkout: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the generator."""
    argv = [sys.executable, str(checkout / "docs" / "generate.py"), *map(str, arguments)]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def test_the_page_is_up_to_date(checkout: Path) -> None:
    """A metric that is added, renamed or described anew is on the page, or CI fails."""
    checked = generate(checkout, "--check")
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_a_stale_page_is_told_and_left_alone(checkout: Path, tmp_path: Path) -> None:
    """`--check` fails and changes nothing; without it the page is written, and then the check is content."""
    page = tmp_path / "metrics.md"
    page.write_text("stale")
    checked = generate(checkout, "--check", "--out", tmp_path)
    assert (checked.returncode, page.read_text()) == (1, "stale")
    assert f"{page} is stale" in checked.stdout
    assert generate(checkout, "--out", tmp_path).returncode == 0
    assert generate(checkout, "--check", "--out", tmp_path).returncode == 0
    assert page.read_text() == (checkout / "docs" / "metrics.md").read_text()


def test_a_missing_page_is_stale(checkout: Path, tmp_path: Path) -> None:
    """The check does not pass for want of a page."""
    assert generate(checkout, "--check", "--out", tmp_path).returncode == 1
    assert list(tmp_path.iterdir()) == []


def test_every_entry_has_its_row(checkout: Path) -> None:
    """Each metric, event and span, with its Prometheus name, its closed values."""
    page = (checkout / "docs" / "metrics.md").read_text()
    metrics, rest = page.split("## Events\n")
    events, spans = rest.split("## Spans\n")
    entries: list[tuple[str, Metric | Event | Span]] = [
        *((metrics, metric) for metric in catalog.METRICS),
        *((events, event) for event in catalog.EVENTS),
        *((spans, span) for span in catalog.SPANS),
    ]
    for section, entry in entries:
        (row,) = (line for line in section.splitlines() if line.startswith(f"| `{entry.name}` |"))
        assert entry.brief in row
        assert all(f"`{value}`" in row for attribute in entry.attributes for value in attribute.values)
        assert not isinstance(entry, Metric) or f"| `{entry.prometheus}` |" in row


def test_the_page_says_what_a_dead_rank_still_shows(checkout: Path) -> None:
    """Counters, exits and the last loss stay for the grace; ages and other states of a living process end at once."""
    rows = (checkout / "docs" / "metrics.md").read_text().splitlines()
    ends = {
        row.split("`")[1]: row.rstrip(" |").rpartition("| ")[2]
        for row in rows
        if row.startswith("| `") and row.count(" | ") == 6
    }
    assert {ends[metric.name] for metric in (catalog.STEPS, catalog.LOSS, catalog.RANK_EXIT, catalog.STEP_DURATION)} == {"kept"}
    assert {ends[metric.name] for metric in (catalog.RANK_PROGRESS_AGE, catalog.ANOMALY_ACTIVE)} == {"ends"}
    assert ends[catalog.EXPORTER_FILES.name] == "the exporter's own"
    assert len(ends) == len(catalog.METRICS)
