"""docs/scale.md: what it computes is what its formula gives, of the budgets that are held by a test."""

from pathlib import Path

import yaml

from tests.integration.test_series_count import LIMIT, OWN_LIMIT, SMALL_LIMIT

RANKS_OF_A_NODE = 8
INTERVAL_S = 15
BYTES_OF_A_SAMPLE, DAY_S = 1.5, 86_400
BYTES_OF_A_SERIES = 8 << 10
RULES = 15


def row(ranks: int) -> list[str]:
    """Return the cells of the table of budgets for so many ranks."""
    exporters = -(-ranks // RANKS_OF_A_NODE)
    small, large = (ranks * (series + RULES) + exporters * OWN_LIMIT for series in (SMALL_LIMIT, LIMIT))
    samples, disk = large / INTERVAL_S, large / INTERVAL_S * DAY_S * BYTES_OF_A_SAMPLE / 1e9
    memory = large * BYTES_OF_A_SERIES / 2**30
    measures = (f"{samples:,.0f}", f"{disk:,.2f} GB", f"{memory:,.2f} GiB")
    return [f"{ranks:,}", f"{exporters:,}", f"{small:,}", f"{large:,}", *measures]


def test_the_table_of_budgets_is_what_the_formula_gives(checkout: Path) -> None:
    """From one node to 16,384 ranks."""
    page = (checkout / "docs" / "scale.md").read_text()
    for ranks in (8, 64, 1_000, 4_096, 16_384):
        assert f"| {' | '.join(row(ranks))} |" in page


def test_the_table_of_restarts_is_what_the_formula_gives(checkout: Path) -> None:
    """A tenth of the ranks every five minutes, in pods that are replaced."""
    page = (checkout / "docs" / "scale.md").read_text()
    for ranks in (1_000, 4_096, 16_384):
        restarts = ranks * 0.1 / 300
        new = restarts * (LIMIT + RULES) * 3600
        head = ranks * (LIMIT + RULES) + 3 * new
        assert f"| {ranks:,} | {restarts:.2f} | {new / 1e6:.2f} million | {head / 1e6:.1f} million |" in page


def test_so_many_series_are_recorded_of_a_rank_at_least(checkout: Path) -> None:
    """The formula's third number covers what rules record of each rank of a training where all is well."""
    rules = checkout / "deploy" / "prometheus" / "rules"
    names = [
        rule["record"]
        for path in rules.glob("*.yml")
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
        if "record" in rule and rule["record"].startswith("rank")
    ]
    phases = 5
    always = [name for name in names if not name.endswith(":recent")]
    assert len(always) + phases - 1 <= RULES
    assert [name for name in always if name.startswith("rank_phase:")], "which there is one of for each phase"
