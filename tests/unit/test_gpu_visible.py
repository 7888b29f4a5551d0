"""CUDA_VISIBLE_DEVICES is read as the CUDA driver reads it."""

import pytest

from torchobs.probes.gpu.visible_devices import visible

A, B, C = "GPU-8932f937-d72c", "GPU-8932ffff-0000", "GPU-1d1f0000-1111"


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
        ("MIG-8932", []),
    ],
)
def test_gpus_that_cuda_would_list(variable: str | None, expected: list[str]) -> None:
    """Ordinals, UUIDs and their beginnings; the list ends where a name is none, and a device named twice empties it."""
    assert visible(variable, [A, B, C]) == expected
