"""Reports and figures of the training that is running, and checks of the system, from inside a script or notebook."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, overload

from torchobs.runtime.session import current
from torchobs.support.result import Checked, Problem, Result

if TYPE_CHECKING:
    import os

    from torchobs.document.blocks import Document
    from torchobs.ranks.runs import Chosen


class RunReport:
    """The report on the run so far, as :func:`report` returns it: a page in a notebook, Markdown as text."""

    __slots__ = ("_document",)

    def __init__(self, document: Document) -> None:
        self._document = document

    def __str__(self) -> str:
        from torchobs.document.files import markdown

        return markdown(self._document)

    def __repr__(self) -> str:
        return f"<torchobs report on {self._document.title}: {self._document.headline}>"

    def _repr_html_(self) -> str:
        from torchobs.document.html import fragment

        return fragment(self._document)


@overload
def report() -> RunReport: ...
@overload
def report(path: str | os.PathLike[str]) -> Path: ...
def report(path: str | os.PathLike[str] | None = None) -> RunReport | Path:
    """Return the report on this rank's run so far, which a notebook shows as a page; or write it to a file.

    Args:
        path: the file, which is then returned; its ending chooses the format: ``.html``, ``.md`` or ``.json``.

    Raises:
        RuntimeError: this process records nothing (no ``torchobs.init()``, or nowhere to write).
        ValueError: the ending is none of these.
        OSError: the file cannot be written.
    """
    from torchobs.document import files
    from torchobs.document.run import run_document

    if path is None:
        return RunReport(run_document(_read()))
    output = Path(path)
    files.check_format(output)
    files.write(output, files.report_text(_read(), output.suffix))
    return output


def plots(path: str | os.PathLike[str], format: str = "png") -> list[Path]:  # noqa: A002  # as matplotlib's savefig names it
    """Draw the charts of the run so far into a directory, and return the files. Needs matplotlib.

    Args:
        path: the directory; it is created.
        format: ``png``, ``svg`` or ``pdf``.

    Raises:
        RuntimeError: this process records nothing.
        ModuleNotFoundError: matplotlib is missing (``pip install 'torchobs[report]'``).
        ValueError: an unknown format.
        OSError: a file cannot be written.
    """
    from torchobs.document.plots import draw
    from torchobs.document.run import run_document

    return draw(run_document(_read()), Path(path), format)


def _read() -> Chosen:
    from torchobs.ranks.runs import Chosen, load

    session = current()
    if session is None:
        raise RuntimeError("this process records nothing: call torchobs.init() first; its warnings say why if it is off")
    if not session.recorded_in:
        raise RuntimeError("this session has recorded nothing")
    if session.writer is not None:
        session.writer.publish()
    ranks, bad = load([Path(session.recorded_in)])
    if not ranks:
        raise RuntimeError(f"the flight file cannot be read: {'; '.join(why for _, why in bad)}")
    return Chosen(ranks, bad, [], [])


@dataclass(frozen=True, slots=True)
class SystemRow(Result):
    """One check of ``torchobs doctor``."""

    name: str
    status: str
    """``ok``, ``warn`` or ``fail``"""
    text: str
    remedy: str


@dataclass(frozen=True, slots=True)
class SystemCheck(Checked):
    """This machine, as ``torchobs doctor`` sees it."""

    checks: tuple[SystemRow, ...]
    problems: tuple[Problem, ...]
    """Of the checks that failed"""


def system(*, training: bool = False) -> SystemCheck:
    """Return what ``torchobs doctor --json`` prints: versions, GPUs, shared memory, variables, each with a remedy.

    It runs in a process of its own, for some seconds.

    Args:
        training: also record a training of five steps, as the command does, to check which probes work.
    """
    command = [sys.executable, "-m", "torchobs", "doctor", "--json", *([] if training else ["--no-training"])]
    printed = subprocess.run(command, capture_output=True, text=True, check=False)  # 1 means that a check failed
    if printed.returncode not in {0, 1}:
        raise RuntimeError(f"torchobs doctor has failed: {printed.stderr.strip()[-1000:]}")
    rows = tuple(SystemRow(**row) for row in json.loads(printed.stdout)["checks"])
    failed = (row for row in rows if row.status == "fail")
    return SystemCheck(rows, tuple(Problem("system", row.name, f"{row.text}: {row.remedy}") for row in failed))
