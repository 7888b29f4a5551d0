"""Autocast: the type in use is told, half precision without a loss scaler is told once, and compiled regions stay whole."""

from __future__ import annotations

import gc
import logging
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.amp import GradScaler, autocast_mode, grad_scaler

import torchobs
from tests.training import Recording, loss_of, mlp
from torchobs.probes.precision import amp

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def autocasts(values: Mapping[tuple[str, ...], Any]) -> set[tuple[str, ...]]:
    """What is shown of autocast."""
    return {name[1:] for name, value in values.items() if name[0] == "torchobs.amp.autocast" and value == 1.0}


def test_bfloat16_without_a_scaler_says_so(run: Recording) -> None:
    """The data type is there, a scale is not, and nobody is warned."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(amp.UNSCALED_STEPS + 1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    values = run.look()
    assert autocasts(values) == {("cpu", "bfloat16")}
    assert not [name for name in values if name[0] == "torchobs.amp.scale"]
    assert run.frames("torchobs.amp.unscaled") == []


def test_float16_training_without_a_scaler_is_told_once(run: Recording, caplog: pytest.LogCaptureFixture) -> None:
    """Its small gradients become zero, which no metric would show."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(amp.UNSCALED_STEPS + 1):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with caplog.at_level(logging.WARNING, "torchobs"):
        for _ in range(3):
            run.look()
    assert len(run.frames("torchobs.amp.unscaled")) == 1
    assert [line.getMessage() for line in caplog.records if "float16" in line.getMessage()] == [
        "torchobs: float16 autocast is in use without a GradScaler: small gradients become zero"
    ]


def test_a_scaler_that_went_with_its_function_was_there(run: Recording) -> None:
    """The rank's last look comes after ``main()`` has returned: a float16 run with a scaler is not told that it had none."""

    def main() -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for _ in range(amp.UNSCALED_STEPS + 1):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_of(model)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()

    main()
    gc.collect()
    assert autocasts(run.look()) == {("cpu", "float16")}
    assert run.frames("torchobs.amp.unscaled") == []


def test_float16_evaluation_is_no_training_without_a_scaler(run: Recording) -> None:
    """Under no_grad there is nothing to scale."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(amp.UNSCALED_STEPS + 1):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
            loss_of(model)
        optimizer.zero_grad()
        loss_of(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert autocasts(run.look()) == {("cpu", "float16")}
    assert run.frames("torchobs.amp.unscaled") == []


def test_autocast_costs_nothing_but_now_and_then(run: Recording) -> None:
    """The wrapper goes when it has seen one, or 64 that were disabled; a later look sees what is in use by then."""
    plain = vars(autocast_mode.autocast)["__enter__"].__wrapped__
    run.look()
    for index in range(amp.MAX_ENTRIES):
        assert vars(autocast_mode.autocast)["__enter__"] is not plain, index
        with torch.autocast("cpu", enabled=False):
            pass
    assert vars(autocast_mode.autocast)["__enter__"] is plain
    assert autocasts(run.look()) == set()
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            pass
        assert vars(autocast_mode.autocast)["__enter__"] is plain
        assert ("cpu", str(dtype).removeprefix("torch.")) in autocasts(run.look())


def test_autocast_dtypes_are_capped(run: Recording) -> None:
    """A label is never open-ended, whatever a plug-in device calls itself."""
    context = run.session.context
    assert context is not None
    watch = amp.AutocastWatch()
    watch.install(context, context.breaker("amp"))
    try:
        watch._seen = {amp._Seen(f"device{index}", "bfloat16", training=False) for index in range(20)}
        watch.observe(scaled=False)
    finally:
        watch.remove()
    assert len(autocasts(run.look())) == amp.MAX_SHOWN


@pytest.mark.parametrize("where", ["inside", "around", "as a decorator", "an object of its own"])
def test_compiled_regions_stay_whole(run: Recording, where: str) -> None:
    """``fullgraph=True`` with autocast in every place, while it is being looked at and when it is not; compiled once."""
    torch._dynamo.reset()
    layer, inputs = torch.nn.Linear(8, 8), torch.ones(2, 8)
    own = torch.autocast("cpu", dtype=torch.bfloat16)
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Any:
        del example
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    def inside(given: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.as_tensor(layer(given))

    def with_own(given: torch.Tensor) -> torch.Tensor:
        with own:
            return torch.as_tensor(layer(given))

    decorated = torch.autocast("cpu", dtype=torch.bfloat16)(layer.forward)
    functions: dict[str, Any] = {
        "inside": inside, "around": layer.forward, "as a decorator": decorated, "an object of its own": with_own,
    }  # fmt: skip
    compiled: Any = torch.compile(functions[where], backend=backend, fullgraph=True)
    for _ in range(3):
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=where == "around"):
                result = compiled(inputs)
            assert result.dtype == torch.bfloat16
        run.look()
    assert len(graphs) == 1
    assert autocasts(run.look()) == {("cpu", "bfloat16")}
    torch._dynamo.reset()


def test_torchscript_still_knows_autocast(run: Recording) -> None:
    """It compiles the class from its source, while the wrapper is in place."""

    def product(given: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
            return given @ given

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(product)
    assert scripted(torch.ones(4, 4)).dtype == torch.bfloat16
    assert run.errors() == []


def test_an_older_torch_without_these_classes_has_the_probe_off(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing switches the probe off with a reason; steps are counted, and GradScaler is left alone after shutdown."""
    before = dict(vars(grad_scaler.GradScaler))
    monkeypatch.delattr(autocast_mode, "autocast")
    session = torchobs.init(flight_dir=flight_dir)
    try:
        found = Recording(session)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = GradScaler("cpu")
        scaler.scale(loss_of(model)).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        values = found.look()
        assert values["torchobs.probe.disabled", "amp"] == 1.0
        assert [error.split(":")[0] for error in found.errors()] == ["amp"]
        assert len(found.steps()) == 1
    finally:
        torchobs.shutdown()
    assert dict(vars(grad_scaler.GradScaler)) == before
