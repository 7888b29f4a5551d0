"""Where flight files go: the candidates, hostile directories, and file systems that are refused."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from torchobs.flight.files import location
from torchobs.flight.files.location import NoPlaceError, candidates, filesystem_type, find_existing, open_directory, open_place

ME = os.getuid()

MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
23 22 0:21 / /dev rw,nosuid shared:2 - devtmpfs devtmpfs rw,size=4096k
24 23 0:22 / /dev/shm rw,nosuid,nodev shared:3 - tmpfs tmpfs rw
25 22 0:23 / /home rw shared:4 master:1 - nfs4 server:/home rw,vers=4.2
26 22 0:24 / /mnt/with\\040blank\\011tab\\134back rw - fuse.sshfs me@there:/ rw
27 22 0:25 /sub /data rw unbindable - lustre 10.0.0.1@tcp:/scratch rw
28 25 0:26 / /home/me/local rw - xfs /dev/vdb rw
29 22 0:27 / /over rw - nfs 10.0.0.1:/x rw
30 22 0:28 / /over rw - tmpfs tmpfs rw
garbage
31 22 0:29 / /odd rw -
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", "ext4"),
        ("/dev/shm/torchobs-0", "tmpfs"),
        ("/dev/shmoo", "devtmpfs"),
        ("/home/me", "nfs4"),
        ("/home/me/local/x", "xfs"),
        ("/homely", "ext4"),
        ("/mnt/with blank\ttab\\back/x", "fuse.sshfs"),
        ("/data", "lustre"),
        ("/over/there", "tmpfs"),
        ("/odd/x", "ext4"),
    ],
)
def test_the_file_system_is_that_of_the_longest_mount_and_the_last_of_equals(path: str, expected: str) -> None:
    """By the text of mountinfo, escapes undone."""
    assert filesystem_type(MOUNTS, path) == expected


def test_without_mountinfo_the_type_is_unknown() -> None:
    """Not Linux."""
    assert filesystem_type("", "/tmp") == ""


@pytest.fixture
def parent(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that everybody may write to, as /tmp and /dev/shm are: the only candidate's parent."""
    flight_dir.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(flight_dir))
    monkeypatch.setattr(location, "_roomy", lambda _: False)
    return flight_dir


def test_a_directory_that_was_given_is_the_only_candidate() -> None:
    """Nobody wants files elsewhere than where they said."""
    assert candidates("/x/y", "/run/user/0") == ["/x/y"]


def test_the_runtime_directory_comes_first_if_it_is_mine(parent: Path) -> None:
    """Then shared memory with room, then the temporary directory."""
    runtime = parent / "runtime"
    runtime.mkdir()
    temporary = str(parent / f"torchobs-{ME}")
    assert candidates(None, str(runtime)) == [str(runtime / "torchobs"), temporary]
    assert candidates(None, str(parent / "absent")) == [temporary]
    assert candidates(None, None) == [temporary]


@pytest.mark.parametrize(
    ("blocks", "free", "roomy"),
    [(1 << 18, 1 << 17, True), (1 << 18, 1 << 15, False), ((1 << 18) - 1, 1 << 17, False), (16_000, 16_000, False)],
)
def test_shared_memory_is_taken_only_with_a_gibibyte_and_a_quarter_free(
    monkeypatch: pytest.MonkeyPatch, blocks: int, free: int, *, roomy: bool
) -> None:
    """A container's 64 MiB belong to NCCL and the DataLoader."""

    def statvfs(_: str) -> os.statvfs_result:
        return os.statvfs_result((4096, 4096, blocks, free, free, 0, 0, 0, 0, 255))

    monkeypatch.setattr(os, "statvfs", statvfs)
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
    assert (second.shared, second.given) == (False, False)
    os.close(first.fd)
    os.close(second.fd)


def foreign_directory(path: Path) -> None:
    """Made by another user (as root), or open to others."""
    path.mkdir()
    path.chmod(0o777)
    if ME == 0:
        os.chown(path, 12345, 12345)


def open_to_others(path: Path) -> None:
    """Mine, but anybody may write to it."""
    path.mkdir()
    path.chmod(0o770)


def link_to_mine(path: Path) -> None:
    """A symbolic link to a directory that is all right."""
    target = path.with_name("target")
    target.mkdir(mode=0o700)
    path.symlink_to(target)


def dangling_link(path: Path) -> None:
    """A symbolic link to nothing."""
    path.symlink_to("/nonexistent/x")


def plain_file(path: Path) -> None:
    """No directory at all."""
    path.write_text("")


HOSTILE = [foreign_directory, open_to_others, link_to_mine, dangling_link, plain_file]


@pytest.mark.parametrize("prepare", HOSTILE)
def test_a_name_that_somebody_took_gets_a_number(parent: Path, prepare: object) -> None:
    """Nothing is put where another user could read or replace it; all ranks and their exporter meet in the next one."""
    assert callable(prepare)
    prepare(parent / f"torchobs-{ME}")
    first, second = open_place(None, None), open_place(None, None)
    assert first.path == second.path == find_existing(None, None) == str(parent / f"torchobs-{ME}-1")
    assert stat.S_IMODE(os.fstat(first.fd).st_mode) == 0o700
    os.close(first.fd)
    os.close(second.fd)


def test_when_every_name_is_taken_there_is_no_place_and_the_message_says_what_to_do(parent: Path) -> None:
    """Training goes on without us."""
    for name in location.numbered_names(str(parent / f"torchobs-{ME}")):
        Path(name).write_text("")
    with pytest.raises(NoPlaceError, match="TORCHOBS_DIR"):
        open_place(None, None)
    assert find_existing(None, None) is None


def test_a_directory_that_is_not_there_yet_is_not_found(parent: Path) -> None:
    """A reader makes none."""
    assert find_existing(None, None) is None
    assert find_existing(str(parent / "given"), None) is None
    assert list(parent.iterdir()) == []


def test_a_given_directory_is_made_with_its_parents_and_taken_as_it_is(flight_dir: Path) -> None:
    """Whoever it belongs to; files are shared by group where it is another user's or gives its group to them."""
    given = flight_dir / "a" / "b"
    made = open_place(str(given), None)
    assert (made.given, made.shared) == (True, False)
    assert stat.S_IMODE(given.stat().st_mode) == 0o700
    os.close(made.fd)
    for mode, shared in ((0o755, False), (0o770, False), (0o2770, True), (0o3777, True)):
        given.chmod(mode)
        made = open_place(str(given), None)
        assert made.shared is shared
        os.close(made.fd)
    assert find_existing(str(given), None) == str(given)


def test_a_given_symbolic_link_is_refused(flight_dir: Path) -> None:
    """It could lead somewhere else tomorrow."""
    (flight_dir / "link").symlink_to(flight_dir)
    with pytest.raises(NoPlaceError, match="link"):
        open_place(str(flight_dir / "link"), None)
    with pytest.raises(OSError, match="directory"):
        open_directory(str(flight_dir / "link"))


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "lustre", "fuse", "fuse.sshfs", "ceph", "9p", "cifs", "beegfs", "virtiofs"])
def test_a_network_file_system_is_refused(flight_dir: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A store into a page of it blocks for as long as the server is away."""
    monkeypatch.setattr(location, "_mountinfo", lambda: f"22 1 0:1 / / rw - {kind} server:/ rw\n")
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(NoPlaceError, match=kind.partition(".")[0]):
        open_place(str(flight_dir), None)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before  # an earlier test's thread may close its own meanwhile


@pytest.mark.parametrize(
    ("kind", "in_memory"), [("tmpfs", True), ("ramfs", True), ("ext4", False), ("overlay", False), ("fuseblk", False)]
)
def test_only_memory_is_stored_to_directly(
    flight_dir: Path, monkeypatch: pytest.MonkeyPatch, kind: str, *, in_memory: bool
) -> None:
    """On anything else the sampler writes."""
    monkeypatch.setattr(location, "_mountinfo", lambda: f"22 1 0:1 / / rw - {kind} x rw\n")
    made = open_place(str(flight_dir), None)
    assert made.in_memory is in_memory
    os.close(made.fd)


def test_a_pod_s_mount_is_used_where_it_is(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are for the sidecar's group; nothing is made, and nothing else is tried."""
    mount = flight_dir / "mount"
    mount.mkdir(mode=0o777)
    monkeypatch.setattr(location, "KUBERNETES_MOUNT", str(mount))
    assert candidates(None, None) == [str(mount)]
    assert find_existing(None, None) == str(mount)
    made = open_place(None, None)
    assert (made.path, made.shared, made.given) == (str(mount), True, True)
    os.close(made.fd)


def test_files_of_a_shared_place_are_for_the_group(flight_dir: Path) -> None:
    """0640 there, 0600 elsewhere, whatever the umask."""
    from torchobs.flight.format.layout import MIN_SIZE
    from torchobs.flight.writer.writer import open_writer

    for mode, expected in ((0o2770, 0o640), (0o700, 0o600)):
        flight_dir.chmod(mode)
        before = os.umask(0o777)
        made = open_writer(open_place(str(flight_dir), None), {"rank": 0}, MIN_SIZE)
        os.umask(before)
        assert {stat.S_IMODE(path.stat().st_mode) for path in flight_dir.iterdir()} == {expected}
        made.close()
        for path in flight_dir.iterdir():
            path.unlink()


def test_a_renewed_place_keeps_its_descriptor(parent: Path) -> None:
    """Whoever holds the number goes on with the new directory."""
    made = open_place(None, None)
    Path(made.path).rmdir()
    location.renew(made)
    assert os.path.samestat(os.fstat(made.fd), (parent / f"torchobs-{ME}").stat())
    assert not os.get_inheritable(made.fd)
    os.close(made.fd)
