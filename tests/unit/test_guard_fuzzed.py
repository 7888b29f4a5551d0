"""Tensors, patterns and files of every kind, drawn at random: only the errors that are documented, and no code is run."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from tests.unit.test_guard_model_files import MARK, Attack
from torchobs import guard
from torchobs.guard.shapes import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
    torch.int64, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip
LAYOUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "dense": lambda x: x, "transposed": lambda x: x.mT if x.dim() > 1 else x, "expanded": lambda x: x[None].expand(2, *x.shape),
    "coo": lambda x: x.to_sparse(), "csr": lambda x: x.to_sparse_csr(), "meta": lambda x: x.to("meta"),
    "parameter": torch.nn.Parameter, "list": lambda x: x.tolist(), "text": str, "none": lambda _: None,
}  # fmt: skip
SPECIAL = [0.0, 1.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e39, 1e-46]
CONTRACTS = [
    guard.Contract(), guard.Contract("b ...", dtype="floating", min=0, max=1), guard.Contract("", max_norm=1.0, finite=False),
    guard.Contract((None, 3), dtype=(torch.int64, "bool"), device="cpu"),
]  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> Any:
    """A tensor of any dtype, layout and size with values that are awkward; sometimes none."""
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    x = torch.tensor(SPECIAL).repeat(9)[: torch.Size(shape).numel()].reshape(shape)
    try:
        return LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](x.to(draw(st.sampled_from(DTYPES))))
    except (RuntimeError, NotImplementedError, IndexError):  # torch has no such tensor
        return x


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:Casting complex")
@settings(max_examples=50)
@given(x=tensors(), contract=st.sampled_from(CONTRACTS))
def test_tensors_of_every_kind(x: Any, contract: guard.Contract) -> None:
    """Promise: every function answers, or raises what it says that it raises."""
    with suppress(ValueError):  # ContractError is one
        contract.check(x)
    for policy in ("refuse", "clamp", "nan_to_num"):
        with suppress(ValueError):
            made = guard.sanitize_outputs({"x": x}, policy)["x"]
            assert not isinstance(made, torch.Tensor) or guard.Contract().violations(made) == ()
    with suppress(TypeError, ValueError):
        guard.check_outputs(x, contract=contract, classes=0)
    with suppress(ValueError):  # there is no tensor in it
        guard.check_model({"x": x})


@settings(max_examples=100)
@given(text=st.text(alphabet="ab_*.0 13-é²", max_size=12), shape=st.lists(st.integers(0, 5), max_size=5))
def test_patterns_of_any_text(text: str, shape: list[int]) -> None:
    """Promise: a text is a pattern or a ValueError, and a pattern judges every shape."""
    try:
        pattern = parse(text)
    except ValueError:
        return
    why = pattern.mismatch(shape, {})
    assert why is None or why
    assert pattern.mismatch(shape, {}) == why


def _zip(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/data.pkl", content)
        archive.writestr("a/version", "3")
    return file.getvalue()


def _tar(content: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        entry = tarfile.TarInfo("pickle")
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    return file.getvalue()


ATTACK = pickle.dumps(Attack())
FILES: dict[str, bytes] = {
    "weights.safetensors": save({"a": torch.ones(3)}), "attack.pkl": ATTACK, "zip.pt": _zip(ATTACK), "tar.pt": _tar(ATTACK),
    "attack.pkl.gz": gzip.compress(ATTACK), "tar.gz": gzip.compress(_tar(ATTACK)),
    "polyglot.pt": ATTACK + _zip(pickle.dumps({})),
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test is in a directory of its own, in which no malicious file may leave its mark."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not Path(MARK).exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FILES)
def test_an_attack_is_never_clean_nor_loaded(name: str) -> None:
    """Promise: in whatever it is wrapped."""
    Path(name).write_bytes(FILES[name])
    if name.endswith("safetensors"):
        assert guard.scan_file(name).verdict == "clean"
        return
    assert guard.scan_file(name).verdict != "clean"
    with pytest.raises(ValueError, match=name):
        guard.load(name)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_files_of_any_bytes(share_of: Callable[[int], int]) -> None:
    """Promise: of what is damaged or made up there is a verdict, and loading it is a ValueError or gives data; nothing runs."""

    @settings(max_examples=share_of(400), suppress_health_check=list(HealthCheck), database=None)
    @given(data=st.data())
    def answers(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(FILES)))
        content = bytearray(FILES[name])
        for _ in range(data.draw(st.integers(0, 6))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        at, more = data.draw(st.integers(0, len(content))), data.draw(st.binary(max_size=40))
        end = data.draw(st.integers(at, len(content)))
        Path(name).write_bytes(bytes(content[:at]) + more + bytes(content[at:end]))
        assert guard.scan_file(name).verdict in {"clean", "suspicious", "dangerous", "unreadable"}
        with suppress(ValueError):
            guard.load(name)

    answers()
