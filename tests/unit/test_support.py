"""What every room uses: rate limits, results as tables, lazy packages, the guard of our errors, callbacks, text for people."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import pkgutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import torchobs
from torchobs.config import settings
from torchobs.probes import factories
from torchobs.probes.amp import LossScaling
from torchobs.support import text as text_format
from torchobs.support.anomaly_callbacks import AnomalyReport, notify, wanted
from torchobs.support.error_guard import CircuitBreaker, call, settle
from torchobs.support.rate_limit import BURST, REFILL_S, RateLimiter, anomaly_limiter
from torchobs.support.result import Result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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
    samples_per_s: float
    layers: tuple[Layer, ...]
    first: Layer | None = None


TEXT = """\
Found
  title          <b>
  worst          nan
  samples_per_s  1,560 samples/s
  layers:
    name    norm
    a       1.5
    longer  inf
  first:
    name  a
    norm  0.1"""
FOUND = Found("<b>", math.nan, 1560.4, (Layer("a", 1.5), Layer("longer", math.inf)), Layer("a", 0.1))


def test_a_result_is_a_dictionary_and_a_table() -> None:
    """Promise: strict JSON takes the one, non-finite numbers included; the other has rows of one class below a header."""
    plain = FOUND.to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["layers"][1] == {"name": "longer", "norm": "inf"}
    assert str(FOUND) == TEXT
    assert "&lt;b&gt;" in FOUND._repr_html_(), "a hostile name is text in a notebook"


def test_import_brings_no_torch() -> None:
    """Promise: naming a toolbox does not import torch."""
    code = "import sys, torchobs; torchobs.debug, torchobs.guard, torchobs.tune; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["debug", "guard", "tune"])
def test_no_function_has_the_name_of_a_module(name: str) -> None:
    """Promise: importing a toolbox's module does not put it in the place of the function of that name."""
    package = getattr(torchobs, name)
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert modules.isdisjoint(package._HOMES)
    assert sorted(package._HOMES) == sorted(package.__all__)
    assert set(package._HOMES.values()) <= modules


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_is_interrupted_is_done_again_and_the_interrupt_comes_out(kind: type[BaseException]) -> None:
    """An end that is not recorded would be shown as a crash."""
    calls = []

    def work() -> None:
        calls.append(1)
        if len(calls) < 3:
            raise kind

    with pytest.raises(kind):
        settle(CircuitBreaker("shutdown"), work)
    assert len(calls) == 3


class TimeIsUpError(Exception):
    """What the user's time limit raises."""


def limit(signum: int, frame: object) -> None:
    """The user's handler."""
    raise TimeIsUpError(signum, frame is not None)


class Limit:
    """An object that is a handler, and so is its method."""

    def __call__(self, signum: int, frame: object) -> None:
        """As the function."""
        limit(signum, frame)


HANDLERS = (limit, Limit().__call__, Limit(), functools.partial(limit))


@pytest.fixture(params=HANDLERS, ids=["function", "method", "object", "partial"])
def handled(request: pytest.FixtureRequest) -> Iterator[None]:
    """SIGUSR1 is handled so."""
    before = signal.signal(signal.SIGUSR1, request.param)
    yield
    signal.signal(signal.SIGUSR1, before)


def interrupted() -> None:
    """Code of ours into which the signal breaks."""
    signal.raise_signal(signal.SIGUSR1)


def wrong() -> None:
    """Code of ours with a mistake."""
    raise TimeIsUpError


@pytest.mark.usefixtures("handled")
@pytest.mark.parametrize("use", [lambda breaker, work: breaker.guard(work)(), call])
def test_what_a_handler_raises_in_our_code_passes(use: Callable[[CircuitBreaker, Callable[[], None]], None]) -> None:
    """The user's time limit works wherever it strikes, and switches no probe off; the same exception of ours ends there."""
    breaker = CircuitBreaker("probe")
    with pytest.raises(TimeIsUpError):
        use(breaker, interrupted)
    assert (breaker.is_open, breaker.failures) == (False, [])
    use(breaker, wrong)
    assert breaker.is_open
    assert [failure.exception for failure in breaker.failures] == ["TimeIsUpError"]


def test_every_probe_of_the_settings_is_made_under_its_name() -> None:
    """All but the exit probe, which needs no torch and which the session makes."""
    probes = factories(LossScaling())
    assert {*probes, "exits"} == set(settings.PROBES)
    assert [make().name for make in probes.values()] == list(probes)


@pytest.mark.parametrize(
    ("text", "is_users"),
    [
        ("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later", True),
        ("HIP error: unspecified launch failure", True),
        ("CUDA error: operation not permitted when stream is capturing\n", False),
        ("the loss had an illegal memory access", False),
    ],
)
def test_a_failure_of_the_user_s_work_on_a_device_is_handed_on(text: str, is_users: bool) -> None:  # noqa: FBT001  # a parameter
    """Whichever call comes next raises it, some only once; it is none of the probe's errors."""
    breaker = CircuitBreaker("gradients")

    def query() -> None:
        raise RuntimeError(text)

    with pytest.raises(RuntimeError) if is_users else contextlib.nullcontext():
        breaker.guard(query)()
    assert breaker.is_open
    assert breaker.errors == (not is_users)


REPORT = AnomalyReport("loss_spike", 7, 9.0, 1.0, None)


def test_ending_one_registration_leaves_the_other() -> None:
    """Also where both are of the same function, as after a cell of a notebook was run twice."""
    called: list[AnomalyReport] = []
    first, second = torchobs.on_anomaly(called.append), torchobs.on_anomaly(called.append)
    first()
    first()
    notify(REPORT)
    second()
    assert called == [REPORT]
    assert not wanted()


def test_one_that_raises_is_told_of_and_is_the_only_one_to_go(caplog: pytest.LogCaptureFixture) -> None:
    """The others are called for the next anomaly, too."""
    called: list[AnomalyReport] = []

    def fail(report: AnomalyReport) -> None:
        raise KeyError(report.kind)

    torchobs.on_anomaly(fail)
    end = torchobs.on_anomaly(called.append)
    with caplog.at_level(logging.WARNING, "torchobs"):
        notify(REPORT)
        notify(REPORT)
    end()
    assert called == [REPORT, REPORT]
    assert sum("is not called again" in record.getMessage() for record in caplog.records) == 1
    assert not wanted()


ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\n\u202egnp.exe\u2028\ud800"


def test_nothing_that_commands_a_terminal_is_left_nor_the_path_to_a_package() -> None:
    """Escapes, C1 controls, line ends, bidirectional overrides are question marks; the path to an installed package is cut."""
    assert text_format.clean(ESCAPE) == "?]0;owned??[2J?31m???gnp.exe??"
    assert text_format.clean("h.3.attn überall 層") == "h.3.attn überall 層"
    for path, place in (("/opt/venv/lib/python3.11/site-packages/", "torch/nn.py:7 in f"), ("", "/home/me/train.py:7 in f")):
        assert text_format.source_location(path + place) == place


@given(st.text(alphabet=st.characters()))
def test_a_clean_text_is_one_printable_line(text: str) -> None:
    """Whatever it was."""
    cleaned = text_format.clean(text)
    assert cleaned.isprintable() or any(char.isspace() for char in cleaned)
    assert not {*cleaned} & {*map(chr, range(32)), *map(chr, range(127, 160))}
    assert len(cleaned.splitlines()) <= 1
    cleaned.encode()


@given(st.text(max_size=40), st.integers(0, 30))
def test_a_cut_text_fits_and_a_padded_one_fills(text: str, room: int) -> None:
    """In columns: an East Asian character has two."""
    cleaned = text_format.clean(text)
    assert text_format.columns(text_format.cut(cleaned, room)) <= room
    assert text_format.columns(text_format.pad(cleaned, room)) == room


INF = math.inf
SHOWN: list[tuple[Callable[[Any], str], dict[Any, str]]] = [
    (text_format.number, {
        None: "-", 0.0: "0", 2.13456: "2.135", 12034.4: "12,034", 3e-5: "3e-5", 1.5e9: "1.5e9", -0.25: "-0.25", INF: "Inf",
        -INF: "-Inf", 1e6: "1e6", 99999.9: "100,000", 999.96: "1,000", 65536: "65,536", 0.0015: "0.0015", 3.125e-5: "3.125e-5",
    }),
    (text_format.duration, {
        None: "-", 0.0: "0 s", 0.0004: "400 µs", 0.0123: "12.3 ms", 0.9999: "1 s", 0.99951e-3: "1 ms", 1.5204: "1.52 s",
        61.0: "1 min 1 s", 3700.0: "1 h 1 min", 90000.0: "1 d 1 h", INF: "-",
    }),
    (text_format.span, {None: "-", 40.9: "40 s", 200.0: "3 min 20 s", 7_500.0: "2 h 5 min", 356_400.0: "4 d 3 h", -3.0: "0 s"}),
    (text_format.size, {
        None: "-", 0: "0 B", 512: "512 B", 1023: "0.999 KiB", 1536: "1.5 KiB", 451_936_256.0: "431 MiB", 85e9: "79.2 GiB",
        2**60: "1,024 PiB",
    }),
    (text_format.percent, {None: "-", 0.0: "0 %", 0.0004: "<0.1 %", 0.004: "0.4 %", 0.00999: "1 %", 0.456: "46 %"}),
    (text_format.count, {1_234_567.0: "1,234,567", None: "-"}),
    (text_format.rate, {1.9: "1.90", None: "-"}),
]  # fmt: skip


def test_numbers_sizes_and_times_are_short() -> None:
    """As a person reads them: few digits, one unit or two."""
    wrong = [(shown, value, form(value)) for form, values in SHOWN for value, shown in values.items() if form(value) != shown]
    assert wrong == []
    assert (text_format.number(math.nan), text_format.rate(45_300.0, "tokens")) == ("NaN", "45,300 tokens/s")


@given(st.integers(1, 9999), st.integers(-9, 1))
def test_a_rate_of_four_digits_is_shown_as_it_is(digits: int, power: int) -> None:
    """Read back it is the same number: a learning rate on the page is the one in the script."""
    value = float(f"{digits}e{power}")
    assert float(text_format.number(value).replace(",", "")) == value


def test_a_sparkline_shows_the_spike_whatever_the_room() -> None:
    """Each bar is the highest of its share; NaN is an exclamation mark, a gap a space."""
    values = [1.0] * 100
    values[37] = 50.0
    assert text_format.sparkline(values, 10) == "▁▁▁█▁▁▁▁▁▁"
    assert text_format.sparkline([1.0, math.nan, None, 2.0], 10) == "▁! █"
    assert text_format.sparkline(values, 10, ascii_only=True) == "___@______"
    assert text_format.sparkline([], 10) == text_format.sparkline([1.0], 0) == ""


@given(st.floats())
def test_every_number_has_words(value: float) -> None:
    """A forged file holds any float."""
    assert all([text_format.number(value), text_format.duration(value), text_format.moment(value)])
    assert not math.isfinite(value) or text_format.size(value)
