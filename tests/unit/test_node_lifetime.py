"""When the exporter of a node leaves."""

from torchobs.node.lifetime import VIEWER_WAIT_S, Departure, ServiceStatus


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_it_stays_while_a_rank_lives() -> None:
    """Whoever scrapes or does not: a living rank is served."""
    departure = Departure(60.0, Clock())
    assert not departure(ServiceStatus(alive=1, last_scrape_age_s=None, unscraped_final=0))
    assert not departure(ServiceStatus(alive=1, last_scrape_age_s=1e6, unscraped_final=1))
    assert not departure.decided


def test_it_leaves_as_soon_as_the_last_state_was_scraped() -> None:
    """Prometheus has all there is to know: nothing is waited for."""
    departure = Departure(60.0, Clock())
    assert not departure(ServiceStatus(alive=0, last_scrape_age_s=3.0, unscraped_final=2))
    assert departure(ServiceStatus(alive=0, last_scrape_age_s=0.1, unscraped_final=0))
    assert departure.decided


def test_a_last_state_waits_a_grace_for_a_scraper_that_never_came() -> None:
    """The grace begins when the last rank ends, not when the exporter began."""
    clock, fleet = Clock(), ServiceStatus(alive=0, last_scrape_age_s=None, unscraped_final=1)
    departure = Departure(60.0, clock)
    assert not departure(ServiceStatus(alive=1, last_scrape_age_s=None, unscraped_final=0))
    clock.now += 3600.0
    assert not departure(fleet)
    clock.now += 59.0
    assert not departure(fleet)
    clock.now += 1.0
    assert departure(fleet)


def test_the_grace_begins_again_with_every_scrape() -> None:
    """A scraper that comes every 45 s, and whose last scrape failed half-way, still gets the last state."""
    clock = Clock()
    departure = Departure(60.0, clock)
    for age_s in (30.0, 44.0, 1.0, 45.0):
        assert not departure(ServiceStatus(alive=0, last_scrape_age_s=age_s, unscraped_final=1))
        clock.now += 1000.0
    assert departure(ServiceStatus(alive=0, last_scrape_age_s=60.0, unscraped_final=1))


def test_a_restarted_rank_ends_the_wait() -> None:
    """An elastic restart within the grace: the time alone is counted anew."""
    clock, alone = Clock(), ServiceStatus(alive=0, last_scrape_age_s=None, unscraped_final=1)
    departure = Departure(60.0, clock)
    assert not departure(alone)
    clock.now += 59.0
    assert not departure(ServiceStatus(alive=1, last_scrape_age_s=None, unscraped_final=1))
    clock.now += 59.0
    assert not departure(alone)


def test_files_that_were_cleaned_away_are_not_waited_for() -> None:
    """No rank, nothing to scrape."""
    assert Departure(60.0, Clock())(ServiceStatus(alive=0, last_scrape_age_s=None, unscraped_final=0))


def test_it_stays_for_who_looks_at_the_page_of_a_run_that_has_ended() -> None:
    """To be read, and not for ever; what was scraped is no reason to leave meanwhile."""
    clock = Clock()
    departure = Departure(60.0, clock)
    watched = ServiceStatus(alive=0, last_scrape_age_s=1.0, unscraped_final=0, viewers=1)
    assert not departure(watched)
    clock.now += VIEWER_WAIT_S - 1
    assert not departure(watched)
    assert departure(ServiceStatus(alive=0, last_scrape_age_s=1.0, unscraped_final=0))
    clock.now += 1
    assert departure(watched)
