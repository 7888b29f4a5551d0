"""What is arithmetic about layers: their names, which of them are shown, and when a norm has vanished."""

from __future__ import annotations

from math import log

import pytest

from torchobs.detect.spikes import LASTING, judge_low
from torchobs.probes.gradients.layers import TrackedLayer, choose
from torchobs.probes.gradients.parameter_names import LONGEST, clean, layer_of

NAMES = {
    "module.0.weight": "0.weight",
    "module.module.0.weight": "0.weight",
    "_orig_mod.module.blocks.3._checkpoint_wrapped_module.mlp.weight": "blocks.3.mlp.weight",
    "module._fsdp_wrapped_module.head.weight": "head.weight",
    "encoder.module.weight": "encoder.module.weight",
    "module": "module",
    "linear.parametrizations.weight.original0": "linear.weight",
}


@pytest.mark.parametrize(("name", "expected"), NAMES.items())
def test_wrappers_leave_no_trace_in_a_name(name: str, expected: str) -> None:
    """Only what wraps from outside is taken off: a module that the author called `module` keeps its name."""
    assert clean(name) == expected


def test_a_layer_is_the_module_of_a_parameter() -> None:
    """A parameter of the outermost module is its own layer; of an endless name the end stays, for it tells most."""
    assert [layer_of("a.b.weight"), layer_of("scale")] == ["a.b", "scale"]
    assert layer_of("x" * 500 + ".end.weight").endswith("x.end")
    assert len(layer_of("x" * 500 + ".end.weight")) == LONGEST


def made(sizes: list[int], **anomalous: int) -> list[TrackedLayer]:
    """Layers a, b, c … of these sizes."""
    layers = [TrackedLayer(name) for name, _ in zip("abcdefghij", sizes, strict=False)]
    for layer, size in zip(layers, sizes, strict=True):
        layer.size, layer.anomalous = size, anomalous.get(layer.name, 0)
    return layers


def test_the_largest_layers_are_shown_and_the_last_anomalous() -> None:
    """A quarter of the room is for anomalies, the latest first; without any it is for size, too."""
    sizes = [9, 8, 7, 6, 5, 4, 3, 2]
    assert {layer.name for layer in choose(made(sizes), 4)} == set("abcd")
    assert {layer.name for layer in choose(made(sizes, g=5, h=9), 4)} == set("abch")
    assert choose(made(sizes), 0) == []
    assert len(choose(made(sizes), 8)) == 8


def test_only_a_lasting_decline_is_a_verdict() -> None:
    """Four small norms are none, the fifth in a row is; an ordinary one in between begins anew."""
    low = 0
    for number in range(1, LASTING + 3):
        vanished, low = judge_low(1e-4, log(1.0), 0.01, 100, low)
        assert vanished == (number >= LASTING)
    assert judge_low(1.0, log(1.0), 0.01, 100, low) == (False, 0)
    assert judge_low(1e-4, log(1.0), 0.01, 5, LASTING) == (False, 0)  # too little past


def test_a_norm_that_varies_a_lot_may_be_small() -> None:
    """Six standard deviations below the usual is the least, however far that is."""
    assert judge_low(1e-4, log(1.0), 4.0, 100, 0) == (False, 0)


def test_a_norm_of_zero_needs_no_past() -> None:
    """Nothing trains where every gradient is exactly zero, from the first step on."""
    assert judge_low(0.0, 0.0, 0.0, 0, LASTING - 1) == (True, LASTING)
