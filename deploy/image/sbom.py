"""Print what an exporter's image holds, as CycloneDX 1.6 JSON.

    python deploy/image/sbom.py dist/image/torchobs-exporter-amd64.tar > sbom.json

Read from the OCI archive that `deploy/image/build` writes, whatever machine the image is for: the Python packages by their
metadata, the packages of the base image by what dpkg knew of them. Nothing of it depends on when or where this runs.
Needs `pip install cyclonedx-python-lib`.
"""

from __future__ import annotations

import json
import sys
import tarfile
from datetime import datetime, timezone
from email.parser import HeaderParser
from typing import IO, TYPE_CHECKING
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from email.message import Message

_DPKG = "var/lib/dpkg/status.d/"


def main(archive: str) -> None:
    """Print the bill of materials of the image in `archive`."""
    with tarfile.open(archive) as image:
        (manifest,) = _json(image, "index.json")["manifests"]
        content = _json(image, _blob(manifest["digest"]))
        config = _json(image, _blob(content["config"]["digest"]))
        made = Bom(serial_number=uuid5(NAMESPACE_URL, manifest["digest"]))
        made.metadata.timestamp = datetime.fromisoformat(config["created"][:19]).replace(tzinfo=timezone.utc)
        made.metadata.component = _image(manifest["digest"], config)
        for layer in content["layers"]:
            with tarfile.open(fileobj=_open(image, _blob(layer["digest"]))) as files:
                made.components.update(_components(files, config["architecture"]))
    made.register_dependency(made.metadata.component, made.components)
    print(JsonV1Dot6(made).output_as_string(indent=2))  # noqa: T201  # the output


def _image(digest: str, config: Mapping[str, object]) -> Component:
    labels = dict(config["config"]["Labels"])  # type: ignore[index]
    return Component(
        type=ComponentType.CONTAINER,
        name=labels["org.opencontainers.image.title"],
        version=labels["org.opencontainers.image.version"],
        bom_ref=digest,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest.removeprefix("sha256:"))],
        properties=[Property(name="architecture", value=str(config["architecture"]))],
    )


def _components(files: tarfile.TarFile, architecture: str) -> Iterator[Component]:
    for member in files:
        if member.isfile() and member.name.endswith(".dist-info/METADATA"):
            yield _python_package(_headers(files, member))
        elif member.isfile() and member.name.startswith(_DPKG):
            yield _debian_package(_headers(files, member), architecture)


def _python_package(said: Message) -> Component:
    name, version = said["Name"].lower().replace("_", "-"), said["Version"]
    licence = said["License-Expression"] or said["License"]
    return Component(
        type=ComponentType.LIBRARY,
        name=said["Name"],
        version=version,
        description=said["Summary"],
        purl=(purl := PackageURL("pypi", name=name, version=version)),
        bom_ref=str(purl),
        licenses=[LicenseFactory().make_from_string(licence)] if licence and "\n" not in licence else (),
    )


def _debian_package(said: Message, architecture: str) -> Component:
    name, version = said["Package"], said["Version"]
    purl = PackageURL("deb", "debian", name, version, {"arch": architecture})
    return Component(type=ComponentType.LIBRARY, name=name, version=version, purl=purl, bom_ref=str(purl))


def _headers(files: tarfile.TarFile, member: tarfile.TarInfo) -> Message:
    return HeaderParser().parsestr(_read(files, member).decode(errors="replace"))


def _json(image: tarfile.TarFile, name: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(_read(image, image.getmember(name)))
    return found


def _blob(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _read(files: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    with _open(files, member) as file:
        return file.read()


def _open(files: tarfile.TarFile, member: tarfile.TarInfo | str) -> IO[bytes]:
    file = files.extractfile(member)
    if file is None:
        sys.exit(f"{member}: not a file")
    return file


if __name__ == "__main__":
    main(*sys.argv[1:])
