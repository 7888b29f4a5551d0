"""deploy/compose as podman-compose runs it, with a storage of its own, and images that this machine's programs stand in for."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from tests.support import NEEDS_CONTAINERS, clean_environment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

_PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
HELPERS = ("netavark", "aardvark-dns")
"""What podman makes networks with, in which services find each other by name."""


def why_not() -> str | None:
    """None if containers can be run here, else the reason for a skip."""
    programs = [shutil.which(name, path=_PATH) for name in ("podman", "podman-compose", "iptables")]
    helpers = all((Path("/usr/lib/podman") / name).exists() for name in HELPERS)
    namespaces = ["unshare", "--mount", "--net", "true"]
    if not all(programs) or not helpers or subprocess.run(namespaces, capture_output=True, check=False).returncode:
        packages = f"podman runc iptables {' '.join(HELPERS)}"
        return f"{NEEDS_CONTAINERS}: as root, `apt-get install {packages}`, `pip install podman-compose`"
    return None


class Podman:
    """A podman that knows only what it has made itself, inside a `with` block: nothing of it is left."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="podman-", dir="/var/tmp"))  # short: names of Unix sockets are
        self._chains_before = _port_chains()
        self.project = f"torchobs-{uuid4().hex[:8]}"
        self.environ = clean_environment() | {
            "PATH": _PATH,
            "CONTAINERS_STORAGE_CONF": str(self._toml("storage", {
                "storage": {"driver": "overlay", "runroot": self.home / "run", "graphroot": self.home / "storage"},
            })),
            "CONTAINERS_CONF": str(self._toml("containers", {
                "engine": {
                    "cgroup_manager": "cgroupfs", "events_logger": "file", "tmp_dir": self.home / "tmp",
                    "static_dir": self.home / "libpod", "volume_path": self.home / "volumes",
                },
                "network": {"network_backend": "netavark", "network_config_dir": self.home / "networks"},
                "containers": {"default_ulimits": _limits()},
            })),
        }  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        names = self.run("ps", "--all", "--format", "{{.Names}}").split()
        for name in names:
            print(f"--- {name}", self.run("logs", "--tail", "30", name), sep="\n")  # noqa: T201  # pytest shows it of a failure
        if names:
            self.run("rm", "--force", "--time", "0", *names)
        self.run("volume", "prune", "--force")
        self.run("network", "prune", "--force")
        for chain in _port_chains() - self._chains_before:
            subprocess.run(["iptables", "--table", "nat", "--delete-chain", chain], capture_output=True, check=False)
        shutil.rmtree(self.home, ignore_errors=True)

    def run(self, *arguments: str | Path, program: str = "podman") -> str:
        """What it says on its output."""
        done = subprocess.run([program, *arguments], env=self.environ, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"{program} {arguments}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def image(self, name: str, *instructions: str) -> None:
        """Make an image by the name that a compose file has: a root of nothing but places for what is mounted.

        No registry is asked. ``instructions`` are those of a Containerfile: entry point, user, variables.
        """
        file = self.home / "image.tar"
        with tarfile.open(file, mode="w") as archive:
            for path, mode in (("tmp", 0o1777), ("etc", 0o755), ("run", 0o755), ("usr", 0o755)):
                folder = tarfile.TarInfo(path)
                folder.type, folder.mode = tarfile.DIRTYPE, mode
                archive.addfile(folder)
            for path in ("bin", "lib", "lib64"):
                link = tarfile.TarInfo(path)
                link.type, link.linkname = tarfile.SYMTYPE, f"usr/{path}"
                archive.addfile(link)
        changes = [word for instruction in instructions for word in ("--change", instruction)]
        self.run("import", *changes, file, name)

    def compose(self, files: Sequence[Path], *arguments: str) -> str:
        """The same of podman-compose."""
        named = [word for file in files for word in ("--file", str(file))]
        return self.run("--project-name", self.project, *named, *arguments, program="podman-compose")

    def _toml(self, name: str, tables: Mapping[str, Mapping[str, Any]]) -> Path:
        path = self.home / f"{name}.conf"
        lines = []
        for table, values in tables.items():
            lines.append(f"[{table}]")
            lines += [f"{key} = {json.dumps(value, default=str)}" for key, value in values.items()]
        path.write_text("\n".join(lines) + "\n")
        return path


def _port_chains() -> set[str]:
    """The chains of published ports: netavark 1.4 leaves them behind, empty."""
    rules = subprocess.run(["iptables", "--table", "nat", "--list-rules"], capture_output=True, text=True, check=False).stdout
    return {rule.removeprefix("-N ") for rule in rules.splitlines() if rule.startswith("-N NETAVARK-DN-")}


def _limits() -> list[str]:
    """No more than this process may have itself: without CAP_SYS_RESOURCE nobody may raise them."""
    files, processes = (resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    return [f"nofile={files}:{files}", f"nproc={min(processes, 4096) if processes > 0 else 4096}"]
