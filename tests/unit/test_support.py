"""What every room uses: the rate limiter, results as tables, lazy packages, descriptors that are kept."""

from __future__ import annotations

import json
import pkgutil
import sys
from dataclasses import dataclass
from math import inf, nan
from subprocess import run

import pytest

import torchobs
from torchobs.support.rate_limit import BURST, REFILL_S, RateLimiter, anomaly_limiter
from torchobs.support.result import Result


def test_each_key_has_its_own_and_knows_what_was_held_back() -> None:
    """One cause's flood takes nothing from another; after a burst comes one every so often."""
    limiter = RateLimiter(10.0, 3)
    taken = [now for now in range(35) if limiter.take(float(now), "a")]
    assert taken == [0, 1, 2, 10, 20, 30]
    assert limiter.take(35.0, "b")
    assert [limiter.held_back(key) for key in "abc"] == [9, 0, 0]


def test_keys_that_somebody_else_chooses_fill_no_memory() -> None:
    """They are forgotten; what they had taken may then be taken anew."""
    limiter = RateLimiter(60.0, most_keys=10)
    assert all(limiter.take(0.0, number) for number in range(1000))
    assert len(limiter._states) <= 10


def test_a_flood_leaves_its_beginning_and_says_what_it_left_out() -> None:
    """10,000 steps of NaN at ten a second: the first 32 are events, then one in ten minutes, with the number in between."""
    limiter = anomaly_limiter()
    taken = (step for step in range(10_000) if limiter.take(step / 10, "nonfinite_loss"))
    events = {step: limiter.held_back("nonfinite_loss") for step in taken}
    (*first, later) = events
    assert first == list(range(BURST))
    assert abs(later - 10 * REFILL_S) <= 10
    assert events == {**dict.fromkeys(first, 0), later: later - BURST}


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


TEXT = """\
Found
  title   <b>
  worst   nan
  layers:
    name    norm
    a       1.5
    longer  inf
  first:
    name  a
    norm  0.1"""
FOUND = Found("<b>", nan, (Layer("a", 1.5), Layer("longer", inf)), Layer("a", 0.1))


def test_a_result_is_a_dictionary_and_a_table() -> None:
    """Promise: strict JSON takes the one, non-finite numbers included; the other has rows of one class below a header."""
    plain = FOUND.to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["worst"] == "nan"
    assert plain["layers"][1] == {"name": "longer", "norm": "inf"}
    assert str(FOUND) == TEXT
    assert "&lt;b&gt;" in FOUND._repr_html_(), "a hostile name is text in a notebook"
    assert "    longer  inf\n" in FOUND._repr_html_()


def test_import_brings_no_torch() -> None:
    """Promise: naming a toolbox does not import torch."""
    code = "import sys, torchobs; torchobs.debug, torchobs.guard, torchobs.tune; sys.exit('torch' in sys.modules)"
    assert run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["debug", "guard", "tune"])
def test_no_function_has_the_name_of_a_module(name: str) -> None:
    """Promise: importing a toolbox's module does not put it in the place of the function of that name."""
    package = getattr(torchobs, name)
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert modules.isdisjoint(package._HOMES)
    assert sorted(package._HOMES) == sorted(package.__all__)
    assert set(package._HOMES.values()) <= modules
