"""Looking at layers disturbs nothing: no bit of the training, no copy of a model, no other level, no graph of the user's."""

from __future__ import annotations

import copy
import io
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.activations import Extreme, by_hand, hooks, perceptron, trainer
from tests.training import loss_of, recording

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Wild(nn.Module):
    """Draws random numbers, checkpoints, changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        self.drop, self.act = nn.Dropout(0.3), nn.ReLU(inplace=True)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return one number for each row."""
        values = self.act(self.first(values))
        values = checkpoint(lambda one: self.drop(self.act(self.second(one))), values, use_reentrant=False)
        found: torch.Tensor = self.last(values)
        return found


def trained(look: Callable[[], object] = lambda: None) -> list[torch.Tensor]:
    """Weights and random state after some steps of everything that might be disturbed."""
    torch.manual_seed(5)
    model = Wild()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index in range(30):
        optimizer.zero_grad()
        loss_of(model, index).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if index == 4:
            look()
    return [*model.parameters(), torch.get_rng_state()]


def test_training_is_the_same_to_the_last_bit(flight_dir: Path) -> None:
    """Weights and the state of the random numbers, with looks at many steps and without torchobs."""
    expected = trained()
    for run in recording(flight_dir, level="extreme", overhead_budget=0.2):
        extreme = Extreme(run)

        assert all(map(torch.equal, trained(extreme.look_at_every_step), expected))
        run.look()
        assert len(extreme.probe._around._rows) >= 10


def test_ddp_s_modules_are_those_within_it(extreme: Extreme, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the names of their gradients, and nothing is sent to other ranks for it."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch's stubs forget it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = DistributedDataParallel(perceptron())
        inputs = torch.randn(4, 8)
        step = trainer(model, inputs)
        extreme.start(step)
        for name in ("all_reduce", "all_gather", "broadcast", "barrier", "all_gather_object"):
            monkeypatch.delattr(dist, name)
        step(4)
        found = extreme.stats()
        assert found.keys() == {"0", "1", "2"}
        assert found["0"] == pytest.approx(by_hand(model.module[0](inputs)), rel=1e-4)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("level", ["basic", "advanced"])
def test_below_extreme_nothing_has_a_hook(flight_dir: Path, level: str) -> None:
    """Neither a module, nor the list of what is called when a backward begins."""
    for run in recording(flight_dir, level=level):
        model = perceptron()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert run.session.context is not None
        for index in range(8):
            optimizer.zero_grad()
            loss = loss_of(model, index)
            assert hooks(model) == 0
            loss.backward()  # type: ignore[no-untyped-call]
            assert hooks(model) == 0
            optimizer.step()
            if index == 4:
                run.look()
        assert "activations" not in {probe for probe, _ in run.session.context.hooks.takes_loss._by_probe}
        assert not any("activation" in key[0] for key in run.look())


def test_hooks_go_with_the_window_the_level_and_the_session(flight_dir: Path) -> None:
    """They are there in a window, and gone when the level is lowered; shutdown in the midst of one leaves none."""
    model = perceptron()
    step = trainer(model, torch.randn(4, 8))
    for run in recording(flight_dir, level="extreme"):
        extreme = Extreme(run)
        extreme.start(step)
        assert hooks(model) == 3
        assert run.session.context is not None
        run.session.context.hooks.level.value = 2
        run.look()
        step(4)
        assert hooks(model) == 0
        run.session.context.hooks.level.value = 3
        run.look()
        for index in range(3):
            step(index)
            run.look()
        assert hooks(model) == 3
    assert hooks(model) == 0


def test_a_copy_of_a_model_with_hooks_can_be_loaded_without_torchobs(extreme: Extreme) -> None:
    """Saved as a whole in the midst of a window, and copied: both have no part in it."""
    model = perceptron()
    inputs = torch.randn(4, 8)
    step = trainer(model, inputs)
    extreme.start(step)
    assert hooks(model) == 3
    kept = io.BytesIO()
    torch.save(model, kept)
    names = {str(name) for name in pickle.dumps(model).split(b"\n") if b"torchobs" in name}
    assert not names
    assert b"torchobs" not in kept.getvalue()
    twin = copy.deepcopy(model)
    kept.seek(0)
    loaded = torch.load(kept, weights_only=False)
    for other in (twin, loaded):
        other(inputs * 100).sum()
    step(4)
    assert extreme.stats()["0"] == pytest.approx(by_hand(model[0](inputs)), rel=1e-4)


def test_an_evaluation_of_torch_s_own_transformer_is_as_fast_and_as_exact(extreme: Extreme) -> None:
    """Its layers have no hooks, for with one they would take another way; the encoder as a whole is looked at."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    inputs = torch.randn(2, 5, 8)
    step = trainer(model, inputs)
    extreme.start(step)
    assert hooks(model[1].layers) == 0  # type: ignore[arg-type]  # a module
    step(4)
    assert extreme.stats().keys() == {"0", "1"}


def test_an_operation_of_ours_is_in_no_graph_and_no_cache(extreme: Extreme) -> None:
    """Selective checkpointing caches operators in their order, and ``torch.func`` has tensors that end with their level."""
    model = perceptron()
    inputs = torch.randn(4, 8)
    seen: list[str] = []

    class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def call(values: torch.Tensor) -> Any:
        with Watching():  # type: ignore[no-untyped-call]
            found = model(values)
        torch.func.vmap(model)(values)
        with pytest.warns((DeprecationWarning, FutureWarning), match="trace"):  # the latter since torch 2.14
            torch.jit.trace(model, (values,), check_trace=False)  # type: ignore[no-untyped-call]
        return found

    with Watching():  # type: ignore[no-untyped-call]
        model(inputs)
    expected, seen[:] = list(seen), []
    step = trainer(model, inputs, call)
    extreme.start(step)
    step(4)
    assert seen == expected * 6
    assert extreme.stats() == {}
