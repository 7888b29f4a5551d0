"""What a browser shows: where the metrics are, how the ranks do. Everything is in the page, nothing comes from outside."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs._version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchobs.exporter.scan import Rank, Snapshot

_COLUMNS = ("job", "run", "rank", "state", "steps", "loss", "last step")
_SHOWN = 1000
_STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
table { border-collapse: collapse; width: 100% } div { overflow-x: auto }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #8884 }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
.alive, .finished { color: #1a7f37 } .unresponsive, .hung { color: #b35900 } .failed, .lost { color: #cf222e }
@media (prefers-color-scheme: dark) {
  .alive, .finished { color: #3fb950 } .unresponsive, .hung { color: #e3a04f } .failed, .lost { color: #ff7b72 }
}
"""


def render(snapshot: Snapshot, problems: Iterable[str], telemetry_path: str) -> str:
    """Return the page as HTML; everything that a flight file says is text in it."""
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>torchobs exporter</title>
<style>{_STYLE}</style>
<main>
<h1>torchobs exporter</h1>
<p>Version {escape(__version__)}. <a href="{escape(telemetry_path)}">Metrics</a> · <a href="/-/healthy">healthy</a> ·
<a href="/-/ready">ready</a></p>
{"".join(f"<p role='alert'><strong>{escape(problem)}</strong></p>" for problem in problems)}
{_table(snapshot)}
</main>
</html>
"""


def _table(snapshot: Snapshot) -> str:
    if not snapshot.ranks:
        return "<p>No rank has been seen yet. One appears as soon as a training calls <code>torchobs.init()</code>.</p>"
    head = "".join(f"<th scope='col'{' class=n' if column in _COLUMNS[4:] else ''}>{column}</th>" for column in _COLUMNS)
    rows = "".join(_row(rank) for rank in snapshot.ranks[:_SHOWN])
    more = len(snapshot.ranks) - _SHOWN
    note = f"<p>{more} more are on the metrics page.</p>" if more > 0 else ""
    return f"<div><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table></div>{note}"


def _row(rank: Rank) -> str:
    values = {point.series.name: point.value for point in rank.view.points if not point.series.attributes}
    age = "" if rank.progress_age_s is None else f"{rank.progress_age_s:.1f} s ago"
    cells = [escape(text) for text in (rank.job_name, rank.run_id, rank.rank)]
    numbers = (_number(values.get(catalog.STEPS.name)), _number(values.get(catalog.LOSS.name)), age)
    return (
        "<tr>"
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + f"<td class='{rank.state}'>{rank.state}</td>"
        + "".join(f"<td class=n>{escape(number)}</td>" for number in numbers)
        + "</tr>\n"
    )


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else f"{value}" if isinstance(value, int) else ""
