"""Recorded trees of /proc and /sys/fs/cgroup: v1, v2, hybrid, in containers of each kind, nested limits, and none at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from torchobs.support.cgroup import Cpu, Hierarchy, cpu_of, hierarchy, memory_of, pressure, read, tightest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

T = TypeVar("T")
GIB = 1024**3

V2_STAT = """anon {anon}
file {file}
slab_reclaimable {slab}
slab_unreclaimable 1048576
shmem 1048576
inactive_file {inactive}
active_file {active}
"""
V1_STAT = """cache 1
rss 2
inactive_file 1
active_file 1
hierarchical_memory_limit {limit}
total_cache 3221225472
total_rss 1073741824
total_swap {swap}
total_inactive_file {inactive}
total_active_file {active}
"""
V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = """29 23 0:25 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755
33 29 0:29 {root} /sys/fs/cgroup/memory rw,nosuid shared:9 - cgroup cgroup rw,memory
34 29 0:30 {root} /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:10 - cgroup cgroup rw,cpu,cpuacct
"""
UNIFIED = "31 29 0:27 / /sys/fs/cgroup/unified rw,nosuid shared:5 - cgroup2 cgroup2 rw,nsdelegate\n"


def plant(root: Path, files: Mapping[str, str]) -> str:
    """Write a tree; its root is what the functions are given."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def v2_group(where: str, *, limit: str = "max", usage: int = 3 * GIB, cpu: str = "max 100000") -> dict[str, str]:
    """The files of one v2 group that uses 3 GiB: 1 GiB inactive file pages, 0.5 active, 0.25 slabs."""
    stat = V2_STAT.format(anon=GIB, file=GIB * 3 // 2, slab=GIB // 4, inactive=GIB, active=GIB // 2)
    files = {
        "cgroup.events": "populated 1\nfrozen 0\n",
        "memory.current": f"{usage}\n",
        "memory.max": f"{limit}\n",
        "memory.stat": stat,
        "memory.peak": f"{usage + 5}\n",
        "memory.swap.current": "4096\n",
        "memory.swap.max": "max\n",
        "memory.events": "low 0\nhigh 0\nmax 8\noom 2\noom_kill 2\noom_group_kill 0\n",
        "cpu.max": f"{cpu}\n",
        "cpu.stat": "usage_usec 5000000\nnr_periods 100\nnr_throttled 40\nthrottled_usec 2500000\n",
        "memory.pressure": "some avg10=1.00 avg60=0.5 avg300=0.1 total=1500000\nfull avg10=0.0 avg60=0.0 total=500000\n",
    }
    return {f"sys/fs/cgroup{where}/{name}": text for name, text in files.items()}


def v1_group(where: str, *, limit: int = 9223372036854771712, usage: int = 3 * GIB, quota: int = -1) -> dict[str, str]:
    """The files of one v1 group, memory and CPU."""
    stat = V1_STAT.format(limit=limit, swap=8192, inactive=GIB, active=GIB // 2)
    memory = {
        "memory.usage_in_bytes": f"{usage}\n",
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.max_usage_in_bytes": f"{usage + 5}\n",
        "memory.stat": stat,
        "memory.memsw.limit_in_bytes": f"{limit + GIB if limit < 1 << 62 else limit}\n",
        "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
    }
    cpu = {
        "cpu.cfs_quota_us": f"{quota}\n",
        "cpu.cfs_period_us": "100000\n",
        "cpu.stat": "nr_periods 100\nnr_throttled 40\nthrottled_time 2500000000\n",
        "cpuacct.usage": "7000000000\n",
    }
    return {
        **{f"sys/fs/cgroup/memory{where}/{name}": text for name, text in memory.items()},
        **{f"sys/fs/cgroup/cpu,cpuacct{where}/{name}": text for name, text in cpu.items()},
    }


def found(what: T | None) -> T:
    """It, which must be there."""
    assert what is not None
    return what


def test_v2_in_a_container_with_its_own_namespace(tmp_path: Path) -> None:
    """Docker and Kubernetes today: the path is "/", and the mount's root is the container's own group."""
    root = plant(tmp_path, v2_group("", limit=str(4 * GIB), cpu="250000 100000"))
    groups = hierarchy("0::/\n", V2_MOUNT.format(root="/"), "memory", root)
    assert groups == Hierarchy(v2=True, levels=("/sys/fs/cgroup",))
    level, memory = found(tightest(groups, root))
    assert level == "/sys/fs/cgroup"
    assert (memory.usage, memory.working_set, memory.limit) == (3 * GIB, 2 * GIB, 4 * GIB)
    assert memory.pinned == GIB + GIB // 4  # no file pages, no reclaimable slabs
    assert memory.left == 4 * GIB - memory.pinned
    assert (memory.swap, memory.swap_limit, memory.peak, memory.oom_kills) == (4096, None, 3 * GIB + 5, 2)
    assert cpu_of(groups, root) == Cpu(2.5, 100, 40, 2.5, 5.0)
    assert pressure(read(f"{root}/sys/fs/cgroup/memory.pressure")) == {"some": 1.5, "full": 0.5}


def test_v2_on_a_host_the_least_room_of_the_nested_groups_counts(tmp_path: Path) -> None:
    """A full slice is tighter than the service in it. A moved process sees `/../other`: only what is mounted is looked at."""
    root = plant(
        tmp_path,
        {
            "sys/fs/cgroup/cgroup.controllers": "cpu memory\n",
            **v2_group("/user.slice", limit=str(8 * GIB), usage=8 * GIB, cpu="100000 100000"),
            **v2_group("/user.slice/train.service", limit=str(4 * GIB), usage=2 * GIB, cpu="max 100000"),
        },
    )
    groups = found(hierarchy("0::/user.slice/train.service\n", V2_MOUNT.format(root="/"), "memory", root))
    assert groups.levels == ("/sys/fs/cgroup/user.slice/train.service", "/sys/fs/cgroup/user.slice", "/sys/fs/cgroup")
    assert found(tightest(groups, root))[0] == "/sys/fs/cgroup/user.slice"
    assert memory_of("/sys/fs/cgroup", v2=True, root=root) is None
    assert found(cpu_of(groups, root)).limit == 1.0
    root = plant(tmp_path, v2_group("", limit=str(4 * GIB)))
    moved = hierarchy("0::/../../etc\n", V2_MOUNT.format(root="/"), "memory", root)
    assert moved == Hierarchy(v2=True, levels=("/sys/fs/cgroup",))


def test_v1_in_a_container_without_a_namespace(tmp_path: Path) -> None:
    """The path is the host's, and its name stands in mountinfo; the root group without a limit is the machine, and no group."""
    path = "/kubepods/burstable/pod1234/abcd"
    root = plant(tmp_path, v1_group("", limit=4 * GIB, quota=150_000))
    membership = f"5:memory:{path}\n4:cpu,cpuacct:{path}\n1:name=systemd:{path}\n"
    groups = hierarchy(membership, V1_MOUNTS.format(root=path), "memory", root)
    assert groups == Hierarchy(v2=False, levels=("/sys/fs/cgroup/memory",))
    memory = found(tightest(groups, root))[1]
    assert (memory.working_set, memory.pinned, memory.limit) == (2 * GIB, 3 * GIB // 2, 4 * GIB)
    assert (memory.swap, memory.swap_limit, memory.oom_kills) == (8192, GIB, 3)
    cpu = found(hierarchy(membership, V1_MOUNTS.format(root=path), "cpu", root))
    assert cpu_of(cpu, root) == Cpu(1.5, 100, 40, 2.5, 7.0)
    root = plant(tmp_path, v1_group(""))
    groups = found(hierarchy("5:memory:/\n", V1_MOUNTS.format(root="/"), "memory", root))
    assert tightest(groups, root) is None


def test_a_hybrid_system_has_memory_where_v1_has_it_and_pressure_where_v2_is(tmp_path: Path) -> None:
    """What systemd calls hybrid mounts v2 without controllers; none is where mount or membership is missing or unreadable."""
    files = {
        **v1_group("/job", limit=4 * GIB),
        "sys/fs/cgroup/unified/job/cgroup.events": "populated 1\n",
        "sys/fs/cgroup/unified/job/memory.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 total=7\n",
    }
    root = plant(tmp_path, files)
    membership, mounts = "5:memory:/job\n4:cpu,cpuacct:/job\n0::/job\n", V1_MOUNTS.format(root="/") + UNIFIED
    levels = ("/sys/fs/cgroup/memory/job", "/sys/fs/cgroup/memory")
    assert hierarchy(membership, mounts, "memory", root) == Hierarchy(v2=False, levels=levels)
    unified = found(hierarchy(membership, mounts, "", root))
    assert (unified.v2, unified.levels[0]) == (True, "/sys/fs/cgroup/unified/job")
    for mounts in ("", "1 2 3 - ext4 a b"):
        assert hierarchy("0::/\n", mounts, "memory", root) is None
    assert hierarchy("", V2_MOUNT.format(root="/"), "memory", root) is None
    assert hierarchy("", "", "memory", root) is hierarchy("nonsense", "nonsense - cgroup2", "memory", root) is None
