"""The live page in a real browser: what it costs, what can be read and reached, and that it lives."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import support
from tests.chromium import Browser, Tab
from tests.exporters import Service
from tests.rank_files import RESOURCE, live_rank, train
from tests.support import wait_until
from torchobs import catalog
from torchobs.exporter import page
from torchobs.exporter.config import ExporterConfig
from torchobs.flight.directory import open_place
from torchobs.flight.layout import MIN_SIZE, Exit
from torchobs.flight.value_blocks import CORE
from torchobs.flight.writer import FlightWriter, open_writer
from torchobs.ranks import live, state

HOSTILE = "</bdi><img src=x onerror=document.title='owned'><script>document.title='owned'</script>"
MANY = 1000
TAB = 9

CONTRASTS = """(() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => (c /= 255) <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const colour = parse(getComputedStyle(one).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
    const [one, other] = [light(parse(getComputedStyle(element).color)), light(behind(element))].sort((a, b) => b - a);
    found.push([Math.round(100 * (one + .05) / (other + .05)) / 100, walker.currentNode.data.trim().slice(0, 40)]);
  }
  return found.sort((a, b) => a[0] - b[0]);
})()"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser for all tests; its start is half of what it does in one."""
    if reason := support.why_missing("chromium"):
        pytest.skip(reason)
    with Browser("chromium", tmp_path_factory.mktemp("chromium") / "profile") as browser:
        yield browser


@pytest.fixture
def browser(running: Browser) -> Iterator[Browser]:
    """The browser, without a page."""
    yield running
    running.close_tabs()


@pytest.fixture
def ranks(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FlightWriter]]:
    """Two living ranks with something in every part of the page; their files have all the time that they take.

    Nobody beats their hearts, and they respond all the same.
    """
    monkeypatch.setattr(state, "UNRESPONSIVE_AFTER_S", 600.0)
    monkeypatch.setattr(page, "DEADLINE_S", 20.0)
    monkeypatch.setattr(live, "EVENTS_S", 20.0)
    writers = [live_rank(flight_dir, rank=rank, job_name=HOSTILE) for rank in range(2)]
    for writer in writers:
        train(writer, range(1, 41))
        for metric, value, attributes in (
            (catalog.GRAD_LAYER_NORM, 0.25, {"layer": HOSTILE}),
            (catalog.GRAD_LAYER_NORM, 0.75, {"layer": "blocks.0"}),
            (catalog.AMP_SCALE, 65536.0, {"scaler": "0"}),
            (catalog.COMPILE_IN_PROGRESS, 1.0, {}),
            (catalog.MEMORY_HOST_RSS, 4e8, {}),
            (catalog.MEMORY_HOST_UTILIZATION, 0.93, {"limit": "cgroup"}),
            (catalog.STEPS_PLANNED, 400.0, {}),
            (catalog.ANOMALY_ACTIVE, 1.0, {"kind": "gradient_explosion"}),
        ):
            cell = writer.table.open(metric, attributes, CORE)
            assert cell is not None
            cell.set(value)
        writer.event("torchobs.anomaly", {"kind": "nonfinite_loss", "value": "NaN"}, 12)
        writer.event(HOSTILE, {"message": HOSTILE}, 13)
        writer.publish()
    yield writers
    for writer in writers:
        writer.close()


def text_of(tab: Tab, selector: str) -> str:
    """What stands in an element."""
    return str(tab.run(f"document.querySelector({selector!r})?.textContent ?? ''"))


def is_live(tab: Tab) -> bool:
    """Whether the page follows the run."""
    return text_of(tab, "#link") == "Live"


def test_the_page_lives_and_complains_of_nothing(browser: Browser, exporter: Service, ranks: list[FlightWriter]) -> None:
    """A step is shown without reloading; names that want to be HTML are text; everything comes from the exporter.

    The button holds the stream, and lets it go on.
    """
    tab = browser.tab(f"http://{exporter.address}/")
    wait_until(lambda: is_live(tab))
    for writer in ranks:
        train(writer, [41])
    wait_until(lambda: "step 41" in text_of(tab, ".sentence"))
    assert tab.run("document.title").endswith("– torchobs")
    assert HOSTILE in text_of(tab, "h1")
    assert HOSTILE in text_of(tab, "#layers")
    assert HOSTILE in text_of(tab, "#events")
    assert not tab.run("document.querySelectorAll('img, main script').length")
    assert tab.complaints == []
    assert all(url.startswith((f"http://{exporter.address}/", "data:,")) for url in tab.requests)
    tab.run("document.getElementById('pause').click()")
    assert text_of(tab, "#link") == "Paused"
    for writer in ranks:
        train(writer, [42])
    time.sleep(1.5)
    assert "step 41" in text_of(tab, ".sentence")
    tab.run("document.getElementById('pause').click()")
    wait_until(lambda: is_live(tab) and "step 42" in text_of(tab, ".sentence"))


def test_it_says_when_the_exporter_is_gone_and_comes_back_by_itself(
    browser: Browser, flight_dir: Path, ranks: list[FlightWriter]
) -> None:
    """On the port that it had."""
    config = ExporterConfig(flight_dir=str(flight_dir), mode="node")
    with Service(config) as first:
        tab = browser.tab(f"http://{first.address}/")
        wait_until(lambda: is_live(tab))
    wait_until(lambda: "trying again" in text_of(tab, "#link"))
    with Service(config, listen=first.address):
        wait_until(lambda: is_live(tab), timeout_s=20)
    assert len(ranks) == 2


def test_it_says_that_the_run_has_ended_and_keeps_its_last_state(browser: Browser, flight_dir: Path) -> None:
    """An exporter that leaves after the last rank is no error: nothing is red, and what was shown stays."""
    writer = live_rank(flight_dir)
    train(writer, range(1, 8))
    with Service(ExporterConfig(flight_dir=str(flight_dir), mode="node")) as exporter:
        tab = browser.tab(f"http://{exporter.address}/")
        wait_until(lambda: is_live(tab))
        writer.exit(Exit.FINISHED, 0)
        writer.close()
        wait_until(lambda: "Finished: 1 rank, 7 steps" in text_of(tab, ".sentence"))
    wait_until(lambda: "The run has ended" in text_of(tab, "#link"))
    assert tab.run("document.getElementById('link').dataset.state") == "still"
    time.sleep(2.0)  # in which a page that took this for an error would have asked again
    assert "The run has ended" in text_of(tab, "#link")
    assert "Finished: 1 rank, 7 steps" in text_of(tab, ".sentence")


def test_without_script_it_is_all_there(browser: Browser, exporter: Service, ranks: list[FlightWriter]) -> None:
    """But for the button, and for being live."""
    tab = browser.tab(f"http://{exporter.address}/?rank=1", script=False)
    html = exporter.page("/?rank=1")
    tab.call("Emulation.setScriptExecutionDisabled", {"value": False})  # to look at what was made without
    assert tab.run("document.querySelectorAll('#curves svg path.line').length") == 3
    assert tab.run("document.querySelectorAll('#ranks tbody tr').length") == 2
    assert tab.run("document.getElementById('pause').hidden")
    assert "As of when it was loaded" in html
    assert len(ranks) == 2


def test_it_can_be_read_at_any_width_by_day_and_by_night(
    browser: Browser, exporter: Service, ranks: list[FlightWriter]
) -> None:
    """What is wider than the window is a table, and scrolls by itself; text stands out by 4.5 : 1 (WCAG 2.2, 1.4.3)."""
    ranks.pop().close()  # for a state that is no good
    for width, dark in ((320, False), (800, True), (1400, False)):
        tab = browser.tab(f"http://{exporter.address}/", width=width, dark=dark)
        wait_until(lambda tab=tab: is_live(tab))  # type: ignore[misc]  # bound in the loop
        assert tab.run("document.documentElement.scrollWidth") <= width
        contrasts = tab.run(CONTRASTS)
        assert len(contrasts) > 50
        assert contrasts[0][0] >= 4.5, contrasts[:5]
        browser.close_tabs()


def test_it_is_reached_by_keyboard_and_named_for_who_hears_it(
    browser: Browser, exporter: Service, ranks: list[FlightWriter]
) -> None:
    """In the order in which it is read; every region, table, header cell and chart has its name or its scope."""
    tab = browser.tab(f"http://{exporter.address}/")
    wait_until(lambda: is_live(tab))
    tab.run("document.getElementById('pause').click()")
    reached = []
    for _ in range(60):
        tab.press("Tab", TAB)
        reached.append(tab.run("document.activeElement.textContent.slice(0, 20) + '|' + document.activeElement.tagName"))
        if reached[-1].endswith("|BODY"):
            break
    order = [name for name in reached if name.endswith(("|A", "|BUTTON"))]
    assert order[:5] == ["Skip to the ranks|A", "Resume|BUTTON", "Metrics|A", "API|A", "healthy|A"]
    assert {"rank|A", "state|A", "0|A", "1|A", "layer|A"} <= {*order}
    assert sum(name.endswith("|DIV") for name in reached) == 3  # the tables, which scroll
    assert tab.run("document.querySelectorAll('header, main, footer, nav[aria-label], section[aria-label]').length") >= 10
    assert not tab.run("document.querySelectorAll('table:not(:has(caption)), th:not([scope])').length")
    assert not tab.run("document.querySelectorAll('svg:not([aria-hidden]):not([role=img][aria-label])').length")
    assert tab.run("document.querySelector('[role=status][aria-live=polite]').textContent").startswith("Training, 2 of 2")
    tab.run("document.getElementById('pause').click()")  # elements are changed, not replaced: the focus stays where it is
    wait_until(lambda: is_live(tab))
    tab.run("document.querySelector('#ranks tbody a').focus()")
    for step in (41, 42):
        for writer in ranks:
            train(writer, [step])
        wait_until(lambda step=step: f"step {step}" in text_of(tab, ".sentence"))  # type: ignore[misc]  # bound in the loop
    assert tab.run("document.activeElement.closest('tbody') !== null")


def test_a_page_stays_with_its_run_when_another_begins(browser: Browser, exporter: Service, flight_dir: Path) -> None:
    """It was opened before either; its heading, its numbers and its links are of the first, and the list has both."""
    tab = browser.tab(f"http://{exporter.address}/")
    wait_until(lambda: is_live(tab))
    assert text_of(tab, "h1") == "torchobs exporter"
    first = live_rank(flight_dir, run_id="a")
    train(first, range(1, 4))
    wait_until(lambda: text_of(tab, "h1") == "gpt a" and is_live(tab))
    second = live_rank(flight_dir, run_id="b")
    train(second, range(1, 90))
    wait_until(lambda: "step 89" in text_of(tab, "#runs"))
    train(first, [4])
    wait_until(lambda: "step 4" in text_of(tab, ".sentence"))
    assert text_of(tab, "h1") == "gpt a"
    assert "run=gpt%2Fa" in tab.run("document.querySelector('#ranks th a').href")
    tab.run("document.querySelector('#runs a').click()")
    wait_until(lambda: text_of(tab, "h1") == "gpt b" and "step 89" in text_of(tab, ".sentence"))
    assert tab.complaints == []
    first.close()
    second.close()


@pytest.fixture
def crowd(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FlightWriter]]:
    """A thousand ranks in small files; their heartbeats stand still, and none is unresponsive for it."""
    monkeypatch.setattr(state, "UNRESPONSIVE_AFTER_S", 600.0)
    resources = [{**RESOURCE, "rank": rank, "local_world_size": MANY} for rank in range(MANY)]
    writers = [open_writer(open_place(str(flight_dir), None), resource, MIN_SIZE) for resource in resources]
    for writer in writers:
        train(writer, range(1, 33))
    yield writers
    for writer in writers:
        writer.close()


@pytest.mark.serial
def test_a_thousand_ranks_stay_usable(browser: Browser, crowd: list[FlightWriter], exporter: Service) -> None:
    """A page of them is shown, the worst first; it is there within seconds and costs the browser little."""
    wait_until(lambda: "1,000 of 1,000" in exporter.page("/"), timeout_s=30)  # the first scan opens all files
    began = time.perf_counter()
    tab = browser.tab(f"http://{exporter.address}/")
    assert time.perf_counter() - began < 10  # 2 s on two cores that others use, too
    assert "1–50 of 1,000" in text_of(tab, "#ranks caption")
    assert tab.run("document.querySelectorAll('#ranks tbody tr').length") == 50
    assert "1,000 alive" in text_of(tab, "#ranks tfoot")
    wait_until(lambda: is_live(tab), timeout_s=30)
    for writer in crowd:
        train(writer, [33])
    before = tab.metrics()
    wait_until(lambda: "step 33" in text_of(tab, ".sentence"), timeout_s=30)
    spent = tab.metrics()["TaskDuration"] - before["TaskDuration"]
    assert spent < 2.0  # 0.15 s of eight
    tab.go(f"http://{exporter.address}/?sort=rank&page=20")
    assert "951–1,000 of 1,000" in text_of(tab, "#ranks caption")
    assert tab.complaints == []
