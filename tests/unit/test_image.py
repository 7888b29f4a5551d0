"""`deploy/image`: the lock is complete, the root file system's parts are found, and the scripts refuse what they cannot do."""

import re
import subprocess
import sys
from pathlib import Path

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
