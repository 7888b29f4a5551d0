"""Whom an exporter waits for before it leaves."""

from torchobs.exporter.prometheus.scrape_tracker import ScrapeTracker


def scraped(*times_s: float, number: int = 1, declared: bool = True) -> ScrapeTracker:
    """Scrapes of one scraper at these times."""
    made = ScrapeTracker()
    for time_s in times_s:
        made.note("prometheus", number, time_s, declared=declared)
    return made


def test_nobody_is_waited_for_when_nobody_scraped() -> None:
    """A Job that ends before its first scrape ends."""
    assert ScrapeTracker().waiting(1, 0.0) == []
    assert ScrapeTracker().last_s is None


def test_a_scraper_is_waited_for_until_it_has_the_final_snapshot() -> None:
    """By number, not by time: the page it got may be older than the request."""
    scrapers = scraped(0, 15, number=7)
    assert scrapers.waiting(7, 20.0) == []
    assert scrapers.waiting(8, 20.0) == ["prometheus"]
    scrapers.note("prometheus", 8, 30.0, declared=True)
    assert scrapers.waiting(8, 31.0) == []
    assert scrapers.got(8)
    assert not scrapers.got(9)


def test_each_of_two_scrapers_is_waited_for() -> None:
    """A pair of Prometheus is the usual way to have no gap."""
    scrapers = scraped(0, 15, number=8)
    scrapers.note("other", 7, 16.0, declared=True)
    assert scrapers.waiting(8, 17.0) == ["other"]


def test_a_scraper_that_missed_two_scrapes_is_gone() -> None:
    """A Prometheus that moved to another node comes back with another address."""
    scrapers = scraped(0, 15, 30)
    assert scrapers.waiting(2, 30 + 2.5 * 15 + 5) == ["prometheus"]
    assert scrapers.waiting(2, 30 + 2.5 * 15 + 5.1) == []


def test_a_scraper_seen_once_is_expected_for_five_minutes() -> None:
    """Its interval is not known yet; no usual one is longer."""
    assert scraped(0).waiting(2, 300.0) == ["prometheus"]
    assert scraped(0).waiting(2, 300.1) == []


def test_a_person_with_curl_is_not_waited_for() -> None:
    """One request without a scrape timeout is no scraper; a second one may be."""
    assert scraped(0, declared=False).waiting(2, 1.0) == []
    assert scraped(0, 10, declared=False).waiting(2, 11.0) == ["prometheus"]


def test_names_made_up_by_the_thousand_cost_no_memory() -> None:
    """The oldest are forgotten."""
    scrapers = ScrapeTracker()
    for index in range(10_000):
        scrapers.note(f"curl/{index}", 1, float(index), declared=True)
    assert len(scrapers.waiting(2, 10_000.0)) == 64


def test_a_page_with_a_counter_held_at_zero_is_not_the_final_state() -> None:
    """An exporter that leaves waits until what was held back has been scraped, too."""
    scrapers = scraped(0, 15)
    scrapers.note("prometheus", 2, 30.0, declared=True, final=False)
    assert scrapers.acknowledged(30.0) == 2
    assert (scrapers.waiting(2, 30.0), scrapers.got(2)) == (["prometheus"], False)
    scrapers.note("prometheus", 3, 45.0, declared=True)
    assert (scrapers.waiting(3, 45.0), scrapers.got(3)) == ([], True)


def test_what_is_acknowledged_is_what_the_slowest_expected_scraper_has() -> None:
    """One that has gone holds nobody up."""
    scrapers = scraped(0, 15)
    scrapers.note("other", 5, 16.0, declared=True)
    assert scrapers.acknowledged(16.0) == 1
    assert scrapers.acknowledged(15 + 2.5 * 15 + 5.1) == 5
    assert ScrapeTracker().acknowledged(0.0) == 0
