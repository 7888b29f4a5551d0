"""`deploy/image`: the lock is complete, the root file system's parts are found, and the scripts refuse what they cannot do."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="needs a Python that reads TOML")

MACHINES = ("x86_64", "aarch64")
PYTHONS = ("3.10", "3.11", "3.13", "3.14")


@pytest.fixture
def folder(checkout: Path) -> Path:
    """Where the Containerfile is."""
    return checkout / "deploy" / "image"


@pytest.fixture
def locked(folder: Path) -> list[tuple[Requirement, int]]:
    """Each line of the lock, and how many hashes it has."""
    entries = re.split(r"\n(?=\S)", re.sub(r"^#.*\n", "", (folder / "requirements.lock").read_text()).strip())
    return [(Requirement(entry.partition(" \\\n")[0]), entry.count("--hash=sha256:")) for entry in entries]


@pytest.fixture
def rootfs(folder: Path) -> dict[str, Any]:
    """What the script that makes the root file system defines."""
    return runpy.run_path(str(folder / "rootfs.py"))


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_has_what_the_exporter_needs(
    checkout: Path, locked: list[tuple[Requirement, int]], python: str, machine: str
) -> None:
    """One version with hashes of everything that pyproject.toml asks for, in the range that it allows."""
    where = {"python_version": python, "python_full_version": f"{python}.0", "platform_machine": machine}
    versions: dict[str, str] = {}
    for requirement, hashes in locked:
        if requirement.marker is None or requirement.marker.evaluate(where):
            (only,) = requirement.specifier
            assert (only.operator, hashes > 0) == ("==", True), requirement
            assert canonicalize_name(requirement.name) not in versions, "two versions of one package"
            versions[canonicalize_name(requirement.name)] = only.version
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    for text in (*project["dependencies"], *project["optional-dependencies"]["exporter"]):
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate(where):
            assert wanted.specifier.contains(versions[canonicalize_name(wanted.name)]), text


def test_libraries_are_found_as_the_loader_finds_them(rootfs: dict[str, Any]) -> None:
    """What ELF files ask for, read without running them: the same names as `readelf`'s, the loader among a program's."""
    if not (readelf := shutil.which("readelf")):
        pytest.skip("needs a C++ compiler's readelf")
    linked: Callable[[Path], tuple[list[str], list[str]]] = rootfs["linked"]
    program = Path(sys.executable).resolve()
    modules = sorted(Path(os.__file__).parent.glob("lib-dynload/*.so"))[:5]
    for path in (program, *modules):
        said = subprocess.run([readelf, "--dynamic", "--program-headers", path], capture_output=True, text=True, check=True)
        asked = re.findall(r"(?:Shared library|Requesting program interpreter): \[?([^\]\n]+)\]", said.stdout)
        where = re.findall(r"Library r(?:un)?path: \[(.*)\]", said.stdout)
        assert sorted(linked(path)[0]) == sorted(asked)
        assert ":".join(linked(path)[1]) == ":".join(where)
    assert any("ld-linux" in name for name in linked(program)[0])
    assert linked(Path(__file__)) == ([], [])


def test_absolute_links_stay_within_the_base(rootfs: dict[str, Any], tmp_path: Path) -> None:
    """`/lib/x.so -> /opt/real.so` of the base is the base's file and never this machine's; what is not there is left out."""
    base, root = tmp_path / "base", tmp_path / "root"
    (base / "usr/lib").mkdir(parents=True)
    (base / "opt").mkdir()
    root.mkdir()
    (base / "lib").symlink_to("usr/lib")
    (base / "opt/real.so").write_text("the base's")
    (base / "usr/lib/x.so").symlink_to("/opt/real.so")
    (base / "usr/lib/passwd").symlink_to("/etc/passwd")
    made = rootfs["RootFs"](base, root, "x86_64")
    for path in ("lib/x.so", "lib/passwd"):
        made.take(path)
    assert (root / "lib/x.so").read_text() == "the base's"
    assert [path.name for path in (root / "usr/lib").iterdir()] == ["x.so"]


def test_the_image_belongs_to_a_number_and_needs_no_shell(folder: Path) -> None:
    """Kubelet refuses `runAsNonRoot` for a name. Nothing runs in the last stage, so that it can be for another machine."""
    text = (folder / "Containerfile").read_text()
    last = text.rpartition("\nFROM ")[2]
    (user,) = re.findall(r"^USER (.*)$", text, re.MULTILINE)
    assert all(part.isdecimal() and int(part) > 0 for part in user.split(":"))
    assert last.startswith("scratch\n")
    assert not re.search(r"^RUN", last, re.MULTILINE)
    assert 'ENTRYPOINT ["torchobs", "exporter"]' in last
    assert set(re.findall(r"org\.opencontainers\.image\.(\S+)=", last)) >= {
        "title",
        "version",
        "revision",
        "source",
        "licenses",
    }


@pytest.mark.parametrize(
    ("image", "key", "said"),
    [
        ("registry.example/torchobs-exporter:1", "cosign.key", "has no digest"),
        (f"registry.example/torchobs-exporter@sha256:{'0' * 64}", "", "COSIGN_KEY is not set"),
        (f"registry.example/torchobs-exporter@sha256:{'0' * 64}", "cosign.key", "cosign is not on PATH"),
    ],
)
def test_signing_says_what_it_lacks(folder: Path, tmp_path: Path, image: str, key: str, said: str) -> None:
    """A tag is not signed, for it may be another image's by now; without a key or cosign the message says how to get it."""
    sbom = tmp_path / "sbom.json"
    sbom.write_text("{}")
    environ = {"PATH": "/usr/bin:/bin", "COSIGN_KEY": key}
    done = subprocess.run([folder / "sign", image, sbom], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert said in done.stderr


def test_signing_signs_and_attests_by_digest(folder: Path, tmp_path: Path) -> None:
    """What cosign is called with, as a program of that name on PATH is told."""
    (tmp_path / "cosign").write_text('#!/bin/sh\necho "$@" >> "$(dirname "$0")/called"\n')
    (tmp_path / "cosign").chmod(0o755)
    sbom = tmp_path / "sbom.json"
    sbom.write_text("{}")
    image = f"registry.example/torchobs-exporter@sha256:{'0' * 64}"
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "COSIGN_KEY": "awskms:///alias/key"}
    subprocess.run([folder / "sign", image, sbom], env=environ, check=True)
    assert (tmp_path / "called").read_text().splitlines() == [
        f"sign --yes --key awskms:///alias/key {image}",
        f"attest --yes --key awskms:///alias/key --type cyclonedx --predicate {sbom} {image}",
    ]
