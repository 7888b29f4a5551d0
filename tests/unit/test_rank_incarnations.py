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


def test_the_predecessor_goes_though_it_hangs_for_ever_if_the_launcher_counted_a_restart() -> None:
    """A rank that survived its own restart is no second rank."""
    old = claim("aaaaaaaa", 0, until_s=9000, restart=0)
    assert resolve([old, claim("bbbbbbbb", 100, until_s=9000, restart=1)]) == {"bbbbbbbb": ""}


def test_two_that_live_side_by_side_get_two_labels() -> None:
    """Two scripts started with one run id: the newer is the rank, the older has its incarnation behind it."""
    old, new = claim("aaaaaaaa11", 0, until_s=200), claim("bbbbbbbb22", 100, until_s=200)
    assert resolve([old, new]) == {"bbbbbbbb22": "", "aaaaaaaa11": "-aaaaaaaa"}


def test_the_labels_do_not_change_when_one_of_two_ends() -> None:
    """What is decided comes from the files alone: no series changes its name, not by an exporter's restart either."""
    old, new = claim("aaaaaaaa", 0, until_s=104), claim("bbbbbbbb", 100, until_s=500)
    assert (
        resolve([old, new]) == resolve([old, new._replace(heartbeat_ns=900 * S)]) == {"bbbbbbbb": "", "aaaaaaaa": "-aaaaaaaa"}
    )


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
