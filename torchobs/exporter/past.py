"""The page of past runs: a list of what is kept, and the curves of up to six of them, which its script draws."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from torchobs.document import html, kept
from torchobs.document.blocks import Cell, Link, Table, section
from torchobs.document.compare import CURVES, all_steps
from torchobs.document.markup import tag
from torchobs.exporter.page import HEADERS, guarded, served_asset
from torchobs.ranks.runs import NoRunError
from torchobs.support import text as text_format

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.requests import Request

    from torchobs.document.kept import RunSummary

PATH = "/live/past"
_HEAD = ("Run", "Job", "State", "Ended", "Steps", "Loss", "Least loss", "Tag")


def routes() -> list[Route]:
    """Return the routes. They do not say how a run was started: ``inspect``, ``report`` and ``compare`` do."""
    script = partial(served_asset, ("past.js",), "text/javascript")
    return [Route(PATH, guarded(_page)), Route(f"{PATH}/curves", guarded(_curves)), Route(f"{PATH}.js", guarded(script))]


async def _page(_: Request) -> Response:
    summaries, bad = await asyncio.to_thread(kept.listed, kept.directory())
    runs = sorted(summaries.items(), key=lambda item: -item[0].last_s)
    selects = {"what": ("Curve", CURVES), "axis": ("over", {"step": "steps", "time_s": "time"})}
    controls = [
        tag("label", words, " ", tag("select", *(tag("option", text, value=key) for key, text in options.items()), id=name))
        for name, (words, options) in selects.items()
    ]
    controls += [
        tag("label", "Smoothing ", tag("input", type="range", id="smooth", min="0", max="0.99", step="0.01", value="0")),
        tag("label", tag("input", type="checkbox", id="log"), " Log scale"),
    ]
    table = Table("Kept runs", _HEAD, tuple(_row(path, run) for run, path in runs), frozenset({0, 1, 2, 3, 7}))
    shown = [
        tag("p", *controls, class_="controls"),
        tag("div", id="chart", tabindex="0", role="slider", aria_label="Curves of the chosen runs", aria_valuenow="0"),
        tag("ul", id="values"),
        tag("p", "Six runs at most. Arrow keys move along the curves.", id="said", class_="note", role="status"),
        html.content(section("kept", "", table)),
    ]
    none = [tag("p", "No run has been kept here yet: one is when it has ended.")]
    unread = [tag("p", f"Not read: {text_format.clean(name)}: {why}", class_="note") for name, why in bad[:5]]
    head = tag("header", tag("h1", "Past runs"), tag("nav", tag("a", "Live", href="../"), aria_label="Elsewhere"))
    body = tag("body", head, tag("main", *(shown if runs else none), *unread, id="past"))
    links = [tag("link", rel="stylesheet", href="live.css"), tag("script", src="past.js", defer=True)]
    return HTMLResponse(html.whole("Past runs – torchobs", links, body), headers=HEADERS)


def _row(path: Path, run: RunSummary) -> tuple[str, ...]:
    return (
        Cell(run.run_id, link=Link(f"past/curves?run={quote(path.name)}")), run.job_name, Cell(run.state, tone=run.state),
        Cell(text_format.moment(run.last_s), at_s=run.last_s), f"{run.steps:,}",
        text_format.number(run.loss), text_format.number(run.best_loss), run.tag,
    )  # fmt: skip


async def _curves(request: Request) -> Response:
    summaries, _ = await asyncio.to_thread(kept.listed, kept.directory())
    wanted = request.query_params.get("run")
    try:
        path = next(path for path in summaries.values() if path.name == wanted)
        return JSONResponse(await asyncio.to_thread(_columns, path), headers=HEADERS)
    except (StopIteration, NoRunError) as problem:
        return JSONResponse({"problem": str(problem) or "no such run is kept"}, 404, HEADERS)


def _columns(path: Path) -> dict[str, list[float | None]]:
    """Return the steps of a run as columns, and where they begin; what is not finite, or unknown, is missing."""
    rank: dict[str, Any] = (run := kept.load(path)).data["ranks"][run.data["principal"]]
    steps, before = all_steps(rank), run.side.resumed_from
    columns: dict[str, list[float | None]] = {"step": [(before or 0.0) + step["step"] for step in steps], "before": [before]}
    columns["time_s"] = [step["end_s"] - rank["started"] for step in steps]
    # the name of a number that is not finite is text
    curves = {field: [step[field] for step in steps] for field in CURVES}
    return columns | {field: [None if isinstance(cell, str) else cell for cell in values] for field, values in curves.items()}
