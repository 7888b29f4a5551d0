"""Model files: load them without running code, say what they would run, and compare them with what was published."""

from __future__ import annotations

import errno
import io
import logging
import os
import stat
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from torchobs.guard import archives, compressed, pickles
from torchobs.guard.record import found_wrong, text_of
from torchobs.guard.severity import Severity
from torchobs.support.result import Result

Verdict = Literal["clean", "suspicious", "dangerous", "unreadable"]
_ORDER: tuple[Verdict, ...] = ("clean", "unreadable", "suspicious", "dangerous")
UNKNOWABLE = (
    "weights that were changed to answer wrongly (a backdoor) look like any others: compare their hash with the publisher's",
    "code that comes with a model beside its file is not looked at",
)
_MAGIC_PICKLE = b"\x80"
_MAGIC_ZIP = b"PK\x03\x04"
_GIT_LFS = b"version https://git-lfs"
_MAGIC_TAR = b"ustar"
_TAR_AT = 257
_MAGIC_NPY = b"\x93NUMPY"
_HEAD = 512
_SERIOUS = ("HIGH", "CRITICAL")
_WITHOUT_MODELSCAN = (3, 13)
"""Versions of Python from this one on have no release of modelscan (0.8.8 requires Python < 3.13)"""


class UnsafeFileError(ValueError):
    """A file would run code, or do other harm, if it were loaded."""


@dataclass(frozen=True)
class FileScan(Result):
    """What :func:`scan_file` found. ``clean`` means that loading it runs no code; it is no word about the weights in it."""

    path: str
    verdict: Verdict
    kind: str
    """``safetensors``, ``zip``, ``pickle``, ``npy``, ``tar``, ``compressed`` or ``other``"""
    reasons: tuple[str, ...]
    imports: tuple[str, ...]
    """names that its pickles ask for and that torch's restricted loader does not allow"""
    unknowable: tuple[str, ...] = UNKNOWABLE
    """what no scan can tell"""


def scan_file(path: str | os.PathLike[str]) -> FileScan:
    """Say whether loading a model file would run code. Nothing of it is run, imported or unpacked.

    Pickles (alone, in torch's files of both formats, in ``.npy`` and ``.npz``) are read by fickling; the file as a whole, Keras
    and TensorFlow formats included, by modelscan; archives are looked at for bombs and for paths that lead out of them.
    Those formats are ``unreadable`` without what ``modelscan[tensorflow,h5py]`` brings, and on Python 3.13 and newer, for which
    modelscan has no release.

    Returns:
        ``dangerous``: it runs commands, or is an archive that does harm. ``suspicious``: it asks for code that torch's
        restricted loader does not allow, which may be a class of the model's author. ``unreadable``: a damaged or unknown file.
        Else ``clean``.

    Raises:
        OSError: the file cannot be read.
        ImportError: fickling or modelscan is not installed: ``pip install torchobs[guard]``.
    """
    name = os.fspath(path)
    try:
        import fickling  # noqa: F401  # asked for at once, not only by a file with a pickle in it

        if sys.version_info < _WITHOUT_MODELSCAN:
            import modelscan  # noqa: F401
    except ImportError as error:
        raise ImportError("scan_file needs fickling and modelscan: pip install 'torchobs[guard]'") from error
    with _opened(name) as file:
        kind, found = _contents(name, file)
    if not any(verdict == "dangerous" for verdict, _, _ in found):  # what is an attack is not read any further
        is_read = kind in _READ or (kind == "zip" and all(verdict != "unreadable" for verdict, _, _ in found))
        found.append(_by_modelscan(name, is_read=is_read))
    verdict = max((each[0] for each in found), key=_ORDER.index)
    reasons = tuple(dict.fromkeys(reason for _, reasons, _ in found for reason in reasons))
    imports = tuple(dict.fromkeys(name for _, _, imports in found for name in imports))
    if verdict in {"suspicious", "dangerous"}:
        severity = Severity.ERROR if verdict == "dangerous" else Severity.WARNING
        found_wrong("scan_file", verdict, reasons[0] if reasons else "", severity)
    return FileScan(name, verdict, kind, reasons, imports)


def load(path: str | os.PathLike[str], map_location: Any = "cpu") -> Any:
    """Load a model file without running code that is in it.

    Args:
        path: a safetensors file, or one of ``torch.save``, which is loaded with ``weights_only=True``.
        map_location: as in ``torch.load``; of a safetensors file a device.

    Raises:
        UnsafeFileError: it needs code to be loaded, or is an archive that does harm.
        ValueError: it is no model file, or damaged: contents of another checksum too, which torch does not compare. Safetensors
            and torch's format before 1.6 have none.
        OSError: the file cannot be read.
    """
    import pickle

    import torch

    name = os.fspath(path)
    with _opened(name) as file:
        head = file.read(_HEAD)
    shown, kind = text_of(name), _kind(name, head)
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
            _check_zip(name)
        if name.endswith(".safetensors"):  # torch would take it for one by its name
            with _opened(name) as file:
                return torch.load(file, map_location=map_location, weights_only=True)
        return torch.load(name, map_location=map_location, weights_only=True)
    except torch.OutOfMemoryError:
        raise
    except pickle.UnpicklingError as error:
        asked = pickles.attempt(lambda: torch.serialization.get_unsafe_globals_in_checkpoint(name)) if kind == "zip" else []
        foreign = tuple(asked) if not isinstance(asked, str) else ()
        raise _refused(name, kind, repr(map_location), foreign, error) from error
    except _DAMAGE as error:
        raise _refused(name, kind, repr(map_location), None, error) from error


def _opened(name: str) -> IO[bytes]:
    """Open a file to read. Raises ``OSError`` for a pipe or a device, at which a reader would wait, or never come to an end."""
    without_waiting = getattr(os, "O_NONBLOCK", 0)
    file = open(name, "rb", opener=lambda path, flags: os.open(path, flags | without_waiting))  # noqa: SIM115  # closed by the caller
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "is a pipe or a device, and no file", name)
    return file


def _no_model(head: bytes) -> str | None:
    """Return what a file is that holds nothing of a model, in words."""
    if not head:
        return "is empty"
    return "only says where the model is: `git lfs pull` brings it" if head.startswith(_GIT_LFS) else None


_DAMAGE = (
    RuntimeError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    UnicodeError,
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
    AssertionError,
)
"""What torch and zipfile raise for a damaged file"""


def _check_zip(name: str) -> None:
    """Raise for what torch would load without a word: an archive that does harm, or is not what was written; and for code."""
    with zipfile.ZipFile(name) as archive:
        problems = archives.zip_problems(archive)
        if not problems and any(entry.endswith("/constants.pkl") for entry in archive.namelist()):  # by which torch knows one
            problems = ["a TorchScript program, which torch.jit.load compiles: load that only if you trust its author"]
        if not problems and (damaged := archives.damaged_entry(archive)) is not None:
            raise zipfile.BadZipFile(f"the checksum of {text_of(damaged)} is another")
    if problems:
        found_wrong("load", "refused", f"{text_of(Path(name).name)}: {problems[0]}")
        raise UnsafeFileError(f"{text_of(name)}: {problems[0]}")


def _refused(name: str, kind: str, device: str, names: tuple[str, ...] | None, error: Exception) -> ValueError:
    """Return the error to raise, in words. ``names``: what torch's restricted loader refused; None if it refused nothing."""
    shown = text_of(name)
    if kind == "pickle":
        with Path(name).open("rb") as file:
            first = pickles.first_of(file.read(pickles.MOST_BYTES))
        if first is None:
            return ValueError(f"{shown} is no file of torch.save, or damaged: it begins with no pickle that can be read")
        if first.is_torch:
            names = None if names is None else pickles.unknown(first.names)
        elif not (names := pickles.unknown(first.names)):
            what = "is a plain pickle, and no file of torch.save: pickle.load reads it"
            return ValueError(f"{shown} {what}, if guard.scan_file says that it runs no code")
    if names is None:
        why = str(error).strip() or type(error).__name__
        return ValueError(f"{shown} is no file of torch.save, or damaged, or does not fit {device}: {why}")
    asked = f" ({', '.join(names)})" if names else ", or is damaged"
    advice = "guard.scan_file says more; torch.serialization.add_safe_globals allows what is known to be good"
    found_wrong("load", "refused", f"{text_of(Path(name).name)} needs code to be loaded{asked}")
    return UnsafeFileError(f"{shown} needs code to be loaded{asked}: {advice}")


_Found = tuple[Verdict, tuple[str, ...], tuple[str, ...]]
"""Verdict, reasons, names that are not allowed"""


def _contents(name: str, file: IO[bytes]) -> tuple[str, list[_Found]]:
    """Return a file's kind and what was found in it."""
    head = file.read(_HEAD)
    kind = _kind(name, head)
    if (problem := _no_model(head)) is not None:
        return "other", [("unreadable", (f"it {problem}",), ())]
    found = pickles.attempt(lambda: _READERS[kind](name))
    if isinstance(found, str):
        return kind, [("unreadable", (found,), ())]
    if kind != "zip" and pickles.attempt(lambda: zipfile.is_zipfile(name)) is True:
        found.append(("suspicious", ("it is a zip file as well: what it is depends on who reads it",), ()))
    return kind, found


def _kind(name: str, head: bytes) -> str:
    """Return what torch, NumPy and safetensors would take a file for: by its beginning."""
    begins = {
        "zip": head.startswith(_MAGIC_ZIP),
        "npy": head.startswith(_MAGIC_NPY),
        "safetensors": _is_safetensors(name, head),
        "compressed": compressed.is_compressed(head),
        "tar": head[_TAR_AT : _TAR_AT + len(_MAGIC_TAR)] == _MAGIC_TAR,
        # those of protocol 0 and 1 begin with anything
        "pickle": head.startswith(_MAGIC_PICKLE)
        or name.endswith((".pkl", ".pickle", ".pt", ".pth", ".ckpt", ".bin", ".joblib")),
    }
    return next((kind for kind, is_it in begins.items() if is_it), "other")


def _is_safetensors(name: str, head: bytes) -> bool:
    # eight bytes with the length of the JSON after them
    length = int.from_bytes(head[:8], "little")
    return head[8:9] == b"{" and 2 <= length <= os.stat(name).st_size - 8  # noqa: PLR2004, PTH116  # "{}"


def _read_tar(name: str) -> list[_Found]:
    problems = archives.tar_problems(name)
    if problems:
        return [("dangerous", tuple(problems), ())]
    return [("unreadable", ("a tar file is not looked into: unpack it, and scan what is in it",), ())]


def _read_compressed(name: str) -> list[_Found]:
    problems, is_tar = compressed.compressed_problems(name)
    if problems:
        return [("dangerous", tuple(problems), ())]
    what = "unpack it, and scan what is in it" if is_tar else "decompress it, and scan what it was"
    return [("unreadable", (f"a compressed {'tar ' * is_tar}file is not looked into: {what}",), ())]


def _read_bare(name: str) -> list[_Found]:
    with Path(name).open("rb") as file:
        return [_pickle(file.read(pickles.MOST_BYTES), name)]


def _read_npy(name: str) -> list[_Found]:
    with Path(name).open("rb") as file:
        return [_npy(file.read(pickles.MOST_BYTES), name)]


def _read_safetensors(name: str) -> list[_Found]:
    found = [_safetensors(name)]
    if not name.endswith(".safetensors"):  # somebody may unpickle it
        found += [one for one in _read_bare(name) if one[0] in {"suspicious", "dangerous"}]
    return found


def _read_other(_name: str) -> list[_Found]:
    return []  # modelscan's word is all there is


def _read_zip(name: str) -> list[_Found]:
    with zipfile.ZipFile(name) as archive:
        problems = archives.zip_problems(archive)
        if problems:
            return [("dangerous", tuple(problems), ())]  # it is not read any further
        names = archive.namelist()
        is_torch = {entry.rpartition("/data.pkl")[0] for entry in names if entry.endswith("/data.pkl")}
        found: list[_Found] = []
        if not is_torch and not all(entry.endswith(".npy") for entry in names):
            found.append(
                ("unreadable", ("neither a file of torch.save nor of NumPy: of other archives modelscan's word is all",), ())
            )
        memory = tuple(f"{prefix}/{part}/" for prefix in is_torch for part in ("data", "constants"))
        for entry in archive.infolist():
            with archive.open(entry) as part:
                content = part.read(len(_MAGIC_NPY))
                # the memory of tensors, which no loader takes for anything else, may begin with any byte
                is_memory = entry.filename.startswith(memory)
                is_npy, is_named = content.startswith(_MAGIC_NPY), entry.filename.endswith((".pkl", ".pickle"))
                if is_npy or is_named or (content[:1] == _MAGIC_PICKLE and not is_memory):
                    content += part.read(pickles.MOST_BYTES - len(content))
                    found.append(_npy(content, entry.filename) if is_npy else _pickle(content, entry.filename))
        damaged = pickles.attempt(lambda: archives.damaged_entry(archive))
        if damaged is not None:
            found.append(("unreadable", (f"its contents are not what was written: {text_of(damaged)}",), ()))
    return found or [("clean", (), ())]


_READERS: dict[str, Callable[[str], list[_Found]]] = {
    "zip": _read_zip,
    "npy": _read_npy,
    "safetensors": _read_safetensors,
    "tar": _read_tar,
    "compressed": _read_compressed,
    "pickle": _read_bare,
    "other": _read_other,
}
_READ = frozenset({"npy", "safetensors", "pickle"})
"""Kinds that are read whole here; of others modelscan has to have read something"""


def _pickle(content: bytes, name: str) -> _Found:
    code, shown = pickles.analyse(content), text_of(Path(name).name)
    foreign = pickles.unknown(code.imports)
    if code.malicious:
        runs = ", ".join(foreign or code.imports) or "operations that no pickle of data has"
        return "dangerous", (f"{shown} runs {runs} when it is loaded",), foreign
    if foreign:
        reason = f"{shown} asks for {', '.join(foreign)}, which torch's restricted loader does not allow"
        return "suspicious", (reason,), foreign
    if code.problem is not None:
        return "unreadable", (f"{shown}: {code.problem}",), ()
    return "clean", (), ()


def _npy(content: bytes, name: str) -> _Found:
    from numpy.lib import format as npy

    file = io.BytesIO(content)
    try:
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        _, _, dtype = read(file)
    except (ValueError, EOFError) as error:
        return "unreadable", (f"{text_of(Path(name).name)}: {error}",), ()
    return _pickle(content[file.tell() :], name) if dtype.hasobject else ("clean", (), ())


def _safetensors(name: str) -> _Found:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(name, framework="np") as file:
            file.keys()
    except SafetensorError as error:
        return "unreadable", (f"no safetensors file: {error}",), ()
    return "clean", (), ()


def _by_modelscan(name: str, *, is_read: bool) -> _Found:
    """Return modelscan's word. What it could not read counts unless it ``is_read`` here."""
    try:
        from modelscan.modelscan import ModelScan
    except ImportError:
        why = "it is looked at by modelscan alone, which has no release for this version of Python"
        return ("clean", (), ()) if is_read else ("unreadable", (why,), ())
    logger = logging.getLogger("modelscan")
    before, logger.disabled = logger.disabled, True  # what it says is in its answer
    try:
        answer = pickles.attempt(lambda: dict(ModelScan().scan(name)))
    finally:
        logger.disabled = before
    if isinstance(answer, str):
        return ("clean", (), ()) if is_read else ("unreadable", (f"modelscan: {answer}",), ())
    issues = answer.get("issues", [])
    reasons = tuple(f"modelscan: {issue['description']}" for issue in issues)
    if any(issue["severity"] in _SERIOUS for issue in issues):
        return "dangerous", reasons, ()
    if issues:
        return "suspicious", reasons, ()
    errors = tuple(f"modelscan: {error.get('description', error)}" for error in answer.get("errors", []))
    scanned = answer.get("summary", {}).get("scanned", {}).get("total_scanned", 0)
    if is_read or (scanned and not errors):
        return "clean", (), ()
    return "unreadable", errors or ("no model file that is known here",), ()
