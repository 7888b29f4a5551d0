"""Compile: what torch.compile takes, and why it compiles again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dashboards.grafana import panels, thresholds
from dashboards.grafana.layout import Section
from dashboards.grafana.panels import Query
from dashboards.grafana.queries import RANKS, increase, per_rank, rate
from dashboards.grafana.template import Choice, page
from torchobs import catalog
from torchobs.rules.promql import select

if TYPE_CHECKING:
    from grafana_foundation_sdk.models.dashboard import Dashboard, Panel

    from torchobs.rules.values import Thresholds

WINDOW = "10m"
"""The alert's: its threshold is a count within it."""


def dashboard(limits: Thresholds) -> Dashboard:
    """Return the dashboard."""
    sections = [Section("torch.compile", compilation(limits))]
    about = "torch.compile in one run: what it takes, and why it compiles again."
    return page("torchobs-compile", "compile", about, Choice.RUN | Choice.RANK, sections)


def compilation(limits: Thresholds) -> tuple[Panel, ...]:
    """Return the panels."""
    lookups = "max by (cache, result) "
    hits = f"sum({rate(catalog.COMPILE_CACHE_LOOKUPS, *RANKS, HIT)})"
    again = per_rank(f"increase({select(catalog.COMPILE_RECOMPILES, *RANKS)}[{WINDOW}])", operator="sum")
    return (
        panels.number(
            "Compiling now",
            "Ranks of which a thread is compiling. Good: 0 after the first minutes. Empty: without torch.compile.",
            "short",
            Query(f"sum({select(catalog.COMPILE_IN_PROGRESS, *RANKS)})"),
        ),
        panels.number(
            "Recompilations",
            "Within ten minutes, on the rank with most. Good: none after the first minutes. Red where the alert fires.",
            "short",
            Query(f"max({again}) or vector(0)"),
            steps=thresholds.count(limits.recompiles),
        ),
        panels.number(
            "Given up",
            "Compilations that failed within the graphs' time: the function runs uncompiled, or raises. Good: 0.",
            "short",
            Query(f"sum(increase({select(catalog.COMPILE_FAILURES, *RANKS)}[$__range])) or vector(0)", instant=True),
            steps=thresholds.NONE_IS_GOOD,
        ),
        panels.number(
            "Graph breaks",
            "Graph breaks within the graphs' time, on the rank with most, counted in each compilation. Good: 0, or few.",
            "short",
            Query(
                f"max({per_rank(f'increase({select(catalog.COMPILE_GRAPH_BREAKS, *RANKS)}[$__range])', operator='sum')})"
                " or vector(0)",
                instant=True,
            ),
        ),
        panels.number(
            "Cache hits",
            "Share of the lookups in the caches of compiled code that hit. Good: 100 % at a warm start. Empty: without "
            "lookups.",
            "percentunit",
            Query(f"{hits} / (sum({rate(catalog.COMPILE_CACHE_LOOKUPS, *RANKS)}) > 0)"),
        ),
        panels.number(
            "Time compiling",
            "Share of the wall time that went into compilation. Good: 0 % after the first minutes.",
            "percentunit",
            Query(f"avg({per_rank(rate(catalog.GOODPUT_TIME, *RANKS, COMPILE), operator='sum')}) or vector(0)"),
        ),
        panels.lines(
            "Time by stage",
            "Share of the time that compilation keeps threads busy, by stage: tracing and guards (dynamo), AOTAutograd "
            "(aot), lowering (inductor), compilers and autotuning (kernels); the worst rank. Good: 0 after the first "
            "minutes. Empty: without torch.compile.",
            "percentunit",
            Query(f"max by (stage) ({rate(catalog.COMPILE_TIME, *RANKS)})", "{{stage}}"),
            stacked=True,
        ),
        panels.lines(
            "Compilations",
            "Compilations by cause, on the rank with most. Good: first ones only. Empty: without torch.compile.",
            "short",
            Query(f"max by (cause) ({increase(catalog.COMPILE_COMPILATIONS, *RANKS)})", "{{cause}}"),
        ),
        panels.lines(
            "Recompilations by guard",
            "By the kind of the guard that failed, on the rank with most: shape asks for dynamic=True or padding. Good: "
            "none after the first minutes. Empty: without recompilation.",
            "short",
            Query(f"max by (guard) ({increase(catalog.COMPILE_RECOMPILES, *RANKS)})", "{{guard}}"),
        ),
        panels.lines(
            "Failed compilations",
            "By reason: unsupported code, the recompile limit, or an error of the compiler. Good: 0. Empty: while there "
            "are none.",
            "short",
            Query(f"max by (reason) ({increase(catalog.COMPILE_FAILURES, *RANKS)})", "{{reason}}"),
        ),
        panels.lines(
            "Graph breaks by reason",
            "Graph breaks counted in each compilation that has them. Good: 0. Empty: while there are none.",
            "short",
            Query(f"max by (reason) ({increase(catalog.COMPILE_GRAPH_BREAKS, *RANKS)})", "{{reason}}"),
        ),
        panels.lines(
            "Cache lookups",
            "Lookups in the caches of compiled code, on the rank with most. Good: hits at every start but the first. Empty: "
            "without lookups.",
            "short",
            Query(f"{lookups}({increase(catalog.COMPILE_CACHE_LOOKUPS, *RANKS)})", "{{cache}} {{result}}"),
        ),
        panels.by_rank(
            "Compiling by rank",
            "1 while a rank compiles. Good: all ranks together, at the start; a single one makes the others wait. Empty: "
            "without torch.compile.",
            "short",
            select(catalog.COMPILE_IN_PROGRESS, *RANKS),
            highest=1,
            width=24,
        ),
    )


HIT, COMPILE = 'result="hit"', 'state="compile"'
