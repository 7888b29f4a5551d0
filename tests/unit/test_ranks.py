"""Ranks as files show them: incarnations, labels, and states."""

import itertools
import re

import pytest

from torchobs import catalog
from torchobs.catalog import SECONDS_BOUNDS
from torchobs.exporter import api_schema
from torchobs.flight.format.layout import Exit
from torchobs.flight.reader.decode import Distribution
from torchobs.ranks import labels
from torchobs.ranks import state as rank_state
from torchobs.ranks.rank_file import OVERLAP_NS, RankCandidate, resolve
from torchobs.ranks.state import MemoryUse, Observation

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


def test_identity_is_three_texts() -> None:
    """As the resource has them."""
    assert labels.identity({"job_name": "gpt", "run_id": "r", "rank": 3}) == ("gpt", "r", "3")


@pytest.mark.parametrize("resource", [{}, {"job_name": "", "run_id": "", "rank": ""}, {"rank": -1}, {"rank": "0-aaaaaaaa"}])
def test_a_missing_identity_is_unknown(resource: dict[str, object]) -> None:
    """An empty label is no label, and the joins need all three; a rank is a number, or could pass for a duplicate's."""
    assert labels.identity(resource) == ("unknown", "unknown", "unknown")


def test_lone_surrogates_do_not_fail_the_page() -> None:
    """JSON admits them, UTF-8 does not."""
    assert labels.text("a\ud800b") == "a?b"
    assert labels.text('ünï\n"\\') == 'ünï\n"\\'


@pytest.mark.parametrize(
    ("value", "text"),
    [("x", "x"), (1, "1"), (1.5, "1.5"), (True, "true"), ([1, "a"], '[1,"a"]'), ("", ""), (None, "null")],
)
def test_values_are_written_as_opentelemetry_does(value: object, text: str) -> None:
    """Numbers and lists are JSON, as in Prometheus' own translation."""
    assert labels.text(value) == text


def test_attributes_are_translated_as_prometheus_does() -> None:
    """Dots become underscores, a leading digit gets a key."""
    assert labels.of_attributes([("a.b", "x"), ("1st", "y"), ("_z", 1)]) == {"a_b": "x", "key_1st": "y", "key_z": "1"}


@pytest.mark.parametrize("name", ["job_name", "run_id", "rank", "le", "job.name", "job", "instance"])
def test_an_attribute_that_is_called_as_ours_is_exported(name: str) -> None:
    """A user's `rank` must not make another rank's series, nor a user's `job` take the scrape's, on the page or in a push."""
    assert labels.of_attributes([(name, "x")]) == {f"exported_{name.replace('.', '_')}": "x"}
    assert labels.pushed_name(name) == f"exported_{name.replace('.', '_')}"


@pytest.mark.parametrize("name", ["a.b", "1st", "_z", "größe", "key____", "exported.x", "http.route"])
def test_a_name_that_prometheus_accepts_is_pushed_as_it_is(name: str) -> None:
    """Other receivers keep it."""
    assert labels.pushed_name(name) == name


@pytest.mark.parametrize("name", ["", "__", "_", "ключ", "__name__", "__address__", "é_x"])
def test_a_name_that_prometheus_refuses_or_drops_is_pushed_as_its_label(name: str) -> None:
    """One such name would cost the whole request."""
    assert {labels.pushed_name(name): "x"} == labels.of_attributes([(name, "x")])


@pytest.mark.parametrize("name", ["__name__", "__address__", "__", "_", ""])
def test_no_attribute_can_be_a_label_of_prometheus_own(name: str) -> None:
    """`__name__` would rename the series, the others vanish."""
    (label,) = labels.of_attributes([(name, "x")])
    assert label.startswith("key")


def test_names_that_become_one_share_it() -> None:
    """Joined by a semicolon, as Prometheus does."""
    assert labels.of_attributes([("a.b", "1"), ("a_b", "2")]) == {"a_b": "1;2"}


def test_an_empty_value_is_no_label() -> None:
    """Prometheus takes it for none, and two series would be one."""
    assert labels.of_attributes([("a", "")]) == {}


def test_the_info_holds_what_describes_the_rank_and_nothing_else() -> None:
    """Facts, Kubernetes' names, the user's attributes, as a rank writes them; not what is a series already."""
    resource = {
        "rank": 0,
        "job_name": "gpt",
        "world_size": 8,
        "restart": 1,
        "local_rank": 0,
        "host": "n1",
        "pid": 7,
        "trace_id": "a" * 32,
        "k8s.pod.name": "p",
        "team": "vision",
        "hos.t": "",
        "ho.st": "x",
        "ho-st": "y",
        "run.id": "liar",
        "job": "mine",
        "instance": "this",
    }
    assert labels.of_info(resource) == {
        "local_rank": "0",
        "host": "n1",
        "k8s_pod_name": "p",
        "team": "vision",
        "ho_st": "x;y",
        "exported_run_id": "liar",
        "exported_job": "mine",
        "exported_instance": "this",
    }


@pytest.mark.parametrize("value", [-1, 1 << 53, 10**400, "7", 1.0, None])
def test_a_number_that_is_none_is_absent(value: object) -> None:
    """A float cannot hold every integer that JSON can."""
    assert labels.number({"restart": value}, "restart") is None
    assert labels.number({"restart": 7}, "restart") == 7


@pytest.mark.parametrize(
    "rank",
    [
        labels.identity({"rank": 0, **group})[2] + suffix
        for group in ({}, {"replica_group": 12})
        for suffix in ("", "-3f9a12bc")
    ],
)
def test_the_api_takes_every_rank_that_is_served(rank: str) -> None:
    """Its number, its replica group, and the digits of a second process."""
    assert re.fullmatch(api_schema.RANK, rank)


ALIVE = Observation(
    same_boot=True,
    lock_held=True,
    beat_age_s=0.3,
    exit_reason=None,
    exit_code=0,
    phase="forward",
    quiet_s=0.1,
    hang_timeout_s=60.0,
)
GONE = ALIVE._replace(lock_held=False, beat_age_s=1.0)


def durations(**counts: int) -> Distribution:
    """A histogram of step times: `durations(b8=3)` is three steps of at most `SECONDS_BOUNDS[8]`."""
    buckets = [0] * (len(SECONDS_BOUNDS) + 1)
    for name, count in counts.items():
        buckets[int(name[1:])] = count
    return Distribution(tuple(buckets), 1.0, 0.1, 5000.0)


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        (ALIVE, "alive"),
        (ALIVE._replace(beat_age_s=2.0), "alive"),
        (ALIVE._replace(beat_age_s=2.1), "unresponsive"),
        (ALIVE._replace(beat_age_s=2.1, quiet_s=1e6), "unresponsive"),
        (ALIVE._replace(quiet_s=60.0), "alive"),
        (ALIVE._replace(quiet_s=60.1), "hung"),
        (ALIVE._replace(quiet_s=1e6, phase=None), "hung"),
        (ALIVE._replace(quiet_s=1e6, phase="evaluation"), "alive"),
        (ALIVE._replace(quiet_s=1e6, phase="checkpoint"), "alive"),
        (ALIVE._replace(quiet_s=1e6, phase="compile"), "alive"),
        (ALIVE._replace(quiet_s=1e6, phase="idle"), "alive"),
        (ALIVE._replace(quiet_s=None), "alive"),
        (GONE, "lost"),
        (GONE._replace(exit_reason=Exit.FINISHED), "finished"),
        (GONE._replace(exit_reason=Exit.EXIT_CODE, exit_code=0), "finished"),
        (GONE._replace(exit_reason=Exit.EXIT_CODE, exit_code=3), "failed"),
        (GONE._replace(exit_reason=Exit.EXIT_CODE, exit_code=-9), "failed"),
        (GONE._replace(exit_reason=Exit.EXCEPTION, exit_code=1), "failed"),
        (GONE._replace(exit_reason=Exit.TERMINATED, exit_code=143), "failed"),
        (GONE._replace(exit_reason=77), "lost"),
    ],
)
def test_each_state_follows_from_what_was_seen(seen: Observation, state: str) -> None:
    """Heartbeat and lock decide who lives, the exit word how it ended, the learned timeout who hangs."""
    assert rank_state.judge(seen) == state
    assert state in catalog.RANK_STATES


def test_a_free_lock_alone_is_no_death() -> None:
    """A process that closes descriptors it does not know loses its lock and lives on: its heartbeat shows it."""
    seen = GONE._replace(beat_age_s=0.2)
    assert rank_state.judge(seen) == "alive"
    assert rank_state.fading(seen)
    assert not rank_state.fading(GONE)
    assert not rank_state.fading(ALIVE)


def test_a_free_lock_and_an_exit_word_are_the_end_at_once() -> None:
    """Who has said how it ends, and let go of the lock, needs no second look."""
    assert rank_state.judge(GONE._replace(beat_age_s=0.0, exit_reason=Exit.FINISHED)) == "finished"


def test_who_is_torn_down_after_its_last_word_has_ended() -> None:
    """29 ms per GiB, a core dump 11 s: the lock is held that long, and it is not called unresponsive."""
    assert rank_state.judge(ALIVE._replace(beat_age_s=5.0, exit_reason=Exit.FINISHED)) == "finished"
    assert rank_state.judge(ALIVE._replace(beat_age_s=5.0, exit_reason=Exit.EXCEPTION)) == "failed"


def test_an_exit_word_does_not_end_who_goes_on_living() -> None:
    """A notebook survives an exception: the heartbeat counts."""
    assert rank_state.judge(ALIVE._replace(exit_reason=Exit.EXCEPTION)) == "alive"


def test_nothing_of_another_boot_lives() -> None:
    """Its lock and its CLOCK_MONOTONIC mean nothing here."""
    seen = ALIVE._replace(same_boot=False)
    assert rank_state.judge(seen) == "lost"
    assert not rank_state.fading(seen)


def test_the_hang_timeout_is_learned_from_the_ranks_own_steps() -> None:
    """20 times the 99th percentile, from 60 s on; half an hour before the first step."""
    assert rank_state.hang_timeout_s(None, SECONDS_BOUNDS) == rank_state.FIRST_STEP_S
    assert rank_state.hang_timeout_s(durations(), SECONDS_BOUNDS) == rank_state.FIRST_STEP_S
    assert rank_state.hang_timeout_s(durations(b8=1000), SECONDS_BOUNDS) == 60.0
    four_s = SECONDS_BOUNDS.index(4.0)
    assert rank_state.hang_timeout_s(durations(**{f"b{four_s}": 100}), SECONDS_BOUNDS) == 80.0


def test_one_slow_step_among_a_hundred_is_not_the_usual() -> None:
    """A compilation or a cold cache at the start must not make the timeout hours long."""
    slow, usual = len(SECONDS_BOUNDS) - 1, SECONDS_BOUNDS.index(4.0)
    assert rank_state.hang_timeout_s(durations(**{f"b{usual}": 99, f"b{slow}": 1}), SECONDS_BOUNDS) == 80.0
    assert rank_state.hang_timeout_s(durations(**{f"b{usual}": 98, f"b{slow}": 2}), SECONDS_BOUNDS) == 20 * 1024.0


def test_a_slow_first_step_does_not_hide_a_hang_soon_after_it() -> None:
    """Of few steps the percentile is the longest. A single one is all that is known; a second long one is no exception."""
    slow, usual = SECONDS_BOUNDS.index(32.0), SECONDS_BOUNDS.index(0.125)
    assert rank_state.hang_timeout_s(durations(**{f"b{usual}": 2, f"b{slow}": 1}), SECONDS_BOUNDS) == 64.0
    assert rank_state.hang_timeout_s(durations(**{f"b{usual}": 98, f"b{slow}": 1}), SECONDS_BOUNDS) == 64.0
    assert rank_state.hang_timeout_s(durations(**{f"b{slow}": 1}), SECONDS_BOUNDS) == 20 * 32.0
    assert rank_state.hang_timeout_s(durations(**{f"b{usual}": 9, f"b{slow}": 2}), SECONDS_BOUNDS) == 20 * 32.0


def test_a_step_that_takes_long_again_and_again_is_no_hang() -> None:
    """One rollout to hundreds of minibatches is beyond the percentile; twice the longest but one is time enough."""
    long, usual = SECONDS_BOUNDS.index(128.0), SECONDS_BOUNDS.index(0.125)
    assert rank_state.hang_timeout_s(durations(**{f"b{usual}": 999, f"b{long}": 1}), SECONDS_BOUNDS) == 60.0
    assert rank_state.hang_timeout_s(durations(**{f"b{usual}": 998, f"b{long}": 2}), SECONDS_BOUNDS) == 256.0


def test_steps_beyond_the_last_bound_count_as_the_longest() -> None:
    """The overflow bucket has no bound of its own."""
    assert rank_state.hang_timeout_s(durations(**{f"b{len(SECONDS_BOUNDS)}": 5}), SECONDS_BOUNDS) == 20 * 5000.0


@pytest.mark.parametrize("reason", [None, Exit.FINISHED, Exit.EXCEPTION, Exit.EXIT_CODE, 99])
@pytest.mark.parametrize("code", [0, 1, -15])
def test_every_ending_has_a_series_created_beforehand(reason: int | None, code: int) -> None:
    """Reasons and states are those of the catalog, whatever the exit word says."""
    for memory in (None, MemoryUse(), MemoryUse(cgroup=1.0)):
        state, why = rank_state.ending(reason, code, memory)
        assert state in set(catalog.RANK_STATES) - rank_state.LIVING
        assert why in catalog.EXIT_REASONS


@pytest.mark.parametrize(
    ("memory", "why"),
    [
        (None, "lost"),
        (MemoryUse(), "lost"),
        (MemoryUse(cgroup=0.949, machine=0.979), "lost"),
        (MemoryUse(cgroup=0.95), "out_of_memory"),
        (MemoryUse(machine=0.98), "out_of_memory"),
        (MemoryUse(kill_age_s=60.0), "out_of_memory"),
        (MemoryUse(kill_age_s=61.0), "lost"),
    ],
)
def test_who_vanishes_near_a_limit_likely_ran_out_of_memory(memory: MemoryUse | None, why: str) -> None:
    """The state is lost all the same: nobody saw the kernel do it."""
    assert rank_state.ending(None, 0, memory) == ("lost", why)


def test_who_is_told_to_end_has_not_failed_by_itself() -> None:
    """The mark of a SIGTERM, and the status of a program that handles it itself; and it is not for memory, however full."""
    full = MemoryUse(cgroup=1.0, machine=1.0, kill_age_s=0.0)
    for reason, code in ((Exit.TERMINATED, 143), (Exit.EXIT_CODE, 143), (Exit.EXIT_CODE, -15)):
        assert rank_state.ending(reason, code, full) == ("failed", "terminated")
    assert rank_state.ending(Exit.EXIT_CODE, 137) == ("failed", "exit_code")


def test_who_said_how_it_ends_did_not_run_out_of_memory() -> None:
    """An exit word is a word, at whatever limit."""
    full = MemoryUse(cgroup=1.0, machine=1.0, kill_age_s=0.0)
    assert rank_state.ending(Exit.FINISHED, 0, full) == ("finished", "finished")
    assert rank_state.ending(Exit.EXCEPTION, 1, full) == ("failed", "exception")
