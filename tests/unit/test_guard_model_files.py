"""Model files: what would run code is said and refused, and none of it runs. The malicious files are made here."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import pickle
import sys
import zipfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from torchobs import guard

if TYPE_CHECKING:
    from collections.abc import Callable

MARK = "loaded.txt"
"""The file that a malicious one makes in the current directory when its code runs"""


class Attack:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"echo > {MARK}",)


def checkpoint() -> dict[str, Any]:
    """What trainings save."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "lr": [1e-3], "best": None}


def old(value: Any, path: Path) -> None:
    """Torch's format before 1.6."""
    torch.save(value, path, _use_new_zipfile_serialization=False)


def pickled(value: Any, path: Path, protocol: int = 4) -> None:
    """A bare pickle."""
    path.write_bytes(pickle.dumps(value, protocol))


def twofold(path: Path, first: Any, saved: Any) -> None:
    """A pickle, and a torch file for those who look for an archive's end."""
    torch.save(saved, path)
    path.write_bytes(pickle.dumps(first) + path.read_bytes())


def cut(make: Callable[[Path], Any], path: Path, length: int) -> None:
    """A file without its end."""
    make(path)
    path.write_bytes(path.read_bytes()[:length])


class Scripted(torch.nn.Module):
    """What TorchScript writes with each of its marks for lists and dictionaries, and with tensors that are constants."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.LSTM(2, 2)
        self.words = torch.jit.Attribute(["a"], list[str])
        self.numbers = torch.jit.Attribute({"a": [0.5]}, dict[str, list[float]])
        self.flags = torch.jit.Attribute([True], list[bool])
        self.grid = torch.full((4,), 0x3F800080, dtype=torch.int32).view(torch.float32)  # its memory begins as a pickle does

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)[0] + self.grid[0]
        return y


def scripted(path: Path, *, frozen: bool = False, **added: bytes) -> None:
    """A TorchScript program, with further pickles in its archive."""
    program = torch.jit.script(Scripted().eval())
    torch.jit.save(torch.jit.freeze(program) if frozen else program, path)
    with zipfile.ZipFile(path, "a") as archive:
        for name, content in added.items():
            archive.writestr(f"{path.stem}/{name}.pkl", content)


FILES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "state.pt": ("clean", lambda path: torch.save(checkpoint(), path)),
    "old.pt": ("clean", lambda path: old(checkpoint()["model"], path)),
    "weights.safetensors": ("clean", lambda path: save_file({"a": torch.ones(3)}, path)),
    "array.npy": ("clean", lambda path: np.save(path, np.ones(3))),
    "namespace.pt": ("suspicious", lambda path: torch.save({"args": argparse.Namespace(lr=1)}, path)),
    "script.pt": ("dangerous", scripted),
    "script-attack.pt": ("dangerous", lambda path: scripted(path, more=pickle.dumps(Attack(), 2))),
    "whole.pt": ("suspicious", lambda path: torch.save(torch.nn.Linear(2, 2), path)),
    "attack.pt": ("dangerous", lambda path: torch.save({"w": torch.ones(2), "x": Attack()}, path)),
    "attack-old.pt": ("dangerous", lambda path: old({"w": torch.ones(2), "x": Attack()}, path)),
    "attack.pkl": ("dangerous", lambda path: pickled(Attack(), path)),
    "objects.npy": ("dangerous", lambda path: np.save(path, np.array([Attack()], dtype=object), allow_pickle=True)),
    "attack.pkl.gz": ("unreadable", lambda path: path.write_bytes(gzip.compress(pickle.dumps(Attack())))),
    "polyglot.pt": ("dangerous", lambda path: twofold(path, Attack(), {})),
    "twofold.pt": ("suspicious", lambda path: twofold(path, {}, torch.nn.Linear(2, 2))),
    "cut.pt": ("unreadable", lambda path: cut(partial(torch.save, checkpoint()), path, 300)),
    "noise.dat": ("unreadable", lambda path: path.write_bytes(bytes(range(7, 250)) * 9)),
}


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Each test is in a directory of its own, in which no malicious file may leave its mark."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not Path(MARK).exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol", "ignore:Duplicate name", "ignore:.*torch.jit")
@pytest.mark.parametrize("name", FILES)
def test_verdict_and_loading(tmp_path: Path, name: str) -> None:
    """Promise: the verdict is right; what is not clean is not loaded, and no code runs at either."""
    verdict, make = FILES[name]
    path = tmp_path / name
    make(path)
    scan = guard.scan_file(path)
    assert scan.risk == verdict, scan
    assert scan.ok == (verdict == "clean")
    if name in {"state.pt", "old.pt", "weights.safetensors"}:
        assert guard.load(path)
        return
    with pytest.raises(ValueError, match=name):
        guard.load(path)


def test_no_flipped_bit_is_loaded(tmp_path: Path) -> None:
    """Promise: what is loaded is what was saved, or it is an error: a bit that changed in a weight, too."""
    path, weights = tmp_path / "a.pt", {"a": torch.randn(600), "b": torch.arange(300)}
    torch.save(weights, path)
    content = path.read_bytes()
    refused = 0
    for place in range(5, len(content), 97):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            loaded = guard.load(path)
        except ValueError as error:
            if "the checksum of a/data/" in str(error):
                refused += 1
                assert guard.scan_file(path).risk == "unreadable"
        else:
            assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())
    assert refused >= 600 * 4 // 97


@pytest.mark.filterwarnings("ignore:Detected pickle protocol", "ignore:.*torch.jit")
def test_what_no_restricted_loader_reads_is_said_in_words(tmp_path: Path) -> None:
    """Promise: the error names what it would run, and hostile names are escaped."""
    for name, words in {
        "attack.pkl": r"attack\.pkl needs code to be loaded, or is damaged \(Unsupported operand",
        "attack-old.pt": r"\(\w+\.system ",
        "namespace.pt": r"argparse\.Namespace",
        "script.pt": "a TorchScript program",
    }.items():
        FILES[name][1](tmp_path / name)
        with pytest.raises(guard.UnsafeFileError, match=words):
            guard.load(tmp_path / name)
    path = tmp_path / "a\x1b[31m\u202e.pt"
    torch.save(torch.nn.Linear(2, 2), path)
    with pytest.raises(guard.UnsafeFileError) as refused:
        guard.load(path)
    assert all(str(problem).isprintable() for problem in (refused.value, *guard.scan_file(path).problems))


def test_a_file_is_what_it_contains_and_not_what_it_is_called(tmp_path: Path) -> None:
    """Promise: a file of torch.save with the name of safetensors, and the reverse, are loaded with what was saved."""
    saved = checkpoint()
    torch.save(saved, tmp_path / "a.safetensors")
    save_file({"a": torch.ones(3)}, tmp_path / "b.pt")
    assert torch.equal(guard.load(tmp_path / "a.safetensors")["model"]["0.weight"], saved["model"]["0.weight"])
    assert guard.load(tmp_path / "b.pt")["a"].tolist() == [1.0] * 3
    cut(partial(torch.save, checkpoint()), tmp_path / "c.safetensors", 300)
    with pytest.raises(ValueError, match=r"c\.safetensors is no file of torch\.save, or damaged"):
        guard.load(tmp_path / "c.safetensors")


def test_hashes(tmp_path: Path) -> None:
    """Promise: one byte's difference is refused; nothing, two ways, half a way and a hash that is none are errors."""
    path = tmp_path / "weights.bin"
    path.write_bytes(b"weights")
    listed = hashlib.sha256(b"weights").hexdigest()
    guard.verify(path, sha256=listed.upper())
    path.write_bytes(b"Weights")
    with pytest.raises(guard.WrongFileError, match="was published"):
        guard.verify(path, sha256=listed)
    for ways in ({}, {"sha256": listed, "signature": "b"}, {"signature": "c"}, {"sha256": "short"}):
        with pytest.raises(ValueError, match=r"one of|go together|64 hexadecimal"):
            guard.verify(path, **ways)


@pytest.mark.filterwarnings("ignore")  # of model-signing's dependencies
def test_signatures(tmp_path: Path) -> None:
    """Promise: a signature of model-signing holds for the model that was signed, and for no other."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from model_signing import signing

    key = ec.generate_private_key(ec.SECP256R1())
    private, public, signature = tmp_path / "key.pem", tmp_path / "key.pub", tmp_path / "model.sig"
    encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private.write_bytes(key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain))
    public.write_bytes(key.public_key().public_bytes(encoding, serialization.PublicFormat.SubjectPublicKeyInfo))
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights.bin").write_bytes(b"weights")
    signing.Config().use_elliptic_key_signer(private_key=private).sign(model, signature)  # type: ignore[no-untyped-call]
    guard.verify(model, signature=signature, public_key=public)
    (model / "weights.bin").write_bytes(b"others")
    with pytest.raises(guard.WrongFileError, match="does not have this signature"):
        guard.verify(model, signature=signature, public_key=public)


SYSTEM = b"cos\nsystem\n(S'echo > " + MARK.encode() + b"'\ntR."
CROOKED = {
    "attribute chain": b"\x80\x04\x8c\x0dtorch.storage\x8c\x0ftorch.os.system\x93\x8c\x06echo> M\x85R.",
    "an integer that only C reads": b"\x80\x02I0x10\n0" + SYSTEM,
    "more than fickling reads": b"\x80\x02" + b"N" * 11_000 + SYSTEM,
    "before a zip file": b"\x80\x02" + SYSTEM + b"PK\x05\x06" + bytes(18),
}


@pytest.mark.parametrize("name", CROOKED)
def test_what_hides_from_a_scanner_is_not_clean(tmp_path: Path, name: str) -> None:
    """Promise: no pickle that Python's unpickler would run is clean, whatever the scanner's parser makes of it."""
    paths = [tmp_path / "crooked.pkl", tmp_path / "crooked.pt", tmp_path / "crooked-torch.pt"]
    for path in paths[:2]:
        path.write_bytes(CROOKED[name])
    with zipfile.ZipFile(paths[2], "w") as archive:
        archive.writestr("a/data.pkl", CROOKED[name])
        archive.writestr("a/version", "3")
    assert "clean" not in [guard.scan_file(path).risk for path in paths]


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_do_nothing(tmp_path: Path, data: st.DataObject) -> None:
    """Promise: whatever bytes are changed, there is a verdict, loading is a ValueError or gives data, and no code runs."""
    name = data.draw(st.sampled_from(["attack.pt", "attack.pkl", "state.pt", "weights.safetensors", "objects.npy"]))
    path = tmp_path / name
    FILES[name][1](path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    assert guard.scan_file(path).risk in {"clean", "suspicious", "dangerous", "unreadable"}
    with suppress(ValueError):
        guard.load(path)


def test_without_modelscan_what_it_alone_reads_is_not_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Python 3.13, which it has no release for; on older ones it is asked for."""
    monkeypatch.setitem(sys.modules, "modelscan", None)
    monkeypatch.setitem(sys.modules, "modelscan.modelscan", None)
    keras, dangerous = tmp_path / "model.h5", tmp_path / "model.pkl"
    keras.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(512))
    dangerous.write_bytes(b"\x80\x02" + SYSTEM)
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    monkeypatch.setattr("torchobs.guard.model_files._WITHOUT_MODELSCAN", (3, 99))
    with pytest.raises(ImportError, match=r"pip install 'torchobs\[guard\]'"):
        guard.scan_file(keras)
    monkeypatch.setattr("torchobs.guard.model_files._WITHOUT_MODELSCAN", (3, 0))
    scan = guard.scan_file(keras)
    assert (scan.risk, "no release" in scan.problems[0].text) == ("unreadable", True)
    assert guard.scan_file(dangerous).risk == "dangerous"
    assert guard.scan_file(tmp_path / "model.safetensors").risk == "clean"


def test_what_holds_no_model_is_said_in_words(tmp_path: Path) -> None:
    """Promise: an empty file and a pointer of git lfs are named, by scan and load alike."""
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"
    for name in ("model.pt", "model.safetensors"):
        for content, words in ((b"", "is empty"), (pointer, "git lfs")):
            (tmp_path / name).write_bytes(content)
            scan = guard.scan_file(tmp_path / name)
            assert (scan.risk, words in scan.problems[0].text) == ("unreadable", True)
            with pytest.raises(ValueError, match=words):
                guard.load(tmp_path / name)


@pytest.mark.parametrize("read", [guard.load, guard.scan_file, partial(guard.verify, sha256="0" * 64)])
def test_a_pipe_a_device_or_a_directory_is_refused_at_once(read: Callable[[Path], Any], tmp_path: Path) -> None:
    """Promise: nobody waits for a writer, or reads zeros until memory is full; what is not there is not found."""
    os.mkfifo(tmp_path / "model.pt")
    for path in (tmp_path / "model.pt", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match="is no file"):
            read(path)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none.pt")
