"""What lies beside flight files: their directory, room and clean-up, evidence, and the control files."""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from secrets import token_bytes

import pytest

from tests import flights
from tests.unit.test_cgroup import GIB, V2_MOUNT, plant, v2_group
from torchobs.flight import artifacts, control, directory, files
from torchobs.flight.artifacts import LIMITS, STACKS, named, parse
from torchobs.flight.cleanup import SETTLED_S, STALE_S, clean
from torchobs.flight.control import Command, ControlReader, write_command
from torchobs.flight.directory import NoPlaceError, candidates, find_existing, mount_of, open_directory, open_place
from torchobs.flight.files import cgroup_headroom, file_name, lock_name
from torchobs.flight.layout import MIN_SIZE, Live, Region, encode_header
from torchobs.flight.writer import open_writer

ME = os.getuid()

MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
23 22 0:21 / /dev rw,nosuid shared:2 - devtmpfs devtmpfs rw,size=4096k
24 23 0:22 / /dev/shm rw,nosuid,nodev shared:3 - tmpfs tmpfs rw
25 22 0:23 / /home rw shared:4 master:1 - nfs4 server:/home rw,vers=4.2
26 22 0:24 / /mnt/with\\040blank\\011tab\\134back rw - fuse.sshfs me@there:/ rw
28 25 0:26 / /home/me/local rw - xfs /dev/vdb rw
29 22 0:27 / /over rw - nfs 10.0.0.1:/x rw
30 22 0:28 / /over rw - tmpfs tmpfs rw
garbage
31 22 0:29 / /odd rw -
"""


def test_the_file_system_is_that_of_the_longest_mount_and_the_last_of_equals() -> None:
    """By the text of mountinfo, escapes undone."""
    expected = {
        "/": "ext4",
        "/dev/shm/torchobs-0": "tmpfs",
        "/dev/shmoo": "devtmpfs",
        "/home/me": "nfs4",
        "/home/me/local/x": "xfs",
        "/mnt/with blank\ttab\\back/x": "fuse.sshfs",
        "/over/there": "tmpfs",
    }
    assert {path: mount_of(path, MOUNTS)[1] for path in expected} == expected
    assert mount_of("/over/there", MOUNTS)[0] == "/over"


@pytest.fixture
def parent(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that everybody may write to, as /tmp and /dev/shm are: the only candidate's parent."""
    flight_dir.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(flight_dir))
    monkeypatch.setattr(directory, "_roomy", lambda _: False)
    return flight_dir


def test_the_runtime_directory_comes_first_if_it_is_mine(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then shared memory with room, then the temporary directory; in a pod its mount alone, for the sidecar's group."""
    runtime = parent / "runtime"
    runtime.mkdir()
    temporary = str(parent / f"torchobs-{ME}")
    assert candidates(None, str(runtime)) == [str(runtime / "torchobs"), temporary]
    assert candidates(None, str(parent / "absent")) == [temporary]
    assert candidates(None, None) == [temporary]
    mount = parent / "mount"
    mount.mkdir(mode=0o777)
    monkeypatch.setattr(directory, "KUBERNETES_MOUNT", str(mount))
    assert candidates(None, None) == [find_existing(None, None)] == [str(mount)]
    place = open_place(None, None)
    assert (place.path, place.shared, place.configured) == (str(mount), True, True)
    os.close(place.fd)


def test_shared_memory_is_taken_only_with_a_gibibyte_and_a_quarter_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's 64 MiB belong to NCCL and the DataLoader."""
    for blocks, free, roomy in (
        *((1 << 18, 1 << 17, True), (1 << 18, 1 << 15, False)),
        *(((1 << 18) - 1, 1 << 17, False), (16_000, 16_000, False)),
    ):
        status = os.statvfs_result((4096, 4096, blocks, free, free, 0, 0, 0, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda _, status=status: status)
        assert any(path.startswith("/dev/shm/") for path in candidates(None, None)) is roomy


def test_the_directory_is_made_private(parent: Path) -> None:
    """0700, whatever the umask; the same one the next time."""
    before = os.umask(0)
    first = open_place(None, None)
    os.umask(before)
    assert first.path == str(parent / f"torchobs-{ME}")
    assert stat.S_IMODE(os.fstat(first.fd).st_mode) == 0o700
    assert not os.get_inheritable(first.fd)
    second = open_place(None, None)
    assert os.path.samestat(os.fstat(first.fd), os.fstat(second.fd))
    assert (second.shared, second.configured) == (False, False)
    os.close(first.fd)
    os.close(second.fd)


@pytest.mark.parametrize("taken", ["foreign", "open", "link"])
def test_a_name_that_somebody_took_is_no_place_and_the_message_says_what_to_do(parent: Path, taken: str) -> None:
    """Nothing is put where another user could read or replace it; training goes on without us."""
    place, target = parent / f"torchobs-{ME}", parent / "target"
    target.mkdir(mode=0o700)
    if taken == "link":
        place.symlink_to(target)
    else:
        target.rename(place).chmod(0o770)
    if taken == "foreign" and ME == 0:
        os.chown(place, 12345, 12345)
    with pytest.raises(NoPlaceError, match="TORCHOBS_DIR"):
        open_place(None, None)
    assert find_existing(None, None) is None


def test_a_given_directory_is_made_with_its_parents_and_taken_as_it_is(flight_dir: Path) -> None:
    """Whoever it belongs to; files are shared by group where it is another user's or gives its group to them. No link is."""
    chosen = flight_dir / "a" / "b"
    place = open_place(str(chosen), None)
    assert (place.configured, place.shared) == (True, False)
    assert stat.S_IMODE(chosen.stat().st_mode) == 0o700
    os.close(place.fd)
    for mode, shared in ((0o755, False), (0o770, False), (0o2770, True), (0o3777, True)):
        chosen.chmod(mode)
        place = open_place(str(chosen), None)
        assert place.shared is shared
        os.close(place.fd)
    assert find_existing(str(chosen), None) == str(chosen)
    (flight_dir / "link").symlink_to(chosen)
    with pytest.raises(NoPlaceError, match="link"):
        open_place(str(flight_dir / "link"), None)
    with pytest.raises(OSError, match="directory"):
        open_directory(str(flight_dir / "link"))


def test_a_network_file_system_is_refused_and_only_memory_is_stored_to_directly(
    flight_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store into a page of the one blocks for as long as the server is away; on others but memory the sampler writes."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    for kind in ("nfs", "nfs4", "lustre", "fuse", "fuse.sshfs", "ceph", "9p", "cifs", "beegfs", "virtiofs"):
        monkeypatch.setattr("torchobs.support.cgroup.read", lambda _, kind=kind: f"22 1 0:1 / / rw - {kind} server:/ rw\n")
        with pytest.raises(NoPlaceError, match=kind.partition(".")[0]):
            open_place(str(flight_dir), None)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before  # an earlier test's thread may close its own meanwhile
    for kind in ("tmpfs", "ramfs", "ext4", "overlay", "fuseblk"):
        monkeypatch.setattr("torchobs.support.cgroup.read", lambda _, kind=kind: f"22 1 0:1 / / rw - {kind} x rw\n")
        place = open_place(str(flight_dir), None)
        assert place.in_memory is (kind in {"tmpfs", "ramfs"})
        os.close(place.fd)


def test_files_of_a_shared_place_are_for_the_group(flight_dir: Path) -> None:
    """0640 there, 0600 elsewhere, whatever the umask."""
    for mode, expected in ((0o2770, 0o640), (0o700, 0o600)):
        place = flight_dir / oct(mode)
        place.mkdir()
        place.chmod(mode)
        before = os.umask(0o777)
        open_writer(open_place(str(place), None), {"rank": 0}, MIN_SIZE).close()
        os.umask(before)
        assert {stat.S_IMODE(path.stat().st_mode) for path in place.iterdir()} == {expected}


def test_headroom_is_what_the_tightest_cgroup_has_left(tmp_path: Path) -> None:
    """Page cache that the kernel would give back is not taken; which group is the tightest, test_cgroup has of v1 and v2."""
    root = plant(tmp_path, {"proc/self/cgroup": "", "proc/self/mountinfo": V2_MOUNT.format(root="/")})
    assert cgroup_headroom(root) is None
    plant(tmp_path, {"proc/self/cgroup": "0::/a/b\n", **v2_group("/a/b")})
    assert cgroup_headroom(root) is None, "no limit"
    plant(tmp_path, v2_group("/a", limit=str(4 * GIB)))
    assert cgroup_headroom(root) == 4 * GIB - 3 * GIB + GIB  # of 3 GiB that are used one is inactive file pages


HOUR_NS = 3600 * 1_000_000_000
NOW = time.monotonic_ns() + 1000 * HOUR_NS
"""A moment so late that a file's age is what the test says, not what the machine's uptime allows."""


Make = Callable[..., str]


@pytest.fixture
def make(flight_dir: Path) -> Make:
    """Make a flight file with a last heartbeat some hours before NOW."""

    def one(hours: float, *, lock_file: bool = True, other_boot: bool = False) -> str:
        header = flights.header()
        if other_boot:
            header = replace(header, boot_id=bytes(range(16)))
        raw = bytearray(header.file_size)
        raw[: len(encode_header(header))] = encode_header(header)
        beat = header.regions[Region.LIVE].offset + 8 * Live.HEARTBEAT_NS
        raw[beat : beat + 8] = (NOW - int(hours * HOUR_NS)).to_bytes(8, "little")
        name = file_name(header)
        (flight_dir / name).write_bytes(raw)
        if lock_file:
            (flight_dir / lock_name(name)).touch()
        return name

    return one


def age(path: Path, seconds: float) -> Path:
    """Make a file that much older by its mtime."""
    then = time.time() - seconds
    os.utime(path, (then, then), follow_symlinks=False)
    return path


def test_a_dead_file_goes_when_it_is_old_enough_and_takes_its_lock_along(
    directory_fd: int, flight_dir: Path, make: Make
) -> None:
    """By the last heartbeat in it, not by its mtime, which stores through a map do not move."""
    old, young = make(25), age(flight_dir / make(23), 10 * 24 * 3600).name
    assert clean(directory_fd, now=NOW, min_age_s=24 * 3600) == [old]
    assert sorted(path.name for path in flight_dir.iterdir()) == sorted([young, lock_name(young)])


def test_beyond_the_total_size_the_oldest_go_first(directory_fd: int, make: Make) -> None:
    """As many as it takes."""
    names = {hours: make(hours) for hours in (1, 5, 3, 2, 4)}
    assert clean(directory_fd, now=NOW, max_total_bytes=3 * MIN_SIZE) == [names[5], names[4]]
    assert clean(directory_fd, now=NOW, max_total_bytes=3 * MIN_SIZE) == []


def test_a_living_rank_s_file_never_goes(directory_fd: int, flight_dir: Path) -> None:
    """However old its heartbeat: a rank may be stopped for days. And asking does not drop its lock."""
    writer = open_writer(flights.place(flight_dir), {"rank": 0}, MIN_SIZE)
    assert clean(directory_fd, now=NOW, min_age_s=0.0, max_total_bytes=0) == []
    assert (flight_dir / writer.name).exists()
    assert files.is_locked(directory_fd, lock_name(writer.name))
    writer.close()


def test_a_rank_that_lost_its_lock_is_known_by_its_heartbeat(directory_fd: int, make: Make) -> None:
    """A program that closes all descriptors drops our lock and lives on; so it does when the lock was deleted."""
    beat_ago_h = (SETTLED_S - 1) / 3600
    make(beat_ago_h)
    make(beat_ago_h, lock_file=False)
    assert clean(directory_fd, now=NOW, min_age_s=0.0, max_total_bytes=0) == []
    dead = make(2 * SETTLED_S / 3600, lock_file=False)
    assert clean(directory_fd, now=NOW, min_age_s=0.0) == [dead]


def test_a_file_without_a_heartbeat_of_this_boot(directory_fd: int, flight_dir: Path, make: Make) -> None:
    """One of another boot is as old as this boot at least; garbage, or a later version's file, as its mtime says."""
    dead = make(0, other_boot=True)
    assert clean(directory_fd, now=24 * HOUR_NS, min_age_s=25 * 3600) == []
    assert clean(directory_fd, now=24 * HOUR_NS, min_age_s=23 * 3600) == [dead]
    name = file_name(flights.header())
    (flight_dir / name).write_bytes(b"garbage")
    assert clean(directory_fd, now=NOW, min_age_s=3600) == []
    age(flight_dir / name, 7200)
    assert clean(directory_fd, now=NOW, min_age_s=3600) == [name]


def test_names_that_are_not_ours_are_never_touched(directory_fd: int, flight_dir: Path, make: Make) -> None:
    """Nor what has one of our names and is no file of ours: links, directories, pipes, hard links, another user's file."""
    if ME == 0:
        os.chown(flight_dir / make(100), 12345, 12345)
    target = age(flight_dir / make(500), STALE_S * 10)
    foreign = ["exporter.json", "exporter.lock", "control", "x.flight", ".tmp-x", ".tmp-" + "g" * 16, "r0-x.lock", "data"]
    for name in foreign:
        (flight_dir / name).touch()
    names = [file_name(flights.header()) for _ in range(4)]
    (flight_dir / names[0]).symlink_to(target)
    (flight_dir / names[1]).mkdir()
    os.mkfifo(flight_dir / names[2])
    (flight_dir / names[3]).hardlink_to(target)
    for name in (*foreign, *names):
        age(flight_dir / name, STALE_S * 10)
    before = {path.name for path in flight_dir.iterdir()}
    assert clean(directory_fd, now=NOW, min_age_s=0.0, max_total_bytes=0) == []
    assert {path.name for path in flight_dir.iterdir()} == before


def test_what_a_birth_that_was_killed_left_goes_after_an_hour(directory_fd: int, flight_dir: Path) -> None:
    """Temporary files, and locks without their file; the young ones may belong to a birth that goes on."""
    orphan = lock_name(file_name(flights.header()))
    for name in (".tmp-0123456789abcdef", orphan):
        (flight_dir / name).touch()
    assert clean(directory_fd, now=NOW) == []
    for name in (".tmp-0123456789abcdef", orphan):
        age(flight_dir / name, STALE_S + 1)
    assert sorted(clean(directory_fd, now=NOW)) == [".tmp-0123456789abcdef", orphan]
    assert list(flight_dir.iterdir()) == []


RANK = f"r7-{'ab' * 16}"
FLIGHT = f"{RANK}.flight"


def test_other_names_are_no_evidence() -> None:
    """Whatever they look like."""
    ends = (".flight", ".stacks-12.json.gz", ".stacks-.txt", ".stacks-1.txt\n", ".passwd-1.txt")
    names = ["", f"r7-{'AB' * 16}.stacks-1.txt", f"../{RANK}.stacks-1.txt", *(RANK + end for end in ends)]
    assert [name for name in names if parse(name)] == []


def test_only_a_regular_file_of_the_right_owner_and_size_is_opened(flight_dir: Path, directory_fd: int) -> None:
    """No link, no FIFO (which would hold the opener), nothing empty, nothing too large, nothing of another user."""
    artifact = named(FLIGHT, STACKS, 1)
    path, secret = flight_dir / artifact.name, flight_dir / "secret"
    secret.write_text("secret")

    def refused(owner: int | None = None) -> bool:
        try:
            artifacts.read_status(directory_fd, artifact, owner)
        except OSError:
            with pytest.raises(OSError):  # noqa: PT011  # ELOOP, ENOENT, or no evidence: none is opened
                artifacts.open_checked(directory_fd, artifact, owner)
            return True
        fd, size = artifacts.open_checked(directory_fd, artifact, owner)
        os.close(fd)
        assert size == path.stat().st_size
        return False

    assert refused()
    for make in (partial(path.symlink_to, secret), partial(path.hardlink_to, secret), partial(os.mkfifo, path)):
        make()
        assert refused()
        path.unlink()
    path.touch()
    assert refused()
    os.truncate(path, LIMITS[STACKS] + 1)
    assert refused()
    path.write_text("stacks")
    assert refused(os.getuid() + 1)
    assert not refused(os.getuid())


def test_evidence_goes_with_its_flight_file(flight_dir: Path, directory_fd: int, make: Make) -> None:
    """What is left without one goes after an hour."""
    flight = make(25)
    beside, lone, new = named(flight, STACKS, 1), named(FLIGHT, STACKS, 2), named(FLIGHT, STACKS, 3)
    for artifact in (beside, lone, new):
        (flight_dir / artifact.name).write_text("x")
    for artifact in (beside, lone):
        age(flight_dir / artifact.name, 2 * STALE_S)
    assert sorted(clean(directory_fd, now=NOW, min_age_s=24 * 3600)) == sorted([flight, beside.name, lone.name])
    assert [path.name for path in flight_dir.iterdir()] == [new.name]


TARGET = token_bytes(16)


@pytest.fixture
def reader(flight_dir: Path) -> Iterator[ControlReader]:
    """The rank's side."""
    opened = ControlReader(str(flight_dir), TARGET)
    yield opened
    opened.close()


@pytest.fixture
def command(flight_dir: Path) -> Path:
    """The target's record."""
    return flight_dir / control.file_name(TARGET)


def test_a_command_is_read_once(directory_fd: int, reader: ControlReader, command: Path) -> None:
    """What was acknowledged is not done again; numbers go on with the clock where the exporter, or even the record, is gone."""
    assert reader.poll() is None
    seq = write_command(directory_fd, TARGET, Command(level=2, profile_steps=5, stacks=True))
    assert reader.poll() == Command(2, 5, stacks=True, seq=seq, profile_seq=seq, stacks_seq=seq)
    assert reader.poll() is None
    first = write_command(directory_fd, TARGET, Command(level=1))
    assert reader.poll()
    second = write_command(directory_fd, TARGET, Command(level=2))
    assert second > first
    command.unlink()
    assert reader.poll() is None
    time.sleep(0.01)  # three numbers of one millisecond are ahead of the clock
    third = write_command(directory_fd, TARGET, Command(level=3))
    assert third > second
    assert reader.poll() == Command(3, seq=third)


def test_a_command_for_another_or_a_damaged_one_is_nobody_s(directory_fd: int, reader: ControlReader, command: Path) -> None:
    """The CRC is seeded by the incarnation, and the target is in it; no flipped bit, other length or garbage is obeyed."""
    other = TARGET[:4] + token_bytes(12)
    write_command(directory_fd, other, Command(level=1))
    command.with_name(control.file_name(other)).rename(command)
    assert reader.poll() is None
    write_command(directory_fd, TARGET, Command(level=2))
    assert reader.poll()
    write_command(directory_fd, TARGET, Command(level=3, profile_steps=10, stacks=True))
    good = command.read_bytes()
    assert len(good) == control.SIZE
    broken = [good[: bit // 8] + bytes([good[bit // 8] ^ 1 << bit % 8]) + good[bit // 8 + 1 :] for bit in range(8 * len(good))]
    broken += [b"", good[:-1], good + b"\0", bytes(len(good)), os.urandom(len(good)), good * 1000]
    for raw in (*broken, good):  # as another file, by rename
        command.with_name("temporary").write_bytes(raw)
        command.with_name("temporary").rename(command)
        assert bool(reader.poll()) == (raw == good)


def test_a_command_is_there_whole_or_not_at_all(directory_fd: int, flight_dir: Path, command: Path) -> None:
    """By rename; nothing temporary stays, not even when it fails; another user may read it, whatever the umask."""
    before = os.umask(0o077)
    write_command(directory_fd, TARGET, Command(level=1))
    os.umask(before)
    assert list(flight_dir.iterdir()) == [command]
    assert command.stat().st_mode & 0o777 == 0o644
    command.unlink()
    command.mkdir()
    with pytest.raises(OSError, match="irectory"):
        write_command(directory_fd, TARGET, Command(level=1))
    assert list(flight_dir.iterdir()) == [command]
