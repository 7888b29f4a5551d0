"""Ranks as files show them: incarnations, labels, and states."""

from tests.support import for_each
from torchobs import catalog
from torchobs.catalog import SECONDS_BOUNDS
from torchobs.flight.layout import Exit
from torchobs.flight.reader import Distribution
from torchobs.ranks import labels
from torchobs.ranks import state as rank_state
from torchobs.ranks.rank_file import OVERLAP_NS, RankCandidate, resolve
from torchobs.ranks.state import MemoryUse, Observation

S = 1_000_000_000
RANK = ("gpt", "run-1", "0")


def claim(incarnation: str, born_s: float, *, until_s: float | None = None, restart: int = 0) -> RankCandidate:
    """A claim to rank 0 by a training that was born at `born_s` and beat until `until_s`."""
    until_ns, born_ns = round((born_s if until_s is None else until_s) * S), round(born_s * S)
    return RankCandidate(
        RANK, incarnation, same_boot=True, born_ns=born_ns, restart=restart, heartbeat_ns=until_ns, trains=True
    )


OLD, NEW = claim("aaaaaaaa", 0, until_s=200), claim("bbbbbbbb", 100, until_s=200)
DYING = OLD._replace(heartbeat_ns=102 * S)
BOTH = {"aaaaaaaa": "", "bbbbbbbb": "-bbbbbbbb"}


HANGING = claim("aaaaaaaa", 0, until_s=9000)._replace(alive_ns=9000 * S)
LAUNCHED = [
    claim("aaaaaaaa", 0, until_s=900)._replace(launch="x"),
    claim("bbbbbbbb", 100, until_s=300)._replace(launch="y"),
    claim("cccccccc", 310, until_s=900, restart=1)._replace(launch="y"),
]
ONLY_NEW, OLD_AND_THIRD = {"bbbbbbbb": ""}, {"aaaaaaaa": "", "cccccccc": "-cccccccc"}
EARLIER_BOOT = claim("aaaaaaaa", 1_700_000_000)._replace(same_boot=False)


@for_each(
    {
        "one claim": ([OLD], {"aaaaaaaa": ""}),
        "a short overlap: it ends while its successor starts": ([DYING, NEW], ONLY_NEW),
        "it may be dying: served until that is clear": ([DYING._replace(alive_ns=102 * S), NEW], {"aaaaaaaa": ""}),
        "it is not dying: two processes": ([OLD._replace(alive_ns=104 * S, heartbeat_ns=104 * S), NEW], BOTH),
        "two scripts with one run id, side by side": ([OLD, NEW], BOTH),
        "a helper that imports torch is no rank": ([OLD._replace(trains=False), NEW], ONLY_NEW),
        "one of two has ended: no series changes its name": ([OLD, NEW._replace(heartbeat_ns=900 * S)], BOTH),
        "the younger has restarted: another label, for no series goes back": (
            [OLD._replace(heartbeat_ns=900 * S), NEW, claim("cccccccc", 501, until_s=900)],
            OLD_AND_THIRD,
        ),
        "displaced: beside its successor": ([OLD._replace(displaced=True), NEW], {"aaaaaaaa": "-aaaaaaaa", "bbbbbbbb": ""}),
        "three seconds are a succession": ([OLD._replace(heartbeat_ns=NEW.born_ns + OVERLAP_NS), NEW], ONLY_NEW),
        "more than three seconds are not": ([OLD._replace(heartbeat_ns=NEW.born_ns + OVERLAP_NS + 1), NEW], BOTH),
        "a counted restart: the predecessor goes though it hangs for ever": (
            [HANGING, claim("bbbbbbbb", 100, until_s=9000, restart=1)],
            ONLY_NEW,
        ),
        "a restart that the same launcher counted": (
            [OLD._replace(alive_ns=900 * S, launch="x"), NEW._replace(restart=1, launch="x")],
            ONLY_NEW,
        ),
        "another launcher's restart replaces nothing": (LAUNCHED, OLD_AND_THIRD),
        "a process that started the rank by multiprocessing is none": (
            [OLD._replace(alive_ns=900 * S), NEW._replace(launched_by="aaaaaaaa")],
            ONLY_NEW,
        ),
        "an earlier boot: its times are far above any CLOCK_MONOTONIC": ([EARLIER_BOOT, claim("bbbbbbbb", 5)], ONLY_NEW),
    }
)
def test_which_incarnations_are_served(claims: list[RankCandidate], served: dict[str, str]) -> None:
    """Each with the suffix of its rank; what is decided comes from the files alone."""
    assert resolve(claims) == served


def test_a_missing_identity_is_unknown() -> None:
    """An empty label is no label, and the joins need all three; a rank is a number, or could pass for a duplicate's."""
    cases: list[dict[str, object]] = [{}, {"job_name": "", "run_id": "", "rank": ""}, {"rank": -1}, {"rank": "0-aaaaaaaa"}]
    for resource in cases:
        assert labels.identity({"job_name": "gpt", "run_id": "r", "rank": 3}) == ("gpt", "r", "3")
        assert labels.identity(resource) == ("unknown", "unknown", "unknown")


def test_values_are_written_as_opentelemetry_does() -> None:
    """Numbers and lists are JSON, as in Prometheus' own translation; of lone surrogates JSON is made, and UTF-8 is not."""
    cases = {"x": "x", 1: "1", 1.5: "1.5", "": "", None: "null", "a\ud800b": "a?b", 'ünï\n"\\': 'ünï\n"\\'}
    for value, text in ((True, "true"), ([1, "a"], '[1,"a"]'), *cases.items()):
        assert labels.text(value) == text


def test_attributes_are_translated_as_prometheus_does() -> None:
    """Dots become underscores, a leading digit gets a key."""
    cases: list[tuple[list[tuple[str, object]], dict[str, str]]] = [
        ([("a.b", "x"), ("1st", "y"), ("_z", 1)], {"a_b": "x", "key_1st": "y", "key_z": "1"}),
        ([("a.b", "1"), ("a_b", "2")], {"a_b": "1;2"}),  # joined by a semicolon, as Prometheus does
        ([("a", "")], {}),  # Prometheus takes it for none, and two series would be one
    ]
    for attributes, translated in cases:
        assert labels.of_attributes(attributes) == translated


def test_an_attribute_that_is_called_as_ours_is_exported() -> None:
    """A user's `rank` must not make another rank's series, nor a user's `job` take the scrape's, on the page or in a push."""
    cases: list[str] = ["job_name", "run_id", "rank", "le", "job.name", "job", "instance"]
    for name in cases:
        assert labels.of_attributes([(name, "x")]) == {f"exported_{name.replace('.', '_')}": "x"}
        assert labels.pushed_name(name) == f"exported_{name.replace('.', '_')}"


def test_a_name_that_prometheus_refuses_or_drops_is_pushed_as_its_label() -> None:
    """One such name would cost the whole request; on the page `__name__` would rename the series, the others vanish."""
    cases: list[str] = ["", "__", "_", "ключ", "__name__", "__address__", "é_x"]
    for name in cases:
        assert {labels.pushed_name(name): "x"} == labels.of_attributes([(name, "x")])
        assert labels.pushed_name(name).startswith("key")


def test_the_info_holds_what_describes_the_rank_and_nothing_else() -> None:
    """Facts, Kubernetes' names, the user's attributes, as a rank writes them; not what is a series already."""
    shown = {"local_rank": 0, "host": "n1", "k8s.pod.name": "p", "team": "vision", "ho.st": "x", "ho-st": "y", "hos.t": ""}
    elsewhere = {"rank": 0, "job_name": "gpt", "world_size": 8, "restart": 1, "pid": 7, "trace_id": "a" * 32}
    assert labels.of_info({**shown, **elsewhere, "run.id": "liar", "job": "mine", "instance": "this"}) == {
        "local_rank": "0",
        "host": "n1",
        "k8s_pod_name": "p",
        "team": "vision",
        "ho_st": "x;y",
        "exported_run_id": "liar",
        "exported_job": "mine",
        "exported_instance": "this",
    }


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


def durations(counts: dict[int, int]) -> Distribution:
    """A histogram of step times, by the number of the bucket."""
    return Distribution(tuple(counts.get(bucket, 0) for bucket in range(len(SECONDS_BOUNDS) + 1)), 1.0, 0.1, 5000.0)


def test_each_state_follows_from_what_was_seen() -> None:
    """Heartbeat and lock decide who lives, the exit word how it ended, the learned timeout who hangs."""
    cases: list[tuple[Observation, str]] = [
        (ALIVE, "alive"),
        (ALIVE._replace(beat_age_s=2.1), "unresponsive"),
        (ALIVE._replace(beat_age_s=2.1, quiet_s=1e6), "unresponsive"),
        (ALIVE._replace(quiet_s=60.1), "hung"),
        (ALIVE._replace(quiet_s=1e6, phase="evaluation"), "alive"),
        (ALIVE._replace(quiet_s=1e6, phase="checkpoint"), "alive"),
        (ALIVE._replace(quiet_s=1e6, phase="idle"), "alive"),
        (ALIVE._replace(quiet_s=None), "alive"),
        (GONE, "lost"),
        (GONE._replace(exit_reason=Exit.FINISHED), "finished"),
        (GONE._replace(exit_reason=Exit.EXIT_CODE, exit_code=0), "finished"),
        (GONE._replace(exit_reason=Exit.EXIT_CODE, exit_code=3), "failed"),
        (GONE._replace(exit_reason=Exit.EXCEPTION, exit_code=1), "failed"),
        (GONE._replace(exit_reason=Exit.TERMINATED, exit_code=143), "failed"),
        # has said how it ends, and let go of the lock: no second look
        (GONE._replace(beat_age_s=0.0, exit_reason=Exit.FINISHED), "finished"),
        # torn down after its last word: 29 ms per GiB, a core dump 11 s, for which the lock is held
        (ALIVE._replace(beat_age_s=5.0, exit_reason=Exit.FINISHED), "finished"),
        (ALIVE._replace(beat_age_s=5.0, exit_reason=Exit.EXCEPTION), "failed"),
        # a notebook survives an exception: the heartbeat counts
        (ALIVE._replace(exit_reason=Exit.EXCEPTION), "alive"),
        # of another boot: its lock and its CLOCK_MONOTONIC mean nothing here
        (ALIVE._replace(same_boot=False), "lost"),
    ]
    for observation, state in cases:
        assert rank_state.judge(observation) == state
        assert state in catalog.RANK_STATES


def test_a_free_lock_alone_is_no_death() -> None:
    """A process that closes descriptors it does not know loses its lock and lives on: its heartbeat shows it."""
    beating = GONE._replace(beat_age_s=0.2)
    assert rank_state.judge(beating) == "alive"
    others = (GONE, ALIVE, ALIVE._replace(same_boot=False))
    assert [rank_state.fading(observation) for observation in (beating, *others)] == [True, False, False, False]


LAST = len(SECONDS_BOUNDS) - 1
USUAL, FOUR_S, HALF_MINUTE, MINUTES = map(SECONDS_BOUNDS.index, (0.125, 4.0, 32.0, 128.0))


def test_the_hang_timeout_is_learned_from_the_rank_s_own_steps() -> None:
    """20 times the 99th percentile, from 60 s on; half an hour before the first step."""
    cases: list[tuple[Distribution | None, float]] = [
        (None, rank_state.FIRST_STEP_S),
        (durations({}), rank_state.FIRST_STEP_S),
        (durations({FOUR_S: 100}), 80.0),
        # one slow step among a hundred, a compilation or a cold cache, must not make it hours long
        (durations({FOUR_S: 99, LAST: 1}), 80.0),
        # of few steps the percentile is the longest: a slow first step does not hide a hang soon after it
        (durations({USUAL: 98, HALF_MINUTE: 1}), 64.0),
        (durations({HALF_MINUTE: 1}), 20 * 32.0),
        # a rollout to hundreds of minibatches is beyond the percentile; twice the longest but one is time enough
        (durations({USUAL: 999, MINUTES: 1}), 60.0),
        (durations({USUAL: 998, MINUTES: 2}), 256.0),
        # the overflow bucket has no bound of its own
        (durations({LAST + 1: 5}), 20 * 5000.0),
    ]
    for measured, timeout_s in cases:
        assert rank_state.hang_timeout_s(measured, SECONDS_BOUNDS) == timeout_s


FULL = MemoryUse(cgroup=1.0, machine=1.0, kill_age_s=0.0)


def test_who_vanishes_near_a_limit_likely_ran_out_of_memory() -> None:
    """It is lost all the same. An exit word is a word, at whatever limit; whoever was asked to end has not failed by itself."""
    cases: list[tuple[int | None, int, MemoryUse | None, tuple[str, str]]] = [
        (None, 0, None, ("lost", "lost")),
        (None, 0, MemoryUse(cgroup=0.949, machine=0.979), ("lost", "lost")),
        (None, 0, MemoryUse(cgroup=0.95), ("lost", "out_of_memory")),
        (None, 0, MemoryUse(machine=0.98), ("lost", "out_of_memory")),
        (None, 0, MemoryUse(kill_age_s=60.0), ("lost", "out_of_memory")),
        (None, 0, MemoryUse(kill_age_s=61.0), ("lost", "lost")),
        # the mark of a SIGTERM, and the status of a program that handles it itself
        (Exit.TERMINATED, 143, FULL, ("failed", "terminated")),
        (Exit.EXIT_CODE, 143, FULL, ("failed", "terminated")),
        (Exit.EXIT_CODE, 137, None, ("failed", "exit_code")),
        (Exit.FINISHED, 0, FULL, ("finished", "finished")),
        (Exit.EXCEPTION, 1, FULL, ("failed", "exception")),
    ]
    for reason, code, memory, ended in cases:
        assert rank_state.ending(reason, code, memory) == ended
