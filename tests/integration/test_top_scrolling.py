"""`torchobs top` where not all runs or ranks fit the window: the keys move through all of them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from tests.rank_files import Clock, File
from tests.scanners import scanner_of
from torchobs.cli import top
from torchobs.cli.terminal_style import TerminalStyle
from torchobs.cli.top_view import Screen, drawn, frame


def test_more_runs_than_lines_are_moved_through(tmp_path: Path) -> None:
    """The newest come first, each with a row; by moving down every run is seen."""
    for number in range(12):
        file = File(tmp_path, seed=number + 1, born_s=number // 3, rank=0, run_id=f"run-{number:02}")
        file.beat(10.0)
        file.save()
    seen, _ = top.views(scanner_of(tmp_path, Clock(10.0)))
    found: dict[str, None] = {}
    for first in range(12):
        lines = frame(seen, TerminalStyle(100), Screen(24, first), "12:00:00")
        shown = [line.split()[1] for line in lines if line.startswith("gpt")]
        assert len(lines) <= 24
        assert sum(line.split()[:1] == ["0"] for line in lines) == len(shown) == 4
        found |= dict.fromkeys(shown)
    assert set(list(found)[:3]) == {"run-09", "run-10", "run-11"}
    assert len(found) == 12


def test_every_rank_is_seen_where_neither_runs_nor_ranks_fit(tmp_path: Path) -> None:
    """By moving down: the ranks of a large run, then on to the next; and no key is without effect, at the end neither."""
    for number in range(60):
        rank, name = (number, "large") if number < 50 else (0, f"run-{number}")
        file = File(tmp_path, seed=number + 1, born_s=float(number < 50), rank=rank, run_id=name)
        file.beat(10.0)
        file.save()
    seen, _ = top.views(scanner_of(tmp_path, Clock(10.0)))
    shown: list[list[str]] = []
    first, found = 0, set[tuple[str, str]]()
    while (now := drawn(seen, TerminalStyle(100), Screen(24, first), "12:00:00")).first == first:
        assert len(now.lines) <= 24
        run = ""
        for words in map(str.split, now.lines):
            run = words[1] if words[:1] == ["gpt"] else run
            if words[1:2] == ["lost"] or words[1:2] == ["alive"]:
                found.add((run, words[0]))
        shown.append(now.lines)
        first += 1
    assert found == {(one.rank.run_id, one.rank.rank) for one in seen}
    assert all(one != other for one, other in pairwise(shown))
    assert "more ranks: up, down" in "\n".join(shown[0])
    assert drawn(seen, TerminalStyle(100), Screen(24, 1000), "12:00:00") == (shown[-1], first - 1)


def test_one_more_run_is_told_as_one(tmp_path: Path) -> None:
    """In words, as everywhere."""
    for number in range(6):
        File(tmp_path, seed=number + 1, rank=0, run_id=f"run-{number}").save()
    seen, _ = top.views(scanner_of(tmp_path, Clock(1.0)))
    assert frame(seen, TerminalStyle(100), Screen(26), "12:00:00")[-1].startswith("… 1 more run:")
