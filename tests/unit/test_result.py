"""What the toolboxes return prints as a table, in a notebook as HTML, and is plain data on request."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import inf, nan

from torchobs.support.result import Result


@dataclass(frozen=True)
class Layer(Result):
    name: str
    norm: float


@dataclass(frozen=True)
class Found(Result):
    title: str
    worst: float | None
    layers: tuple[Layer, ...]
    first: Layer | None = None


FOUND = Found("<b>", nan, (Layer("a", 1.5), Layer("longer", inf)), Layer("a", 0.1))


def test_to_dict_is_what_json_takes() -> None:
    """Promise: strict JSON takes the dictionary, non-finite numbers included."""
    plain = FOUND.to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["worst"] == "nan"
    assert plain["layers"][1] == {"name": "longer", "norm": "inf"}


def test_text_is_a_table() -> None:
    """Promise: rows of one class are a table with a header."""
    assert str(FOUND).splitlines() == [
        "Found",
        "  title   <b>",
        "  worst   nan",
        "  layers:",
        "    name    norm",
        "    a       1.5",
        "    longer  inf",
        "  first:",
        "    name  a",
        "    norm  0.1",
    ]


def test_html_is_escaped() -> None:
    """Promise: a hostile name is text in a notebook."""
    html = FOUND._repr_html_()
    assert "&lt;b&gt;" in html
    assert "<b>Found</b>" in html
    assert html.count("<td>longer</td>") == 1


def test_absent_values_and_empty_tuples() -> None:
    """Promise: what is absent is a dash."""
    assert "worst   -" in str(Found("t", None, ()))
