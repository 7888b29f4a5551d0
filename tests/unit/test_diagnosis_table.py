"""The table of docs/diagnosis.md: rows that were run replace theirs, and the others stay."""

from __future__ import annotations

from tests.diagnosis.table import BEGIN, END, merged, rows

ORDER = ["a NaN", "a leak", "a spike"]
HEALTHY = "44 healthy and odd runs of 44 kinds, 12,040 steps: 0 of which anything was said."
OLD = rows([("a leak", True, None, 3, ""), ("gone", True, None, 3, ""), ("a spike", False, None, None, "")])
PAGE = f"before\n{BEGIN}" + "\n".join([*OLD, "", HEALTHY, ""]) + f"{END}after\n"


def test_rows_that_were_run_replace_theirs_in_the_order_of_the_sicknesses() -> None:
    """One that is new goes to its place; one that is no longer planted goes."""
    new = rows([("a spike", True, True, 0, ""), ("a NaN", True, True, 1, "")])
    lines = merged(PAGE, new, "", ORDER).splitlines()
    assert lines[:2] == ["before", BEGIN.strip()]
    assert lines[4:-2] == [
        "| a NaN | 1 | 1.00 | 1.00 | 1, 1 |",
        "| a leak | 1 | 1.00 |  | 3, 3 |",
        "| a spike | 1 | 1.00 | 1.00 | 0, 0 |",
        "",
        HEALTHY,
    ]
    assert lines[-2:] == [END.strip(), "after"]


def test_the_healthy_runs_are_told_anew_where_they_were_run() -> None:
    """Alone as well."""
    page = merged(PAGE, rows([]), "none", ORDER)
    assert "\n\nnone\n" in page
    assert HEALTHY not in page
    assert "| a leak | 1 | 1.00 |" in page
