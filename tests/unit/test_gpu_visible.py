"""CUDA_VISIBLE_DEVICES is read as the CUDA driver reads it."""

import pytest

from torchobs.probes.gpu.visible_devices import Board, visible

A, B, C = "GPU-8932f937-d72c", "GPU-8932ffff-0000", "GPU-1d1f0000-1111"
PLAIN = [Board(A), Board(B), Board(C)]
MIGS = [Board(A, ("MIG-11", "MIG-12"), mig=True), Board(B), Board(C, (), mig=True)]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, [A, B, C]),
        ("", []),
        ("-1", []),
        ("2,0", [C, A]),
        (" 1 , 2 ", [B, C]),
        ("0,7,1", [A]),
        ("1,-1,0", [B]),
        ("0,0", []),
        ("1gpu,2x", [B, C]),
        (C, [C]),
        ("GPU-1d1f,GPU-8932f9", [C, A]),
        ("GPU-8932f", []),
        ("GPU-none,0", []),
        ("none", []),
    ],
)
def test_physical_gpus(variable: str | None, expected: list[str]) -> None:
    """Ordinals, UUIDs and their beginnings; the list ends where a name is none, and a device named twice empties it."""
    assert visible(variable, PLAIN) == expected


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, ["MIG-11", B]),
        ("0,1", ["MIG-11", B]),
        ("MIG-12", ["MIG-12"]),
        (A, ["MIG-11"]),
        ("2", []),
        ("MIG-1", []),
    ],
)
def test_a_gpu_in_mig_mode_is_of_use_through_an_instance_only(variable: str | None, expected: list[str]) -> None:
    """CUDA takes its first one, unless an instance is named."""
    assert visible(variable, MIGS) == expected
