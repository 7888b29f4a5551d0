"""Only the newest incarnation of a rank is served; two that live side by side are two."""

import itertools

from torchobs.ranks.incarnations import OVERLAP_NS, RankCandidate, resolve

S = 1_000_000_000
RANK = ("gpt", "run-1", "0")


def claim(incarnation: str, born_s: float, *, until_s: float | None = None, restart: int = 0) -> RankCandidate:
    """A claim to rank 0 by a process that was born at `born_s` and beat until `until_s`."""
    until_ns = round((born_s if until_s is None else until_s) * S)
    return RankCandidate(RANK, incarnation, same_boot=True, born_ns=round(born_s * S), restart=restart, heartbeat_ns=until_ns)


def test_one_claim_is_served() -> None:
    """As it is."""
    assert resolve([claim("aa", 1)]) == {"aa": ""}
    assert resolve([]) == {}


def test_five_elastic_restarts_leave_one() -> None:
    """The newest by birth, in whatever order the files are found."""
    restarts = [claim(f"{number}" * 8, number * 100, until_s=number * 100 + 90, restart=number) for number in range(5)]
    for order in itertools.permutations(restarts):
        assert resolve(order) == {"44444444": ""}


def test_the_predecessor_goes_at_once_though_it_is_still_dying() -> None:
    """A short overlap is one that ends while its successor starts."""
    old = claim("aaaaaaaa", 0, until_s=102)
    assert resolve([old, claim("bbbbbbbb", 100)]) == {"bbbbbbbb": ""}


def test_a_predecessor_that_may_be_dying_is_served_until_that_is_clear() -> None:
    """For three seconds at most: then it is a second process of the rank, and the younger one is beside it."""
    old, new = claim("aaaaaaaa11", 0, until_s=102), claim("bbbbbbbb22", 100, until_s=102)
    lives = old._replace(alive_ns=102 * S)
    assert resolve([lives, new]) == {"aaaaaaaa11": ""}
    assert resolve([lives._replace(heartbeat_ns=104 * S), new]) == {"aaaaaaaa11": "", "bbbbbbbb22": "-bbbbbbbb"}
    assert resolve([old, new]) == {"bbbbbbbb22": ""}


def test_the_predecessor_goes_though_it_hangs_for_ever_if_the_launcher_counted_a_restart() -> None:
    """A rank that survived its own restart is no second rank, be the launcher unknown or the same."""
    old = claim("aaaaaaaa", 0, until_s=9000, restart=0)._replace(alive_ns=9000 * S)
    new = claim("bbbbbbbb", 100, until_s=9000, restart=1)
    assert resolve([old, new]) == {"bbbbbbbb": ""}
    assert resolve([old._replace(launch="x"), new._replace(launch="x")]) == {"bbbbbbbb": ""}


def test_another_launcher_s_restart_replaces_nothing() -> None:
    """Two jobs with one id, of which the younger restarts its rank: the older's series is not the younger's."""
    old = claim("aaaaaaaa", 0, until_s=900)._replace(launch="x")
    first = claim("bbbbbbbb", 100, until_s=300)._replace(launch="y")
    again = claim("cccccccc", 310, until_s=900, restart=1)._replace(launch="y")
    assert resolve([old, first, again]) == {"aaaaaaaa": "", "cccccccc": "-cccccccc"}


def test_a_process_that_launched_the_rank_is_none() -> None:
    """It lives as long as the ranks that it started by ``multiprocessing``."""
    launcher = claim("aaaaaaaa", 0, until_s=900)._replace(alive_ns=900 * S)
    assert resolve([launcher, claim("bbbbbbbb", 5, until_s=900)._replace(launched_by="aaaaaaaa")]) == {"bbbbbbbb": ""}


def test_two_that_live_side_by_side_get_two_labels() -> None:
    """Two scripts started with one run id: the older is the rank, the younger has its incarnation behind it."""
    old, new = claim("aaaaaaaa11", 0, until_s=200), claim("bbbbbbbb22", 100, until_s=200)
    assert resolve([old, new]) == {"aaaaaaaa11": "", "bbbbbbbb22": "-bbbbbbbb"}


def test_the_labels_do_not_change_when_one_of_two_ends() -> None:
    """What is decided comes from the files alone: no series changes its name, not by an exporter's restart either."""
    old, new = claim("aaaaaaaa", 0, until_s=104), claim("bbbbbbbb", 100, until_s=500)
    for until_s in (500, 900):
        assert resolve([old, new._replace(heartbeat_ns=until_s * S)]) == {"aaaaaaaa": "", "bbbbbbbb": "-bbbbbbbb"}


def test_the_younger_of_two_gets_another_label_after_its_restart() -> None:
    """And the older's successor the rank: no series goes back, whoever restarts first."""
    old, new = claim("aaaaaaaa", 0, until_s=104), claim("bbbbbbbb", 100, until_s=500)
    younger, older = claim("cccccccc", 501, until_s=900), claim("dddddddd", 300, until_s=900)
    assert resolve([old._replace(heartbeat_ns=900 * S), new, younger]) == {"aaaaaaaa": "", "cccccccc": "-cccccccc"}
    assert resolve([old, new, older, younger]) == {"dddddddd": "", "cccccccc": "-cccccccc"}


def test_who_was_displaced_does_not_take_the_rank_back() -> None:
    """It goes on beside the one that is in its place."""
    old, new = claim("aaaaaaaa", 0, until_s=200)._replace(displaced=True), claim("bbbbbbbb", 100, until_s=200)
    assert resolve([old, new]) == {"aaaaaaaa": "-aaaaaaaa", "bbbbbbbb": ""}
    assert resolve([old]) == {"aaaaaaaa": "-aaaaaaaa"}


def test_the_overlap_has_a_limit() -> None:
    """Exactly three seconds are still a succession."""
    new = claim("bbbbbbbb", 100)
    at_limit = claim("aaaaaaaa", 0)._replace(heartbeat_ns=new.born_ns + OVERLAP_NS)
    assert resolve([at_limit, new]) == {"bbbbbbbb": ""}
    assert len(resolve([at_limit._replace(heartbeat_ns=at_limit.heartbeat_ns + 1), new])) == 2


def test_ranks_runs_and_jobs_do_not_mix() -> None:
    """Each of the three names makes another rank."""
    others = [("gpt", "run-1", "1"), ("gpt", "run-2", "0"), ("bert", "run-1", "0")]
    claims = [claim(f"{number}" * 8, number)._replace(rank=rank) for number, rank in enumerate([RANK, *others])]
    assert resolve(claims) == {f"{number}" * 8: "" for number in range(4)}


def test_a_file_of_an_earlier_boot_is_older_whatever_its_clock_says() -> None:
    """Its times are wall clock times, far above any CLOCK_MONOTONIC."""
    earlier = claim("aaaaaaaa", 1_700_000_000)._replace(same_boot=False)
    assert resolve([earlier, claim("bbbbbbbb", 5)]) == {"bbbbbbbb": ""}


def test_born_in_the_same_tick_still_gives_one() -> None:
    """Eight processes started together had three distinct start ticks."""
    assert resolve([claim("aaaaaaaa", 1), claim("bbbbbbbb", 1)]) == {"bbbbbbbb": ""}
