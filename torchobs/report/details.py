"""The section on how a run was started. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchobs.diagnosis import text_format
from torchobs.diagnosis.rank_report import RankReport
from torchobs.report.content import Code, Section, Table, section

_LONGEST = 4000


def details(every: Sequence[RankReport], first: RankReport) -> Section:
    """Return command line, versions, settings and seed."""
    known = known_details(every, first)
    line = command_line(known)
    rows = tuple(facts(first, known).items())
    return section(
        "start", "How it was started", Code(line) if line else None,
        Table("Program, environment, settings", ("What", "Value"), rows, frozenset({0, 1})) if rows else None, wide=True,
    )  # fmt: skip


def known_details(every: Sequence[RankReport], first: RankReport) -> Mapping[str, Any]:
    """Return what is known of how a run was started, from the first of its ranks that knows the most."""
    return max((first, *every), key=lambda report: len(report.details)).details


def command_line(known: Mapping[str, Any]) -> str:
    """Return the command line for a shell, on one clean line; empty if it was not kept."""
    words = known.get("command")
    if not isinstance(words, list):
        return ""
    return text_format.clean(shlex.join(text_format.clean(word, _LONGEST) for word in words), _LONGEST)


def facts(report: RankReport, known: Mapping[str, Any]) -> dict[str, str]:
    """Return program, versions, devices, settings and what is relevant to repeat the run, by name."""
    found = {
        "script": report.described("script"), "host": report.described("host"), "launcher": report.described("launcher"),
        "ranks in all": report.described("world_size"), "attempt": str(report.restart + 1) if report.restart else "",
        "torchobs": report.described("torchobs_version"), "Python": report.described("python_version"),
        "torch": report.described("torch_version"),
    }  # fmt: skip
    found.update(_known(known))
    return {name: text for name, text in found.items() if text}


def _known(known: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    git = _part(known, "git")
    if git.get("commit"):
        state = {True: ", with changes that are not committed", False: ", no changed files", None: ""}.get(git.get("dirty"), "")
        branch = f" ({_text(git['branch'])})" if git.get("branch") else ""
        yield "git commit", f"{_text(git['commit'])}{branch}{state}"
    yield "platform", _text(known.get("platform"))
    torch = _part(known, "torch")
    names = {"version": "torch", "cuda": "CUDA", "hip": "HIP", "cudnn": "cuDNN", "threads": "CPU threads"}
    for name, value in torch.items():
        yield names.get(name, _text(name).replace("_", " ")), _text(value)
    for kind in ("settings", "environment"):
        for name, value in _part(known, kind).items():
            yield _text(name), _text(value)


def _part(known: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = known.get(name)
    return found if isinstance(found, dict) else {}


def _text(value: object) -> str:
    if value is None or value == []:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return text_format.clean(text_format.joined(value) if isinstance(value, list) else value)
