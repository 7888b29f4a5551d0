"""Which file system a path is on, by the mounts of this process: without access to the path, whose server may be dead."""

from __future__ import annotations

from pathlib import Path

from torchobs.support.cgroup import unescaped


def mountinfo() -> str:
    """Return the text of ``/proc/self/mountinfo``; empty where there is none."""
    try:
        return Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return ""  # not Linux


def mount_of(path: str, mounts: str | None = None) -> tuple[str, str]:
    """Return mount point and type of the file system that a resolved path is on; empty if unknown. ``mounts``: as above."""
    point, kind = "", ""
    for line in (mountinfo() if mounts is None else mounts).splitlines():
        fields = line.split(" ")
        if "-" not in fields[6:-1]:
            continue
        mount = unescaped(fields[4])
        inside = path == mount or path.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(point):  # of equal mount points the last one is on top
            point, kind = mount, fields[fields.index("-", 6) + 1]
    return point, kind
