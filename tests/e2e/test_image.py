"""The exporter's image, built for real: by `make kube-test`, which has a base image and the means."""

import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from tests import support

# Where tests/kubernetes/images.sh has put the archive, the wheels, and what it built on.
BUILT = os.environ.get("TORCHOBS_TEST_IMAGE_FOLDER", "")
pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.skipif(not BUILT, reason=f"{support.NEEDS_KUBERNETES}: and `make kube-test`, which builds the image"),
]
LIMIT = 80_000_000
"""Bytes of the image, uncompressed, but for `libpython`, which is 7 MB of Debian's, and 23 MB with debugging symbols in it,
as in a Python that tests/kubernetes/base.sh may find on a machine. The image is to have 90 MB at most."""


@pytest.fixture(scope="module")
def archive() -> Path:
    """The image that the cluster got."""
    (image,) = Path(BUILT).glob("torchobs-exporter-*.tar")
    return image


@pytest.fixture(scope="module")
def files(archive: Path) -> dict[str, tarfile.TarInfo]:
    """What the image's only layer holds, by path."""
    with tarfile.open(archive) as image:
        largest = max(image, key=lambda member: member.size)
        with tarfile.open(fileobj=image.extractfile(largest)) as layer:
            return {member.name.removeprefix("./"): member for member in layer}


def described(archive: Path) -> tuple[str, dict[str, Any]]:
    """The image's digest, and its configuration."""
    with tarfile.open(archive) as image:

        def read(name: str) -> dict[str, Any]:
            file = image.extractfile(name)
            assert file is not None
            content: dict[str, Any] = json.load(file)
            return content

        (manifest,) = read("index.json")["manifests"]
        content = read(f"blobs/{manifest['digest'].replace(':', '/')}")
        return manifest["digest"], read(f"blobs/{content['config']['digest'].replace(':', '/')}")


def test_the_same_lock_gives_the_same_image(archive: Path, tmp_path: Path) -> None:
    """Built again from the same wheels and base: the same digest, which is the hash of everything."""
    digest, config = described(archive)
    base = (Path(BUILT) / "base").read_text().strip()
    command: list[str | Path] = [support.ROOT / "deploy/image/build", "--engine", "buildah", "--base", base]
    created = datetime.fromisoformat(config["created"][:19]).replace(tzinfo=timezone.utc)
    environ = {
        "PIP_NO_INDEX": "1",
        "SOURCE_DATE_EPOCH": f"{created.timestamp():.0f}",
        "REVISION": config["config"]["Labels"]["org.opencontainers.image.revision"],
    }
    command += ["--wheels", Path(BUILT) / "dist", "--output", tmp_path, "--tag", "localhost/torchobs-exporter-again"]
    subprocess.run(command, env=os.environ | environ, check=True)
    (again,) = tmp_path.glob("torchobs-exporter-*.tar")
    assert described(again)[0] == digest


def test_it_is_small_and_has_no_shell(archive: Path, files: dict[str, tarfile.TarInfo]) -> None:
    """At most 90 MB, uncompressed; no shell, no package manager, no torch; nothing in it can be written by its user."""
    assert sum(member.size for name, member in files.items() if not Path(name).name.startswith("libpython")) < LIMIT
    assert archive.stat().st_size < LIMIT / 2
    names = {Path(name).name for name in files}
    assert not {"sh", "bash", "dash", "busybox", "apt", "dpkg", "pip", "pip3", "torch"} & names
    assert "opt/torchobs/bin/torchobs" in files
    writable = [name for name, member in files.items() if member.mode & 0o002 and not member.issym()]
    assert writable == ["tmp"]


def test_its_bill_of_materials_is_valid_and_complete(archive: Path, files: dict[str, tarfile.TarInfo]) -> None:
    """CycloneDX 1.6, with every Python package that is in the image."""
    from cyclonedx.schema import SchemaVersion  # takes seconds to import
    from cyclonedx.validation.json import JsonStrictValidator

    script = support.ROOT / "deploy/image/sbom.py"
    said = subprocess.run([sys.executable, script, archive], capture_output=True, text=True, check=True).stdout
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(said) is None
    packages = {Path(name).parent.name.partition("-")[0].lower() for name in files if name.endswith(".dist-info/METADATA")}
    named = {name.replace("-", "_") for name in re.findall(r'"purl": "pkg:pypi/([^@]+)@', said)}
    assert {"torchobs", "psutil"} <= packages == named


def test_image_and_chart_are_published_and_signed(
    archive: Path,
    tmp_path: Path,
    start: Callable[..., subprocess.Popen[str]],
    program: Callable[[str], str],
    free_port: Callable[[], int],
) -> None:
    """To a real registry: one image for all machines; its parts, the whole and the chart are signed; no version twice."""
    port, storage = free_port(), {"filesystem": {"rootdirectory": str(tmp_path / "registry")}}
    config = tmp_path / "registry.json"
    config.write_text(json.dumps({"version": 0.1, "storage": storage, "http": {"addr": f"127.0.0.1:{port}"}}))
    start(program("docker-registry"), "serve", config)
    registry = f"127.0.0.1:{port}"
    for name in ("skopeo", "buildah", "helm"):
        program(name)
    ping: Sequence[str] = ("curl", "-fsS", f"http://{registry}/v2/")
    support.wait_until(lambda: not subprocess.run(ping, capture_output=True, check=False).returncode)

    dist, programs = tmp_path / "dist", tmp_path / "programs"
    programs.mkdir()
    (programs / "cosign").write_text('#!/bin/sh\necho "$@" >> "$(dirname "$0")/called"\n')
    (programs / "cosign").chmod(0o755)
    more = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHON": sys.executable, "PLAIN_HTTP": "1", "COSIGN_KEY": "keyless"}
    release = support.ROOT / "deploy/release"
    subprocess.run([release / "build", dist], env=os.environ | more, check=True)
    (dist / archive.name).symlink_to(archive.resolve())

    def publish() -> subprocess.CompletedProcess[str]:
        command: list[str | Path] = [release / "publish", f"{registry}/acme", dist]
        return subprocess.run(command, env=os.environ | more, capture_output=True, text=True, check=False)

    done = publish()
    assert not done.returncode, done.stderr
    (whole,) = re.findall(rf"^{registry}/acme/torchobs-exporter:\S+@(sha256:\w+)$", done.stdout, re.MULTILINE)
    signed = re.findall(rf"^sign --yes {registry}/acme/(\S+)@(\S+)$", (programs / "called").read_text(), re.MULTILINE)
    of_machine = described(archive)[0]
    assert signed[:2] == [("torchobs-exporter", of_machine), ("torchobs-exporter", whole)]
    assert [name for name, _ in signed[2:]] == ["charts/torchobs"]
    again = publish()
    assert again.returncode == 1
    assert "is published already" in again.stderr
