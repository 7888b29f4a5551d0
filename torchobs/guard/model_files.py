"""Model files: load them without running code, and say what fickling and modelscan find in them."""

from __future__ import annotations

import ast
import contextlib
import errno
import hashlib
import hmac
import io
import logging
import os
import re
import stat
import sys
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple

from torchobs.guard.records import Severity, printable, record_bad_file
from torchobs.support.arguments import is_text
from torchobs.support.result import Checked, Problem
from torchobs.support.torch_files import DAMAGE, damaged_entry

if TYPE_CHECKING:
    from fickling.fickle import Pickled


Risk = Literal["clean", "suspicious", "dangerous", "unreadable"]
_ORDER: tuple[Risk, ...] = ("clean", "unreadable", "suspicious", "dangerous")
UNKNOWABLE = (
    "weights that were changed to answer wrongly (a backdoor) look like any others: compare their hash with the publisher's",
    "code that comes with a model beside its file is not looked at",
)
_HEAD = 512
_MAGIC_NPY = b"\x93NUMPY"
_MAGIC_PICKLE = b"\x80"
_GIT_LFS = b"version https://git-lfs"
_PICKLE_SUFFIXES = (".pkl", ".pickle", ".pt", ".pth", ".ckpt", ".bin", ".joblib")
_MOST_BYTES = 64 * 1024 * 1024
"""Most bytes of a file that are scanned for pickles. In a torch file the tensors are beside the pickle."""
_LEGACY_TORCH = 0x1950A86A20F9469CFC6C
"""First pickle of torch's format before 1.6; four more follow, then the tensors' bytes"""
_LEGACY_PICKLES = 5
_SERIOUS = ("HIGH", "CRITICAL")
_WITHOUT_MODELSCAN = (3, 13)
"""First version of Python without a release of modelscan (0.8.8 requires Python < 3.13)"""
_HARMLESS = frozenset(
    {"__builtin__.set", "collections.OrderedDict", "torch.storage.UntypedStorage", "torch.storage.TypedStorage"}
)
"""Names that torch's restricted loader accepts without listing them: of Python 2 in old files, and classes of storages"""


class UnsafeFileError(ValueError):
    """A file would run code when it is loaded, or needs a loader that could."""


@dataclass(frozen=True)
class FileScan(Checked):
    """The result of :func:`scan_file`. It says nothing about the weights in the file."""

    problems: tuple[Problem, ...]
    """each of the kind ``suspicious``, ``dangerous`` or ``unreadable``"""
    path: str
    risk: Risk
    """the most severe of these kinds, or ``clean``"""
    format: str
    """``safetensors``, ``zip``, ``pickle``, ``npy`` or ``other``"""
    imports: tuple[str, ...]
    """names that its pickles ask for and that torch's restricted loader does not allow"""
    unknowable: tuple[str, ...] = UNKNOWABLE
    """what no scan can find"""


class _Finding(NamedTuple):
    risk: Risk
    reasons: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()


def scan_file(path: str | os.PathLike[str]) -> FileScan:
    """Scan a model file with fickling and modelscan. Nothing of it is run, imported or unpacked.

    Fickling reads pickles (alone, in torch's files of both formats, in ``.npy`` and ``.npz``); modelscan reads the whole file,
    Keras and TensorFlow formats included. These formats are ``unreadable`` without ``modelscan[tensorflow,h5py]``, and on
    Python 3.13 and newer, for which modelscan has no release.

    Returns:
        Its ``risk`` is ``dangerous`` if one of both says that it runs commands; ``suspicious`` if it imports names that torch's
        restricted loader does not allow, which may be a class of the model's author; ``unreadable`` if it is damaged, or of
        a kind that neither reads; else ``clean``.

    Raises:
        OSError: the file cannot be read.
        ImportError: fickling or modelscan is not installed: ``pip install torchobs[guard]``.
    """
    name = os.fspath(path)
    try:
        import fickling  # noqa: F401  # needed at once, not only for a file with a pickle in it

        if sys.version_info < _WITHOUT_MODELSCAN:
            import modelscan  # noqa: F401
    except ImportError as error:
        raise ImportError("scan_file needs fickling and modelscan: pip install 'torchobs[guard]'") from error
    head = _head(name)
    kind = _kind(name, head)
    try:
        findings = [_Finding("unreadable", (f"it {_no_model(head)}",))] if _no_model(head) else list(_read(name, kind))
    except Exception as error:  # noqa: BLE001  # a damaged file may raise anything in its reader; the answer says it
        findings = [_Finding("unreadable", (f"{type(error).__name__}: {error}"[:200],))]
    is_read = kind != "other" and all(finding.risk != "unreadable" for finding in findings)
    findings.append(_scan_by_modelscan(name, is_read=is_read))
    risk = max((finding.risk for finding in findings), key=_ORDER.index)
    problems = dict.fromkeys(Problem(row.risk, printable(name), reason) for row in findings for reason in row.reasons)
    imports = tuple(dict.fromkeys(name for finding in findings for name in finding.imports))
    if risk in {"suspicious", "dangerous"}:
        severity = Severity.ERROR if risk == "dangerous" else Severity.WARNING
        record_bad_file("scan_file", risk, next(iter(problems)).text, severity)
    return FileScan(tuple(problems), name, risk, kind, imports)


def load(path: str | os.PathLike[str], map_location: Any = "cpu") -> Any:
    """Load a model file without running code that is in it.

    Args:
        path: a safetensors file, or one of ``torch.save``, which is loaded with ``weights_only=True``.
        map_location: as in ``torch.load``; of a safetensors file a device.

    Raises:
        UnsafeFileError: it needs code to be loaded, or is no file of ``torch.save``.
        ValueError: it is no model file, or damaged. Checksums, which torch does not compare, are compared; safetensors and
            torch's format before 1.6 have none.
        OSError: the file cannot be read.
    """
    import pickle

    import torch

    name = os.fspath(path)
    head = _head(name)
    shown, kind = printable(name), _kind(name, head)
    if kind == "safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(name, device=str(map_location or "cpu"))
        except SafetensorError as error:
            raise ValueError(f"{shown} is damaged, or {str(map_location)!r} is no device: {error}") from None
    if (problem := _no_model(head)) is not None:
        raise ValueError(f"{shown} {problem}")
    if kind not in {"zip", "pickle"}:
        raise ValueError(f"{shown} is no file of torch.save or safetensors, or the beginning of one")
    try:
        if kind == "zip":
            _check_archive(name)
        with Path(name).open("rb") as file:  # from a name torch would infer the format by its ending
            return torch.load(file, map_location=map_location, weights_only=True)
    except (torch.OutOfMemoryError, UnsafeFileError):
        raise
    except pickle.UnpicklingError as error:
        raise _refusal(name, str(error)) from error
    except DAMAGE as error:
        raise ValueError(f"{shown} is no file of torch.save, or damaged, or unfit for {map_location!r}: {error!r}") from error


def _head(name: str) -> bytes:
    """Return a file's beginning."""
    with _open(name) as file:
        return file.read(_HEAD)


def _open(name: str) -> IO[bytes]:
    """Open a file to read. Raises ``OSError`` for a pipe or a device: a reader might wait or read for ever."""
    if not stat.S_ISREG(Path(name).stat().st_mode):
        raise OSError(errno.EINVAL, "is no file, but a pipe, a device or a directory", name)
    return Path(name).open("rb")


def _no_model(head: bytes) -> str | None:
    """Return in words why a file has no model in it."""
    if not head:
        return "is empty"
    return "only says where the model is: `git lfs pull` brings it" if head.startswith(_GIT_LFS) else None


def _kind(name: str, head: bytes) -> str:
    """Return the format that torch, NumPy or safetensors would read, by the file's beginning or else its name."""
    length = int.from_bytes(head[:8], "little")  # of the JSON with which a safetensors file begins
    if head[8:9] == b"{" and 2 <= length <= Path(name).stat().st_size - 8:  # noqa: PLR2004  # "{}"
        return "safetensors"
    if head.startswith(b"PK\x03\x04"):
        return "zip"
    if head.startswith(_MAGIC_NPY):
        return "npy"
    return "pickle" if head.startswith(_MAGIC_PICKLE) or name.endswith(_PICKLE_SUFFIXES) else "other"


def _check_archive(name: str) -> None:
    """Raise for a TorchScript program and for a wrong checksum: torch would load both without a word."""
    with zipfile.ZipFile(name) as archive:
        if any(entry.endswith("/constants.pkl") for entry in archive.namelist()):  # torch's mark of a program
            what = "a TorchScript program, which torch.jit.load compiles: load that only if you trust its author"
            record_bad_file("load", "refused", f"{printable(Path(name).name)} is {what}")
            raise UnsafeFileError(f"{printable(name)} is {what}")
        if (damaged := damaged_entry(archive)) is not None:
            raise zipfile.BadZipFile(f"the checksum of {printable(damaged)} is another")


def _refusal(name: str, words: str) -> UnsafeFileError:
    """Return the error for a file that torch's restricted loader refuses, with the names that the loader does not allow."""
    import pickle

    import torch

    try:
        asked = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(name))
    except (*DAMAGE, OSError, pickle.UnpicklingError):  # torch's format before 1.6, or no file of torch's
        asked = ""
    # torch's reason comes after its advice to load the file without restriction
    why = asked or re.split(r"(?:GLOBAL|WeightsUnpickler error:)\s+", words)[-1].partition("\n")[0]
    record_bad_file("load", "refused", f"{printable(Path(name).name)} needs code to be loaded ({printable(why)})")
    return UnsafeFileError(
        f"{printable(name)} needs code to be loaded, or is damaged ({printable(why)}): "
        "guard.scan_file says more; torch.serialization.add_safe_globals allows names that you trust"
    )


def _read(name: str, kind: str) -> Iterator[_Finding]:
    """Yield the findings of fickling and safetensors; for other kinds of files there is modelscan alone."""
    if kind == "safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(name, framework="np") as opened:
                opened.keys()
        except SafetensorError as error:
            yield _Finding("unreadable", (f"no safetensors file: {error}",))
    elif kind == "zip":
        yield from _read_zip(name)
    elif kind in {"npy", "pickle"}:
        with Path(name).open("rb") as file:
            content = file.read(_MOST_BYTES)
        yield _scan_npy(content, name) if kind == "npy" else _scan_by_fickling(content, name)
        if kind == "pickle" and zipfile.is_zipfile(name):
            yield _Finding("suspicious", ("it is a zip file as well: what it is depends on who reads it",))


def _read_zip(name: str) -> Iterator[_Finding]:
    with zipfile.ZipFile(name) as archive:
        names = archive.namelist()
        of_torch = {entry.rpartition("/data.pkl")[0] for entry in names if entry.endswith("/data.pkl")}
        if not of_torch and not all(entry.endswith(".npy") for entry in names):
            yield _Finding("unreadable", ("neither a file of torch.save nor of NumPy: fickling reads no other archives",))
        # the bytes of tensors may begin like a pickle, and no loader reads them as one
        memory = tuple(f"{prefix}/{part}/" for prefix in of_torch for part in ("data", "constants"))
        for entry in archive.infolist():
            with archive.open(entry) as part:
                content = part.read(len(_MAGIC_NPY))
                is_npy, is_named = content.startswith(_MAGIC_NPY), entry.filename.endswith((".pkl", ".pickle"))
                if is_npy or is_named or (content[:1] == _MAGIC_PICKLE and not entry.filename.startswith(memory)):
                    content += part.read(_MOST_BYTES - len(content))
                    yield _scan_npy(content, entry.filename) if is_npy else _scan_by_fickling(content, entry.filename)
        if (damaged := damaged_entry(archive)) is not None:
            yield _Finding("unreadable", (f"the checksum of {printable(damaged)} is another",))


def _scan_npy(content: bytes, name: str) -> _Finding:
    from numpy.lib import format as npy

    file = io.BytesIO(content)
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    _, _, dtype = read(file)
    return _scan_by_fickling(content[file.tell() :], name) if dtype.hasobject else _Finding("clean")


def _scan_by_fickling(content: bytes, name: str) -> _Finding:
    """Return fickling's finding about the pickle at the beginning, or about the five of torch's old format."""
    from fickling.analysis import Severity as Level
    from fickling.analysis import check_safety
    from fickling.fickle import StackedPickle

    shown = printable(Path(name).name)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # its warnings are in the answer
        try:
            parts = list(StackedPickle.load(content, fail_on_decode_error=False))
            foreign = _refused_imports(parts)
            is_attack = any(check_safety(part).severity >= Level.LIKELY_OVERTLY_MALICIOUS for part in parts)
        except Exception as error:  # noqa: BLE001  # as above
            return _Finding("unreadable", (f"{shown}: {type(error).__name__}: {printable(str(error))}"[:200],))
    if is_attack:
        runs = ", ".join(foreign) or "operations that no pickle of data has"
        return _Finding("dangerous", (f"{shown} runs {runs} when it is loaded",), foreign)
    if foreign:
        reason = f"{shown} asks for {', '.join(foreign)}, which torch's restricted loader does not allow"
        return _Finding("suspicious", (reason,), foreign)
    loaded = parts[: _LEGACY_PICKLES if any(opcode.arg == _LEGACY_TORCH for opcode in parts[0]) else 1]
    if any(part.has_invalid_opcode for part in loaded):
        return _Finding("unreadable", (f"{shown} has an operation that no pickle has",))
    return _Finding("clean")


def _refused_imports(parts: Iterable[Pickled]) -> tuple[str, ...]:
    """Return the names that pickles import and that torch's restricted loader (``weights_only=True``) does not allow."""
    from torch import _weights_only_unpickler

    allowed = _weights_only_unpickler._get_allowed_globals().keys() | _HARMLESS  # noqa: SLF001  # there is no public list
    imports = dict[str, None]()
    for node in (node for part in parts for node in part.properties.imports):
        module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        imports |= dict.fromkeys(module + alias.name for alias in node.names if module + alias.name not in allowed)
    return tuple(imports)


def _scan_by_modelscan(name: str, *, is_read: bool) -> _Finding:
    """Return modelscan's finding. A file that it cannot read is ``unreadable``, unless it ``is_read`` here."""
    try:
        from modelscan.modelscan import ModelScan
    except ImportError:
        why = "it is looked at by modelscan alone, which has no release for this version of Python"
        return _Finding("clean") if is_read else _Finding("unreadable", (why,))
    logger = logging.getLogger("modelscan")
    before, logger.disabled = logger.disabled, True  # its answer has it all
    try:
        answer = dict(ModelScan().scan(name))
    except Exception as error:  # noqa: BLE001  # as above
        answer = {"errors": [{"description": f"{type(error).__name__}: {error}"[:200]}]}
    finally:
        logger.disabled = before
    issues = answer.get("issues", [])
    reasons = tuple(f"modelscan: {printable(issue['description'])}" for issue in issues)
    if any(issue["severity"] in _SERIOUS for issue in issues):
        return _Finding("dangerous", reasons)
    if issues:
        return _Finding("suspicious", reasons)
    errors = tuple(f"modelscan: {printable(str(error.get('description', error)))}" for error in answer.get("errors", []))
    scanned = answer.get("summary", {}).get("scanned", {}).get("total_scanned", 0)
    if is_read or (scanned and not errors):
        return _Finding("clean")
    return _Finding("unreadable", errors or ("no known kind of model file",))


_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_CHUNK = 1 << 20


class WrongFileError(ValueError):
    """A file is not the published one."""


def verify(
    path: str | os.PathLike[str],
    *,
    sha256: str | None = None,
    signature: str | os.PathLike[str] | None = None,
    public_key: str | os.PathLike[str] | None = None,
) -> None:
    """Return if a file, or a directory, is the published one, by its hash or by a signature.

    Args:
        path: the file; with ``signature`` it may be a directory.
        sha256: the hash, 64 hexadecimal digits.
        signature: a signature of model-signing (OpenSSF), made with the private key of:
        public_key: in PEM.

    Raises:
        WrongFileError: it is not.
        ValueError: none or both of hash and signature are given, or the hash is no hash.
        OSError: a file cannot be read.
        ImportError: model-signing is not installed: ``pip install torchobs[signing]``.
    """
    if (sha256 is None) == (signature is None):
        raise ValueError("give one of sha256 and signature")
    if (signature is None) != (public_key is None):
        raise ValueError("signature and public_key go together")
    try:
        if sha256 is not None:
            _verify_hash(Path(path), sha256)
        elif signature is not None and public_key is not None:
            _verify_signature(os.fspath(path), os.fspath(signature), os.fspath(public_key))
    except WrongFileError:
        record_bad_file("verify", "wrong", f"{Path(path).name} is not what was published")
        raise


def _verify_hash(path: Path, wanted: str) -> None:
    if not is_text(wanted) or not _SHA256.fullmatch(wanted):
        raise ValueError(f"sha256 is {str(wanted)[:80]!r}; it is a text of 64 hexadecimal digits")
    digest = hashlib.sha256()
    with _open(os.fspath(path)) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if not hmac.compare_digest(digest.hexdigest(), wanted.lower()):
        raise WrongFileError(f"{path} has the SHA-256 {digest.hexdigest()}, and {wanted.lower()} was published")


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
