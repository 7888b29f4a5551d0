"""Writing of reports to files, in the format that the file's name asks for."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchobs.diagnosis.json_report import Options, document
from torchobs.diagnosis.load import Chosen
from torchobs.report.content import Document
from torchobs.report.markdown import markdown
from torchobs.report.page import page
from torchobs.report.run import run_document

FORMATS = (".html", ".htm", ".md", ".json")
_ALL = 1_000_000


def check_format(path: Path) -> None:
    """Raise ``ValueError`` when a file's name asks for no known format."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{str(path)!r} names no format: end it in .html, .md or .json")


def report_text(chosen: Chosen, suffix: str) -> str:
    """Return the report on a run in the format of a file name's suffix.

    As JSON it is plain data as of ``torchobs inspect --json``, with every step and event, and the history.
    """
    if suffix.lower() != ".json":
        return document_text(run_document(chosen), suffix)
    return json_text(document(chosen.ranks, chosen.launchers, chosen.bad, Options(_ALL, _ALL, history=True)))


def document_text(made: Document, suffix: str) -> str:
    """Return a document as Markdown or HTML."""
    return markdown(made) if suffix.lower() == ".md" else page(made)


def json_text(made: dict[str, Any]) -> str:
    """Return plain data as a JSON file."""
    return json.dumps(made, indent=1, allow_nan=False) + "\n"


def write(path: Path, words: str) -> None:
    """Write a file at once, so that nobody sees a part of it. Raises ``OSError``."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(words, encoding="utf-8", errors="replace")
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink()
