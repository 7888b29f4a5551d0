"""Compare model files with what was published: by hash, by a list of hashes, by signature."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from pathlib import Path

from torchobs.guard.record import found_wrong
from torchobs.support.arguments import is_text

_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_CHUNK = 1 << 20


class WrongFileError(ValueError):
    """A file is not the one that was published."""


def verify(
    path: str | os.PathLike[str],
    *,
    sha256: str | None = None,
    manifest: str | os.PathLike[str] | None = None,
    signature: str | os.PathLike[str] | None = None,
    public_key: str | os.PathLike[str] | None = None,
) -> None:
    """Return if a file, or a directory, is the one that was published. One way to know it has to be given.

    Args:
        path: the file; with ``manifest`` or ``signature`` it may be a directory.
        sha256: its hash, 64 hexadecimal digits.
        manifest: a file of ``sha256sum``'s lines. Of a directory it has to name every file, and each has to be the same; of a
            file, that one.
        signature: one of model-signing (OpenSSF), made with the private key of:
        public_key: in PEM.

    Raises:
        WrongFileError: it is another one.
        ValueError: not exactly one way was given, or a hash is none.
        OSError: a file cannot be read.
        ImportError: model-signing is not installed: ``pip install torchobs[signing]``.
    """
    if sum(way is not None for way in (sha256, manifest, signature)) != 1:
        raise ValueError("give one of sha256, manifest and signature")
    if (signature is None) != (public_key is None):
        raise ValueError("signature and public_key go together")
    try:
        if sha256 is not None:
            _verify_hash(Path(path), sha256)
        elif manifest is not None:
            _verify_manifest(Path(path), _manifest(Path(manifest)))
        elif signature is not None and public_key is not None:
            _verify_signature(os.fspath(path), os.fspath(signature), os.fspath(public_key))
    except WrongFileError:
        found_wrong("verify", "wrong", f"{Path(path).name} is not what was published")
        raise


def _verify_hash(path: Path, wanted: str) -> None:
    if not is_text(wanted) or not _SHA256.fullmatch(wanted):
        raise ValueError(f"sha256 is {str(wanted)[:80]!r}; it is a text of 64 hexadecimal digits")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if not hmac.compare_digest(digest.hexdigest(), wanted.lower()):
        raise WrongFileError(f"{path} has the SHA-256 {digest.hexdigest()}, and {wanted.lower()} was published")


def _verify_manifest(path: Path, entries: list[tuple[str, str]]) -> None:
    listed = {Path(name): digest for digest, name in entries}
    if path.is_dir():
        there = {each.relative_to(path) for each in path.rglob("*") if not each.is_dir()}
        base = path
    else:
        there, base = {Path(path.name)}, path.parent
    if unlisted := sorted(map(str, there - listed.keys())):
        raise WrongFileError(f"{path}: the manifest does not name {', '.join(unlisted[:5])}")
    for name in sorted(listed) if path.is_dir() else [Path(path.name)]:
        _verify_hash(base / name, listed[name])


def _manifest(path: Path) -> list[tuple[str, str]]:
    """Return hashes and names of a file as ``sha256sum`` writes it. Raises ``ValueError``."""
    entries = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        digest, _, name = line.partition(" ")
        name = name.removeprefix(" ").removeprefix("*")
        if not _SHA256.fullmatch(digest) or not name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{path}, line {number}: not a hash and a path below the directory")
        entries.append((digest, name))
    if not entries:
        raise ValueError(f"{path} names no file")
    return entries


def _verify_signature(path: str, signature: str, public_key: str) -> None:
    try:
        from model_signing import verifying
    except ImportError as error:
        raise ImportError("a signature needs model-signing: pip install 'torchobs[signing]'") from error
    os.stat(path)  # noqa: PTH116  # raises for what is not there, in the words of every other function
    try:
        verifying.Config().use_elliptic_key_verifier(public_key=public_key).verify(path, signature)  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise WrongFileError(f"{path} does not have this signature: {error}") from error
