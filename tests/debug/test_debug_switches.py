"""``debug.enable``: each switch looks at a real training at its interval, changes nothing of it, and leaves nothing behind."""

# mypy: disable-error-code="attr-defined, no-untyped-call, operator, union-attr"

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

import torchobs
from tests.debug.models import hooks
from tests.support import wait_until
from tests.training import Recording
from torchobs import debug
from torchobs.debug.switches import PRESETS, SWITCHES, SwitchProbe
from torchobs.runtime.session import current

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(autouse=True)
def _session_by_the_environment(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where ``enable()`` records, since it begins the session."""
    monkeypatch.setenv("TORCHOBS_DIR", str(flight_dir))
    monkeypatch.setenv("TORCHOBS_EXPORTER", "false")
    yield
    debug.disable()
    torchobs.shutdown()


def state() -> list[Any]:
    """What switches could leave behind."""
    return [
        torch.autograd.backward, _BaseDataLoaderIter.__next__, torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled(),
        len(torch_optimizer._global_optimizer_pre_hooks), len(torch_optimizer._global_optimizer_post_hooks),
        torch.autograd._profiler_enabled(),
    ]  # fmt: skip


class Training:
    """A small training with a loader."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.loader = DataLoader(TensorDataset(torch.randn(64, 4), torch.randint(2, (64,))), batch_size=4, shuffle=True)

    def run(self, steps: int, *, scale: float = 1.0) -> None:
        for _, (x, y) in zip(range(steps), self.loader, strict=False):
            self.optimizer.zero_grad()
            (nn.functional.cross_entropy(self.model(x), y) * scale).backward()
            self.optimizer.step()

    def stepped(self) -> bool:
        """Do one more step."""
        self.run(1)
        return True


def looks() -> dict[str, int]:
    """How often each switch that is on has looked."""
    return {row.name: row.looks for row in debug.status().switches if row.on}


def last(name: str) -> str:
    """What a switch saw last."""
    return next(row.last for row in debug.status().switches if row.name == name)


def test_all_switches_look_and_change_nothing(run: Recording, tmp_path: Path) -> None:
    """Weights to the bit those of a plain training; each saw something at its frequency; all is put back."""
    before, plain = state(), Training()
    plain.run(12)
    watched = Training()
    debug.enable("full", gradients_every=4, memory_every=3, performance_every=5, profile_every=2, trace_dir=tmp_path)
    watched.run(12)
    status = debug.status()
    assert all(map(torch.equal, plain.model.state_dict().values(), watched.model.state_dict().values()))
    assert (status.enabled, status.steps, status.model) == (tuple(SWITCHES), 12, "Sequential")
    assert looks() | {"forward_pass": 0} == {
        "autograd_anomaly": 0, "autograd_profiler": 3, "tensorboard_traces": 3, "memory_usage": 4, "gradient_norms": 3,
        "forward_pass": 0, "backward_pass": 3, "device_placement": 3, "mixed_precision": 3, "data_loading": 3,
        "validation": 3, "early_stopping": 3, "lr_scheduling": 3,
    }  # fmt: skip
    assert [row.name for row in status.switches if row.error or not row.last] == []
    assert re.match("no look so far|3 layers", last("forward_pass"))  # its probe begins after some steps
    assert {last("mixed_precision"), last("lr_scheduling")} == {"autocast off", "lr 0.01"}
    assert "top operator" in last("autograd_profiler")
    assert len(list(tmp_path.glob("*.pt.trace.json"))) == 3
    assert len(run.frames("torchobs.debug.early_stopping")) == 3
    assert run.errors() == []
    debug.disable()
    assert state() == before
    assert hooks(watched.model) == 0


def test_each_alone_is_undone(tmp_path: Path) -> None:
    """Also a switch that is removed before its first step, and while others stay."""
    before, training = state(), Training()
    for name in SWITCHES:
        assert debug.enable([name], model=training.model, trace_dir=tmp_path).enabled == (name,)
        training.run(2)
        debug.enable("lr_scheduling")
        debug.disable([name])
        assert debug.status().enabled == (() if name == "lr_scheduling" else ("lr_scheduling",))
        debug.disable()
        debug.enable(name, model=training.model)
        debug.disable()
        assert hooks(training.model) == 0
    torchobs.shutdown()
    assert state() == before


def test_what_is_wrong_is_found(caplog: pytest.LogCaptureFixture) -> None:
    """Explosion, NaN in a weight, a loss that is not finite: by the switches named for them."""
    training = Training()
    debug.enable(["gradient_norms", "backward_pass"], gradients_every=1)
    training.run(2, scale=1e5)
    with torch.no_grad():
        training.model[0].weight[0, 0] = float("nan")
    training.run(1)
    kinds = {record.torchobs_kind for record in caplog.records if hasattr(record, "torchobs_kind")}
    assert {"gradient_explosion", "nonfinite_gradient", "nonfinite_loss"} <= kinds


def test_what_the_layers_put_out_is_seen_by_the_activation_probe(caplog: pytest.LogCaptureFixture) -> None:
    """Promise: each layer at its interval, with a finding for one that is not finite; no hook stays after the end."""
    training = Training()
    with caplog.at_level("DEBUG", "torchobs.debug"), debug.enable(["forward_pass"], gradients_every=2) as run:
        training.run(5)
        wait_until(lambda: training.stepped() and last("forward_pass") == "3 layers, 0 not finite")
        with torch.no_grad():
            training.model[0].weight[0, 0] = float("nan")
        wait_until(lambda: training.stepped() and not run.ok)
    assert (hooks(training.model), run.problems[0].where) == (0, "0")
    assert run.problems[0].text.endswith("% of its output is not finite")
    said = next(record.getMessage() for record in caplog.records if "forward pass of step" in record.getMessage())
    assert re.search(r"\b0 \[\d+, \d+\] [\d.e-]+ ± ", said), "a layer's name, its output's shape, mean and spread"
    assert current().context.hooks.layers.every == 0
    training.run(1)
    assert hooks(training.model) == 0, "the last step, before the sampler has noticed"


def test_a_switch_whose_probe_is_disabled_says_so(flight_dir: Path) -> None:
    """The user has forbidden the look; without a word the switch would seem to find nothing."""
    torchobs.init(flight_dir=flight_dir, disable_probes=["activations"])
    debug.enable(["forward_pass"])
    assert last("forward_pass").startswith("nothing: the setting disable_probes")


def test_an_error_in_a_switch_is_its_own(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Training goes on, the switch is off and says so."""
    (tmp_path / "file").write_text("")
    training = Training()
    debug.enable("tensorboard_traces", trace_dir=tmp_path / "file", profile_every=1)
    training.run(3)
    row = next(row for row in debug.status().switches if row.name == "tensorboard_traces")
    assert (row.on, row.error is not None, debug.status().enabled) == (False, True, ())
    wait_until(lambda: "probe 'debug.tensorboard_traces' failed" in caplog.text)
    assert not torch.autograd._profiler_enabled()
    assert debug.enable("tensorboard_traces", trace_dir=tmp_path / "traces").enabled == ("tensorboard_traces",)


def test_steps_that_are_looked_at_are_steps_that_were_checked() -> None:
    """Promise: ``training_summary()`` counts them, with their anomalies; two switches that look at one step count it once."""
    for switches in ("basic", "gradient_checking"):
        debug.clear()
        training = Training()
        debug.enable(switches, gradients_every=1)
        training.run(2)
        training.run(1, scale=float("nan"))
        summary = debug.training_summary()
        assert (summary.total_steps, summary.anomaly_steps, summary.loss_anomalies, summary.source) == (3, 1, 1, "monitored")
        debug.disable()


def test_a_run_keeps_what_it_has_seen(caplog: pytest.LogCaptureFixture) -> None:
    """Promise: a block's problems and summary stay when its switches go; findings of later are not among them."""
    before, training = state(), Training()
    with caplog.at_level("DEBUG", "torchobs.debug"), debug.enable("full", anomaly="warn", gradients_every=1) as run:
        training.run(3)
        torch.tensor([-1.0]).sqrt()
        assert (run.ok, [problem.kind for problem in run.problems]) == (False, ["nonfinite_result"])
    summary = run.summary()
    assert (run.enabled, debug.status().enabled, hooks(training.model)) == ((), (), 0)
    torchobs.shutdown()
    assert state() == before
    debug.inspect_tensor(torch.tensor([float("nan")]))
    assert (run.summary(), summary.ok, summary.steps, summary.model) == (summary, False, 3, "Sequential")
    assert (summary["gradient_norms"].looks, summary.training.total_steps, len(summary.switches)) == (3, 3, 13)
    assert "1 NaN from sqrt at" in last("autograd_anomaly")  # also after the end
    said = [record.getMessage() for record in caplog.records if "pass of step" in record.getMessage()]
    assert any("loss" in text for text in said)


def test_two_optimizers_in_one_step() -> None:
    """Promise: that of another model, as in a GAN, turns no switch off."""
    training, other = Training(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with debug.enable("advanced", model=training.model, gradients_every=1) as run:
        for _ in range(2):
            other(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            training.run(1)
    assert [row.error for row in run.summary().switches if row.error] == []


def refuse() -> None:
    """Raise."""
    raise RuntimeError("not while it loads")


class Unlisted(nn.Module):
    """A module that refuses to list its parameters."""

    def parameters(self, *_: Any) -> Iterator[nn.Parameter]:
        """Raise."""
        refuse()
        return iter(())


def test_an_error_of_another_model_is_not_the_training_s() -> None:
    """A living module that refuses to list its parameters neither ends the step nor hides the model that trains."""
    other, training = Unlisted(), Training()
    debug.enable(["gradient_norms"], gradients_every=1)
    training.run(2)
    assert (debug.status().model, looks()) == ("Sequential", {"gradient_norms": 2})
    assert last("gradient_norms").startswith("norm")
    del other


def test_an_error_at_a_switch_s_end_is_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All the others are put back all the same, and a warning names the one."""
    before, training = state(), Training()
    debug.enable("full", model=training.model, trace_dir=tmp_path)
    monkeypatch.setattr(SwitchProbe, "remove", lambda _: refuse(), raising=False)
    assert debug.disable("gradient_norms").enabled == tuple(name for name in SWITCHES if name != "gradient_norms")
    debug.disable()
    torchobs.shutdown()
    assert state() == before
    assert hooks(training.model) == 0
    assert "probe 'debug.gradient_norms' failed" in caplog.text


def test_presets_and_arguments() -> None:
    """Modes and levels are sets of the thirteen; `off` switches off; a wrong name is an error that lists them."""
    assert len(SWITCHES) == 13
    assert set(PRESETS["basic"]) < set(PRESETS["advanced"]) < set(PRESETS["extreme"])
    assert PRESETS["extreme"] == PRESETS["full"] == debug.enable().enabled == tuple(SWITCHES)
    debug.disable()
    debug.enable(["memory_profiling", "lr_scheduling"])
    assert debug.status().enabled == ("memory_usage", "lr_scheduling")
    assert debug.enable("off").enabled == ()
    debug.enable("memory_usage")
    assert debug.enable({"off", "lr_scheduling"}).enabled == ("lr_scheduling",)
    debug.disable()
    with pytest.raises(ValueError, match="gradient_norms"):
        debug.enable(["gradients"])
    with pytest.raises(ValueError, match="1 or more"):
        debug.enable("basic", gradients_every=0)
    with pytest.raises(ValueError, match="'raise' or 'warn'"):
        debug.enable("basic", anomaly="off")
    with pytest.raises(TypeError, match="enable"):
        debug.enable("basic", model=3)
    with pytest.raises(TypeError, match="names"):
        debug.enable(3)
    assert debug.status().enabled == ()


def test_a_session_begins_where_none_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By ``init()``; switches end with it; where nothing is recorded, a warning says that nothing is switched on."""
    before, training = state(), Training()
    assert debug.enable("basic").enabled == PRESETS["basic"]
    training.run(1)
    debug.disable("basic")
    assert current() is not None
    debug.enable("full", gradients_every=1, trace_dir=tmp_path)
    training.run(2)
    torchobs.shutdown()
    assert debug.status().enabled == ()
    assert (state(), hooks(training.model)) == (before, 0)
    monkeypatch.setenv("TORCHOBS_ENABLED", "false")
    assert debug.enable("basic").enabled == ()
    assert "nothing is switched on" in caplog.text


@pytest.mark.parametrize("when", ["pre", "post"])
def test_what_is_removed_in_a_step_s_hook(when: str) -> None:
    """Promise: switches, a context and a guard may end in a hook of the user's: none raises there, and no hook is left."""
    model, block, guards = nn.Linear(2, 1), debug.context("step"), list[Any]()
    removed: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
        "switches": (lambda _: debug.enable(["gradient_norms"], gradients_every=1), debug.disable),
        "context": (lambda _: block.__enter__(), lambda: block.__exit__(None, None, None)),
        "nan_guard": (lambda optimizer: guards.append(debug.nan_guard(optimizer)), lambda: guards.pop().remove()),
    }
    for start, stop in removed.values():
        calls, before = list[int](), state()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def hook(*_: Any, calls: list[int] = calls, stop: Callable[[], Any] = stop) -> None:
            if not calls:
                stop()
            calls.append(1)

        register = getattr(torch_optimizer, f"register_optimizer_step_{when}_hook")
        handle = register(hook)  # before ours: it is called first, and torch goes on to ours
        try:
            start(optimizer)
            for number in (1, 2):
                before_step = model.weight.detach().clone()
                model(torch.ones(4, 2)).sum().backward()
                optimizer.step()
                assert (len(calls), torch.equal(before_step, model.weight)) == (number, False)
            torchobs.shutdown()  # the session that enable() began
        finally:
            handle.remove()
        assert state() == before
