"""The scan over real files, with clocks that a test moves: what is served, what is bad, and what is said of ranks together."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.rank_files import BORN_NS, BORN_WALL_NS, Clock, File, S, scanner_of, states, steps
from torchobs.cli import inspect, runs
from torchobs.detect.hangs import Standstill
from torchobs.exporter import api
from torchobs.exporter.api_schema import Stall
from torchobs.exporter.config import ExporterConfig
from torchobs.flight import reader
from torchobs.flight.directory import KUBERNETES_MOUNT
from torchobs.flight.layout import LIVE_PHASES, Exit
from torchobs.flight.reader import FlightFile
from torchobs.flight.step_record import RecordKind, StepFlag
from torchobs.ranks.comparison import whole_norm
from torchobs.ranks.rank_view import view_of
from torchobs.ranks.scanner import Directory, ForeignDirectoryError, Scanner, accepted_owner
from torchobs.ranks.snapshot import RunSummary, Snapshot, readings_of


@pytest.fixture
def rank(flight_dir: Path) -> Iterator[Callable[..., File]]:
    """Make ranks' files that are living when made: locked, with a heartbeat at their birth."""
    files: list[File] = []

    def make(seed: int = 1, **fields: object) -> File:
        file = File(flight_dir, seed=seed, **fields).save().hold()  # type: ignore[arg-type]  # as File takes them
        files.append(file)
        return file

    yield make
    for file in files:
        file.release()


Look = Callable[..., Snapshot]


@pytest.fixture
def look(scanner: Scanner, clock: Clock) -> Look:
    """Scan at a moment, with the heartbeats of these ranks shortly before it, or ``beat_s`` then."""

    def scan(seconds: float, *files: File, beat_s: float | None = None) -> Snapshot:
        clock.seconds = seconds
        for file in files:
            file.beat(seconds - 0.1 if beat_s is None else beat_s)
            file.save()
        return scanner.scan()

    return scan


def trained(*files: File) -> None:
    """A hundred steps in ten seconds: the timeout is a minute then."""
    for file in files:
        for number in range(1, 101):
            file.step(number, number / 10)


def enter(file: File, phase: str, seconds: float) -> None:
    """Begin a phase at that moment."""
    file.writer.phase(1 + LIVE_PHASES.index(phase), BORN_NS + round(seconds * S))


def test_a_rank_without_its_lock_that_survived_a_sigterm_is_alive(look: Look, rank: Callable[..., File]) -> None:
    """A script that closes descriptors drops the lock: the old mark beside a heart that beats is no end; then it is."""
    file = rank()
    file.release()
    file.lock_path.write_text("Ended by signal 15\n")
    os.utime(file.lock_path, ns=(BORN_WALL_NS + S, BORN_WALL_NS + S))
    for seconds in (3.1, 4.1):
        assert states(look(seconds, file)) == {"0": "alive"}
    assert states(look(4.7)) == {"0": "failed"}
    assert states(look(5.1, file)) == {"0": "alive"}, "its heart beats again"
    os.utime(file.lock_path, ns=(BORN_WALL_NS + 5 * S, BORN_WALL_NS + 5_200_000_000))
    (ended,) = look(6.0).ranks
    assert view_of(ended, readings_of(ended)).last_s == pytest.approx(BORN_WALL_NS / S + 5.2, abs=1e-6), "the mark's moment"


_HOLDER = "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
"""Holds the lock of a file: a process cannot read its own lock file without dropping the lock"""


def terminated(start: Callable[..., subprocess.Popen[str]], file: File) -> subprocess.Popen[str]:
    """Leave the mark of a SIGTERM a second after the rank's birth; return the process that holds its lock."""
    file.release()
    holder = start(sys.executable, "-c", _HOLDER, str(file.lock_path), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    file.lock_path.write_text("Ended by signal 15\n")
    os.utime(file.lock_path, ns=(BORN_WALL_NS + S, BORN_WALL_NS + S))
    return holder


@pytest.mark.parametrize("pid", [1, 4321])
def test_the_first_process_of_a_container_ends_by_sigterm_while_it_still_runs(
    start: Callable[..., subprocess.Popen[str]], look: Look, rank: Callable[..., File], pid: int
) -> None:
    """It is killed once the pod's grace is over, without another word; one that lives on had its SIGTERM from somebody else."""
    file = rank(pid=pid)
    holder = terminated(start, file)
    for number, seconds in enumerate((2.0, 125.0, 127.0), start=1):
        file.step(number, seconds - 0.1)
        (status,) = look(seconds, file).ranks
        ends = pid == 1 and seconds < 126.0
        assert (status.state, status.reason, status.up) == (("failed", "terminated", False) if ends else ("alive", "", True))
        assert steps(look(seconds)) == {"0": number}
    holder.communicate()
    assert states(look(140.0)) == {"0": "failed"}


def test_a_first_process_killed_in_the_grace_is_not_alive_until_its_heartbeat_is_old(
    start: Callable[..., subprocess.Popen[str]], look: Look, rank: Callable[..., File]
) -> None:
    """A scrape may come in the two seconds between its kill and that of the sidecar: the last word is the SIGTERM."""
    file = rank(pid=1)
    holder = terminated(start, file)
    file.step(1, 45.9)
    look(45.9, file)
    holder.communicate()
    for seconds in (46.1, 60.0):
        (status,) = look(seconds).ranks
        assert (status.state, status.reason, status.up) == ("failed", "terminated", False)


def test_a_living_rank_is_served_up_to_its_last_step(look: Look, rank: Callable[..., File]) -> None:
    """Steps that nobody has folded yet are counted, and the age of the last one is exact."""
    file = rank()
    for number in range(1, 8):
        file.step(number, number)
    snapshot = look(7.25, file)
    (served,) = snapshot.ranks
    assert (served.job_name, served.run_id, served.rank) == ("gpt", "run-1", "0")
    assert (served.state, served.up, served.progress_age_s, served.ended_in) == ("alive", True, 0.25, None)
    assert steps(snapshot) == {"0": 7}
    assert snapshot.files == {"served": 1, "superseded": 0, "expired": 0, "bad": 0, "left_out": 0}
    assert not snapshot.problems


def test_the_states_of_one_rank_from_birth_to_oblivion(look: Look, rank: Callable[..., File]) -> None:
    """Alive, unresponsive while it is stopped, alive again, fading for one look, lost, and after the grace gone."""
    file = rank()
    early = [states(look(at_s, file, beat_s=beat_s))["0"] for at_s, beat_s in ((0.4, 0.4), (1.4, 0.4), (2.6, 0.4), (3.6, 3.5))]
    assert early == ["alive", "alive", "unresponsive", "alive"]
    file.beat(4.0)
    file.save().release()
    for seconds, state, fading in ((4.1, "alive", True), (4.7, "lost", False), (304.0, "lost", False)):
        snapshot = look(seconds)
        assert (states(snapshot), snapshot.fading) == ({"0": state}, fading)
    snapshot = look(304.1)
    assert (states(snapshot), snapshot.files["expired"], snapshot.files["served"]) == ({}, 1, 0)


def test_a_rank_without_steps_for_too_long_is_hung_until_it_steps(look: Look, rank: Callable[..., File]) -> None:
    """The age counts on meanwhile; batches of an evaluation that nobody announced are a sign of life, too."""
    file = rank()
    trained(file)
    observed = []
    for seconds in (69.0, 71.0, 72.0):
        if seconds == 72.0:
            file.step(101, 71.5)
        (status,) = look(seconds, file).ranks
        observed.append((status.state, status.progress_age_s))
    assert observed == [("alive", 59.0), ("hung", 61.0), ("alive", 0.5)]
    enter(file, "forward", 140.0)
    assert [states(look(seconds, file))["0"] for seconds in (195.0, 205.0)] == ["alive", "hung"]


@pytest.mark.parametrize(("phase", "state"), [("evaluation", "alive"), ("checkpoint", "alive"), ("backward", "hung")])
def test_who_waits_for_a_peer_that_may_take_any_time_has_not_hung(
    phase: str, state: str, look: Look, rank: Callable[..., File]
) -> None:
    """For half an hour: so long collectives wait, too."""
    files = [rank(seed=1, rank=0), rank(seed=2, rank=1)]
    trained(*files)
    enter(files[0], phase, 10.0)
    assert [states(look(seconds, *files))["1"] for seconds in (80.0, 1_809.0, 1_811.0)] == [state, state, "hung"]


def test_a_replica_group_waits_for_no_other(look: Look, rank: Callable[..., File]) -> None:
    """One whose peer is in another group hangs while that evaluates, and where it stands is no concern of the other."""
    files = [rank(seed=1 + group, replica_group=group) for group in range(2)]
    trained(*files)
    for file, phase in zip(files, ("evaluation", "backward"), strict=True):
        enter(file, phase, 10.0)
    snapshot = look(80.0, *files)
    assert states(snapshot) == {"0-g0": "alive", "0-g1": "hung"}
    assert [status.rank for status in snapshot.ranks if status.standing and status.standing.stalled] == ["0-g1"]


@pytest.mark.parametrize(
    ("world_size", "phase", "state"), [(1, "other", "alive"), (1, "backward", "hung"), (2, "other", "hung")]
)
def test_who_has_begun_nothing_alone_has_not_hung(
    world_size: int, phase: str, state: str, look: Look, rank: Callable[..., File]
) -> None:
    """It serves a model, evaluates one, or is a notebook; ranks of several may wait for each other before the first step."""
    file = rank(world_size=world_size)
    enter(file, phase, 0.0)
    assert states(look(3_600.0, file))["0"] == state


def test_who_does_not_record_steps_has_not_hung(look: Look, rank: Callable[..., File]) -> None:
    """It has no age either, and is not compared with its peers; switched on again, its patience begins anew."""
    files = [rank(seed=1, rank=0), rank(seed=2, rank=1)]
    trained(*files)
    observed = []
    for seconds, since_ns in ((80.0, None), (90.0, BORN_NS + 85 * S), (146.0, BORN_NS + 85 * S)):
        files[0].writer.steps_since(since_ns)
        files[1].step(101, seconds)
        first, other = look(seconds, *files).ranks
        observed.append((first.state, first.progress_age_s, first.standing and first.standing.behind))
        assert other.standing is not None
        assert other.standing.behind == 0
    assert observed == [("alive", None, None), ("alive", 5.0, None), ("hung", 61.0, None)]


def test_a_rank_that_stands_still_is_known_to_everybody(scanner: Scanner, look: Look, rank: Callable[..., File]) -> None:
    """By one rule, in the snapshot and the API: no speed, and how long one usually takes; it goes with the next step."""
    file = rank()
    trained(file)
    observed = []
    for seconds, upto in ((19.0, 100), (55.0, 100), (55.5, 101)):
        if upto > 100:
            file.step(upto, 55.2)
        (status,) = look(seconds, file).ranks
        with scanner.flight_file(status.incarnation) as read:
            observed.append((status.standstill, api.rank_state(status).stall, api.steps(read, status, 1).speed is None))
    stall = Stall(seconds=45.0, usual_step=0.1, habitual=False)
    assert observed == [(None, None, False), (Standstill(45.0, 0.1), stall, True), (None, None, False)]


def test_the_hang_timeout_can_be_given(flight_dir: Path, rank: Callable[..., File], clock: Clock) -> None:
    """`--hang-timeout` replaces what is learned."""
    scanner = scanner_of(flight_dir, clock, hang_timeout_s=3.0)
    file, clock.seconds = rank(), 4.0
    file.beat(4.0)
    file.save()
    assert states(scanner.scan()) == {"0": "hung"}
    scanner.close()


@pytest.mark.parametrize(("code", "state"), [(7, "failed"), (None, "lost")])
def test_the_last_steps_of_who_has_ended_are_served(
    scanner: Scanner, look: Look, rank: Callable[..., File], code: int | None, state: str
) -> None:
    """They are read after the lock was let go, though no scrape came between the last step and the end."""
    file = rank()
    scanner.scan()
    for number in (1, 2, 3):
        file.step(number, number / 10)
    file.beat(0.3)
    if code is not None:
        file.writer.exit(Exit.EXIT_CODE, code)
    file.save().release()
    snapshot = look(1.0)
    assert (states(snapshot), steps(snapshot)) == ({"0": state}, {"0": 3})
    assert snapshot.ranks[0].ended_in == snapshot.number
    assert scanner.scan().ranks[0].ended_in == snapshot.number


def test_replica_groups_keep_their_labels(look: Look, rank: Callable[..., File]) -> None:
    """Each counts its ranks from 0: the group is part of the rank, before and after a restart; nothing is claimed twice."""
    sizes = {"world_size": 1, "local_world_size": 1}
    first, second = (rank(seed=1 + group, replica_group=group, launch=f"l{group}", **sizes) for group in range(2))
    for seconds in (1.0, 6.0):
        assert states(look(seconds, first, second)) == {"0-g0": "alive", "0-g1": "alive"}
    second.release()
    snapshot = look(7.0, first)
    assert (states(snapshot), snapshot.runs[0].missing) == ({"0-g0": "alive", "0-g1": "lost"}, 0)
    again = rank(seed=9, born_s=7.5, replica_group=1, launch="l2", **sizes)
    snapshot = look(8.0, again)
    incarnations = {status.rank: status.incarnation[-2:] for status in snapshot.ranks}
    assert (incarnations, snapshot.duplicates) == ({"0-g0": "01", "0-g1": "09"}, 0)


def name_of(number: int) -> str:
    """A name as a flight file has it."""
    return f"r{number}-{number:032x}.flight"


def other_version(path: Path) -> None:
    """A flight file of a format that this version does not know."""
    good = File(path.parent)
    path.write_bytes(good.buffer[:8] + b"\xff\x00" + good.buffer[10:])


def too_big(path: Path) -> None:
    """A hole of a terabyte costs nothing to make."""
    path.touch()
    os.truncate(path, 1 << 40)


SPOILT: dict[str, tuple[Callable[[Path], object], ...]] = {
    "header": (
        Path.touch,
        lambda path: path.write_bytes(os.urandom(1 << 20)),
        lambda path: path.write_bytes(File(path.parent).buffer[: 300 * 1024]),
        other_version,
        lambda path: path.write_bytes(File(path.parent).buffer),  # a sound one under another's name
        too_big,
    ),
    # a way out of the directory; whoever opens a FIFO without O_NONBLOCK waits for ever
    "kind": (Path.mkdir, lambda path: path.symlink_to("/etc/hostname"), os.mkfifo),
}


def test_what_is_no_flight_file_is_counted_and_hurts_nobody(
    scanner: Scanner, flight_dir: Path, rank: Callable[..., File]
) -> None:
    """It is bad, with its reason, and the others are served."""
    rank(seed=5, rank=5)
    spoils = [spoil for spoils in SPOILT.values() for spoil in spoils]
    for number, spoil in enumerate(spoils, 7):
        spoil(flight_dir / name_of(number))
    snapshot = scanner.scan()
    assert states(snapshot) == {"5": "alive"}
    assert snapshot.files["bad"] == len(spoils)
    assert {kind: count for kind, count in snapshot.errors.items() if count} == {"header": 6, "kind": 3}


def test_whose_files_are_read() -> None:
    """Root reads its own, except in a pod, where the trainer has whatever uid its image has."""
    plain, node, foreign = ExporterConfig(), ExporterConfig(mode="node"), ExporterConfig(allow_foreign_owner=True)
    asked = [(plain, "/x", 0), (plain, "/x", 1000), (node, "/x", 1000), (node, "/x", 0), (plain, KUBERNETES_MOUNT, 0),
             (foreign, "/x", 0)]  # fmt: skip
    assert [accepted_owner(*question) for question in asked] == [0, None, 1000, 0, None, None]


def test_root_refuses_another_user_s_directory(flight_dir: Path) -> None:
    """Who may write there could make root read what they like."""
    if os.geteuid() == 0:
        os.chown(flight_dir, 12345, 12345)
    directory = Directory(ExporterConfig(flight_dir=str(flight_dir)), uid=0)
    with pytest.raises(ForeignDirectoryError, match="--allow-foreign-owner"):
        directory.names()
    allowed = Directory(ExporterConfig(flight_dir=str(flight_dir), allow_foreign_owner=True), uid=0)
    assert allowed.names() == []
    allowed.close()


DEAD = 30
LATER_S = 1000.0
"""When the grace of what ended at the birth of the files is long over."""


@pytest.fixture
def late_clock(clock: Clock) -> Clock:
    """Long after the files' birth."""
    clock.seconds = LATER_S
    return clock


@pytest.fixture
def living(flight_dir: Path) -> Iterator[File]:
    """A living rank, the last by its name."""
    file = File(flight_dir, seed=900, rank=9).hold()
    file.beat(LATER_S)
    yield file.save()
    file.release()


def open_files() -> int:
    """The flight files that somebody keeps in memory."""
    gc.collect()
    return sum(isinstance(candidate, FlightFile) for candidate in gc.get_objects())


def test_the_long_dead_are_not_kept_in_memory(scanner: Scanner, flight_dir: Path, living: File, late_clock: Clock) -> None:
    """Neither those that were dead at the first scan nor one whose grace ends later; all are counted, scan after scan."""
    for seed in range(1, DEAD + 1):
        File(flight_dir, seed=seed, run_id=f"run-{seed}").save()
    before = open_files()
    for _ in range(2):
        snapshot = scanner.scan()
        assert (states(snapshot), snapshot.files["expired"], snapshot.files["served"]) == ({"9": "alive"}, DEAD, 1)
        del snapshot
    assert open_files() == before + 1
    living.release()
    late_clock.seconds += 1.0
    assert states(scanner.scan()) == {"9": "lost"}
    late_clock.seconds += 400.0
    assert scanner.scan().files["expired"] == DEAD + 1
    assert open_files() == before


def test_commands_say_what_they_leave_out(
    flight_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`runs`, its JSON and `inspect`."""
    for seed in range(1, 6):
        File(flight_dir, seed=seed, run_id=f"run-{seed}").save()
    monkeypatch.setattr(reader, "MAX_FILES", 3)
    assert runs.main(["--dir", str(flight_dir)]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("2 more flight files in this directory: 3 are read")
    assert runs.main(["--dir", str(flight_dir), "--json"]) == 0
    listing = json.loads(capsys.readouterr().out)
    assert (len(listing["runs"]), listing["left_out"]) == (3, 2)
    inspect.main([str(flight_dir)])
    assert "2 more flight files in this directory: 3 are read" in capsys.readouterr().out


FAST = (0.01, 0.02, 0.05, 0.01, 0.01)
LATE_DATA = (0.04, 0.02, 0.02, 0.01, 0.01)
"""As long as the others' in all: they wait for it within backward."""


class Node:
    """Ranks of one run on one machine, and an exporter."""

    def __init__(self, directory: Path, ranks: int, groups: int = 0, local_world_size: int = 0, world_size: int = 0) -> None:
        """``groups``: replica groups of so many ranks each; 0: none, all ranks train together."""
        here, everywhere = local_world_size or ranks, world_size or ranks
        sizes: dict[str, Any] = {"local_world_size": here, "world_size": everywhere}
        places = [{"rank": rank, **sizes} for rank in range(ranks)]
        if groups:
            places = [{"replica_group": group, **place} for group in range(groups) for place in places]
        self.files = [File(directory, seed=seed, **place).hold() for seed, place in enumerate(places, 1)]
        self.clock = Clock()
        self.steps = [0] * len(self.files)
        self.scanner = scanner_of(directory, self.clock)

    def train(self, times: Sequence[Sequence[float]], steps: int) -> Snapshot:
        """Let every rank take steps of such phases within ten seconds, and look."""
        self.clock.seconds += 10.0
        now_ns = BORN_NS + round(self.clock.seconds * S)
        for rank, (file, phases) in enumerate(zip(self.files, times, strict=True)):
            padded, own_s = (*phases, *[0.0] * (9 - len(phases))), sum(phases[:5])
            for step in range(self.steps[rank], self.steps[rank] + steps):
                flags = StepFlag.LOSS | StepFlag.GRAD_NORM
                file.writer.append(step + 1, now_ns - S, RecordKind.STEP, flags, 1, own_s, 2.0, 1.0, 1e-3, padded, 0, 0)
            self.steps[rank] += steps
            file.beat(self.clock.seconds)
            file.writer.fold()
            file.save()
        return self.scanner.scan()

    def close(self) -> None:
        for file in self.files:
            file.release()
        self.scanner.close()


@pytest.fixture
def begin() -> Iterator[Callable[..., Node]]:
    """Begin a node, which is closed at the end."""
    nodes: list[Node] = []

    def start(directory: Path, ranks: int, **resource: int) -> Node:
        nodes.append(Node(directory, ranks, **resource))
        return nodes[-1]

    yield start
    for node in nodes:
        node.close()


def test_what_is_long_ago_does_not_count(flight_dir: Path, begin: Callable[..., Node]) -> None:
    """A rank that was slow in its first minutes is not slow for the rest of the day."""
    node = begin(flight_dir, 2)
    node.train([FAST, LATE_DATA], 1)
    slow = node.train([FAST, LATE_DATA], 100)
    assert [rank.standing.slowdown for rank in slow.ranks if rank.standing] == pytest.approx([1.0, 0.1 / 0.07])
    snapshot = [node.train([FAST, FAST], 20) for _ in range(4)][-1]
    assert [rank.standing.slowdown for rank in snapshot.ranks if rank.standing] == pytest.approx([1.0, 1.0])


def test_who_is_behind_and_who_is_missing(flight_dir: Path, begin: Callable[..., Node]) -> None:
    """Of eight that the launcher started here two have a file, and one of them has done five steps less."""
    node = begin(flight_dir, 2, local_world_size=8, world_size=16)
    node.train([FAST, FAST], 3)
    file = node.files[0]
    for step in range(4, 9):
        file.step(step, node.clock.seconds - 0.5)
    file.save()
    snapshot = node.scanner.scan()
    assert [rank.standing.behind for rank in snapshot.ranks if rank.standing] == [0, 5]
    assert snapshot.runs == (RunSummary("gpt", "run-1", here=2, missing=6, step_spread=5, grad_norm=None),)


def test_a_replica_group_is_compared_with_no_other(flight_dir: Path, begin: Callable[..., Node]) -> None:
    """A group with slower data and fewer steps is neither slow nor behind."""
    node = begin(flight_dir, 2, groups=2)
    times = [FAST, FAST, LATE_DATA, LATE_DATA]
    node.train(times, 1)
    for file in node.files[:2]:
        file.step(2, node.clock.seconds - 0.5)
    node.steps[:2] = [2, 2]
    snapshot = node.train(times, 20)
    standings = {rank.rank: rank.standing for rank in snapshot.ranks if rank.standing}
    assert [standing.behind for standing in standings.values()] == [0] * 4
    assert {rank: standing.slowdown for rank, standing in standings.items()} == pytest.approx(
        dict.fromkeys(("0-g0", "0-g1", "1-g0", "1-g1"), 1.0)
    )
    assert snapshot.runs[0].step_spread == 0


def test_the_whole_s_norm() -> None:
    """Replicas, shards, replicas of shards; nothing where a part is elsewhere or not measured."""
    assert whole_norm([(2.0, 1.0), (2.0, 1.0)], 2) == pytest.approx(2.0)
    assert whole_norm([(2.0, None)], 1) == pytest.approx(2.0)
    assert whole_norm([(3.0, 2.0), (4.0, 2.0)] * 2, 4) == pytest.approx(5.0)
    assert whole_norm([(1.0, 4.0)] * 4, 4) == pytest.approx(2.0)
    for parts, world_size in (([(3.0, 2.0), (4.0, 2.0)], 4), ([(3.0, 2.0), (None, 2.0)], 2), ([], 0)):
        assert whole_norm(parts, world_size) is None
