"""Headroom in the memory cgroup, from literal trees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.test_cgroup import V1_MOUNTS, V2_MOUNT, plant
from torchobs.flight.files.headroom import cgroup_headroom, cgroup_limit

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MIB = 1 << 20
UNLIMITED_V1 = str(2**63 - 4096)


def v2(**groups: tuple[str, int, int]) -> dict[str, str]:
    """Files of a v2 tree: limit, usage and inactive file pages by path (`_` for `/`)."""
    files = {"proc/self/mountinfo": V2_MOUNT.format(root="/")}
    for path, (limit, usage, inactive) in groups.items():
        directory = "sys/fs/cgroup" + ("/" + path.replace("_", "/")).rstrip("/")
        files[f"{directory}/memory.max"] = f"{limit}\n"
        files[f"{directory}/memory.current"] = f"{usage}\n"
        files[f"{directory}/memory.stat"] = f"anon 1\nfile 2\ninactive_anon 9\ninactive_file {inactive}\nactive_file 4\n"
    return files


def v1(**groups: tuple[str, int, int]) -> dict[str, str]:
    """The same for the v1 memory controller."""
    files = {"proc/self/mountinfo": V1_MOUNTS.format(root="/")}
    for path, (limit, usage, inactive) in groups.items():
        directory = "sys/fs/cgroup/memory" + ("/" + path.replace("_", "/")).rstrip("/")
        files[f"{directory}/memory.limit_in_bytes"] = f"{limit}\n"
        files[f"{directory}/memory.usage_in_bytes"] = f"{usage}\n"
        files[f"{directory}/memory.stat"] = f"cache 1\ninactive_file 7\ntotal_inactive_file {inactive}\n"
    return files


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        pytest.param("", {}, None, id="no cgroups"),
        pytest.param("0::/\n", v2(), None, id="v2 root, which has no limit"),
        pytest.param("0::/a\n", v2(a=("max", 9 * MIB, 0)), None, id="no limit"),
        pytest.param("0::/a\n", v2(a=(str(64 * MIB), 60 * MIB, 0)), 4 * MIB, id="a limit"),
        pytest.param("0::/a\n", v2(a=(str(64 * MIB), 70 * MIB, 0)), 0, id="over its limit"),
        pytest.param("0::/a\n", v2(a=(str(64 * MIB), 64 * MIB, 50 * MIB)), 50 * MIB, id="full of page cache"),
        pytest.param("0::/a/b\n", v2(a=(str(8 * MIB), MIB, 0), a_b=(str(4 * MIB), MIB, 0)), 3 * MIB, id="the inner is tighter"),
        pytest.param("0::/a/b\n", v2(a=(str(8 * MIB), 6 * MIB, 0), a_b=("max", MIB, 0)), 2 * MIB, id="the outer is tighter"),
        pytest.param("0::/\n", v2(**{"": (str(16 * MIB), 3 * MIB, 0)}), 13 * MIB, id="container with a namespace"),
        pytest.param("0::/../../x\n", v2(**{"": (str(16 * MIB), MIB, 0)}), 15 * MIB, id="a path outside the namespace"),
        pytest.param(
            "0::/kubepods/pod1/c1\n", v2(**{"": (str(16 * MIB), MIB, 0)}), 15 * MIB, id="the host's path, not mounted"
        ),
        pytest.param("5:cpu:/x\n4:memory:/d/c\n", v1(d_c=(str(32 * MIB), 30 * MIB, 0)), 2 * MIB, id="v1"),
        pytest.param(
            "4:memory,hugetlb:/c\n", v1(c=(str(32 * MIB), 30 * MIB, 8 * MIB)), 10 * MIB, id="v1 with another controller"
        ),
        pytest.param("4:memory:/c\n", v1(c=(UNLIMITED_V1, 30 * MIB, 0)), None, id="v1 without a limit"),
        pytest.param("4:memory:/docker/abc\n", v1(**{"": (str(8 * MIB), MIB, 0)}), 7 * MIB, id="v1 in a container"),
        pytest.param("4:memory:/c\n0::/c\n", v1(c=(str(8 * MIB), MIB, 0)), 7 * MIB, id="hybrid"),
        pytest.param("3:name=systemd:/c\n1:cpuset:/c\n", v1(c=(str(8 * MIB), MIB, 0)), None, id="no memory controller"),
        pytest.param("0::/a\n", {**v2(), "sys/fs/cgroup/a/memory.max": "64"}, None, id="usage cannot be read"),
        pytest.param("0::/a\n", v2(a=("garbage", 1, 1)), None, id="a limit that is no number"),
        pytest.param("0::/a:b\n", v2(**{"a:b": (str(8 * MIB), MIB, 0)}), 7 * MIB, id="a colon in the path"),
        pytest.param("garbage\n\n::\n", {}, None, id="garbage"),
    ],
)
def test_headroom_is_what_the_tightest_cgroup_has_left(
    tmp_path: Path, membership: str, files: Mapping[str, str], expected: int | None
) -> None:
    """v1 and v2, nested, in containers, and page cache that the kernel would give back is not taken."""
    assert cgroup_headroom(plant(tmp_path, {"proc/self/cgroup": membership, **files})) == expected


def test_the_limit_is_the_tightest_one(tmp_path: Path) -> None:
    """Of the groups from the own one up; one without a limit has none."""
    files = v2(a=(str(8 * MIB), 6 * MIB, 0), a_b=("max", MIB, 0))
    assert cgroup_limit(plant(tmp_path, {"proc/self/cgroup": "0::/a/b\n", **files})) == 8 * MIB
