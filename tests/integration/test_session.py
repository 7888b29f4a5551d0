"""``init()`` and ``shutdown()``: what they leave behind, and where they do nothing."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchobs
from tests import support
from tests.support import finish
from tests.surface import surface
from tests.training import Recording, loss_of, mlp, recording, train
from torchobs import catalog
from torchobs.flight.format.layout import Exit
from torchobs.flight.reader import reader

if TYPE_CHECKING:
    from pathlib import Path


def test_shutdown_leaves_everything_as_it_was(flight_dir: Path) -> None:
    """Every patched attribute and every hook is identical to before, twice over."""
    before = surface()
    for _ in range(2):
        for run in recording(flight_dir):
            assert surface() != before
            train(2)
            assert len(run.steps()) == 2
        assert surface() | {"threads": before["threads"]} == before
        support.wait_until(lambda: surface() == before)  # its thread is waited for, but not for ever


def test_foreign_patches_made_later_stay(flight_dir: Path) -> None:
    """Somebody wrapped what we had wrapped: theirs stays in place and works; what is ours beneath it does nothing."""
    original = torch.autograd.backward
    calls = []
    torchobs.init(flight_dir=flight_dir)
    ours = torch.autograd.backward

    def foreign(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        ours(*args, **kwargs)

    torch.autograd.backward = foreign
    torchobs.shutdown()
    try:
        assert torch.autograd.backward is foreign
        train(2)
        assert len(calls) == 2
    finally:
        torch.autograd.backward = original


def test_init_is_idempotent_and_thread_safe(flight_dir: Path) -> None:
    """Sixteen threads at once get one session and one file."""
    found: list[torchobs.Session] = []
    finish([threading.Thread(target=lambda: found.append(torchobs.init(flight_dir=flight_dir))) for _ in range(16)])
    try:
        assert len({id(session) for session in found}) == 1
        assert torchobs.init() is found[0]
        assert len(list(flight_dir.glob("*.flight"))) == 1
    finally:
        torchobs.shutdown()


def test_a_second_init_says_what_it_ignores(flight_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Settings that differ from those in force are named once; the same ones are no matter; a typo is an error as at first."""
    session = torchobs.init(flight_dir=flight_dir, level="basic")
    try:
        with caplog.at_level(logging.WARNING, "torchobs"):
            assert torchobs.init(flight_dir=str(flight_dir), level="basic", rank=None) is session
            assert caplog.messages == []
            assert torchobs.init(level="extreme", total_steps=7) is session
            assert torchobs.init(grad_interval="never") is session
        ignored, wrong = caplog.messages
        assert "level=extreme, total_steps=7 are ignored" in ignored
        assert "grad_interval='never': expected auto" in wrong
        with pytest.raises(TypeError, match="'levle' is an unknown setting, did you mean level"):
            torchobs.init(levle="extreme")
    finally:
        torchobs.shutdown()


def test_a_session_says_what_it_records(flight_dir: Path) -> None:
    """Run and step, and after its end where that lies; an inert one that there is nothing."""
    with torchobs.init(flight_dir=flight_dir, job_name="translation", run_id="r7", rank=3) as session:
        train(2)
        assert repr(session) == "<torchobs.Session: job translation, run r7, rank 3, step 2>"
    assert repr(session) == f"<torchobs.Session: job translation, run r7, rank 3, ended, recorded in {session.recorded_in}>"
    with torchobs.init(enabled=False) as session:
        assert repr(session) == "<torchobs.Session: nothing is recorded>"


def test_a_session_is_a_context_manager(flight_dir: Path) -> None:
    """Leaving it shuts down; an exception on its way out is the rank's end."""
    session = torchobs.init(flight_dir=flight_dir)
    assert session.writer is not None
    path = session.writer.path
    with pytest.raises(ZeroDivisionError), session:
        raise ZeroDivisionError
    file = reader.open_path(path)
    view = file.read(final=True)
    events = {fields["name"]: fields for _, fields in file.events()}
    file.close()
    assert view.live.exit_reason == Exit.EXCEPTION
    assert events["torchobs.exception"]["attrs"]["exception.type"] == "builtins.ZeroDivisionError"
    assert "test_session.py" in events["torchobs.exception"]["attrs"]["location"]


def test_twice_in_one_process_makes_two_files(flight_dir: Path) -> None:
    """A notebook: init, shutdown, init again. The first file stays, finished."""
    for expected in (1, 2):
        for run in recording(flight_dir):
            train(expected)
            assert len(run.steps()) == expected
        assert len(list(flight_dir.glob("*.flight"))) == expected


@pytest.mark.parametrize(
    "overrides",
    [{"enabled": False}, {"flight_dir": "/proc/nowhere"}, {"flight_dir": "/dev/null"}],
    ids=str,
)
def test_where_it_cannot_or_shall_not_record_it_is_inert(
    overrides: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    """Training goes on without us; what is off leaves no hook; at most one warning."""
    before = surface()
    with caplog.at_level(logging.WARNING, "torchobs"), torchobs.init(**overrides) as session:
        assert not session.active
        assert surface() == before
        torchobs.log(loss=1.0, tokens=3)
        torchobs.step()
        with torchobs.phase("data"):
            train(1)
    assert len(caplog.records) == ("flight_dir" in overrides)


def test_a_bad_value_is_logged_once_and_the_default_used(
    flight_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line names the variable, the value and what is allowed."""
    monkeypatch.setenv("TORCHOBS_GRAD_INTERVAL", "often")
    with caplog.at_level(logging.WARNING, "torchobs"), torchobs.init(flight_dir=flight_dir) as session:
        assert session.settings.grad_interval == "auto"
    (line,) = [record.getMessage() for record in caplog.records]
    assert "TORCHOBS_GRAD_INTERVAL" in line
    assert "often" in line
    assert "auto" in line


def test_an_argument_that_names_no_setting_is_a_type_error() -> None:
    """With the setting that was probably meant."""
    with pytest.raises(TypeError, match="grad_interval"):
        torchobs.init(grad_intervall=3)


def test_a_probe_that_raises_is_off_and_said_once(flight_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is counted, shown, logged once; the other probes go on."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with caplog.at_level(logging.WARNING, "torchobs"), torchobs.init(flight_dir=flight_dir) as session:
        assert session.context is not None
        session.context.hooks.takes_loss.register(session.context.breaker("loss"), fail)
        train(3)
        run = Recording(session)
        support.wait_until(lambda: run.values().get(("torchobs.probe.errors", "loss")) == 1)
        assert run.values()[("torchobs.probe.disabled", "loss")] == 1.0
        assert len(run.steps()) == 3
    assert [record.getMessage().count("ZeroDivisionError") for record in caplog.records] == [1]


def test_public_calls_do_not_break_a_full_graph(run: Recording) -> None:
    """Inside torch.compile(fullgraph=True) they compile to nothing."""
    model = mlp()

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        torchobs.log(tokens=3, loss=1.0)
        torchobs.event("inside", value=1)
        torchobs.step()
        torchobs.watch(model)
        with torchobs.phase("forward"):
            total: torch.Tensor = model(inputs).sum()
            return total

    compiled = torch.compile(forward, backend="eager", fullgraph=True)
    expected = forward(torch.ones(2, 8))
    assert torch.equal(compiled(torch.ones(2, 8)), expected)
    assert run.errors() == []


def test_watching_again_and_again_takes_no_more(run: Recording) -> None:
    """One event for a model however often it is given; of very many models the last ones are kept."""
    context, models = run.session.context, [torch.nn.Linear(1, 1) for _ in range(70)]
    assert context is not None
    for _ in range(100):
        torchobs.watch(models[0])
    assert len(run.frames(catalog.EVENT_MODEL.name)) == 1
    for model in models:
        torchobs.watch(model)
    assert [known() for known in context.watched] == models[-64:]


def test_extra_numbers_are_gauges_up_to_sixty_four(run: Recording) -> None:
    """The 65th name is dropped and counted; a tensor is as good as a number; a name may be given again and again."""
    for number in range(66):
        extra: dict[str, Any] = {f"value_{number}": torch.tensor(float(number)) if number % 2 else number}
        torchobs.log(**extra)
    torchobs.log(value_0=7)
    values = support.wait_until(lambda: run.values() if run.values().get(("torchobs.scalar", "value_0")) == 7.0 else None)
    assert values is not None
    assert values[("torchobs.scalar", "value_63")] == 63.0
    assert ("torchobs.scalar", "value_64") not in values
    support.wait_until(lambda: run.values()[("torchobs.flight.dropped", "series")] == 2)


def test_a_compiled_training_step_does_not_recompile_for_us(run: Recording) -> None:
    """Our wrappers are not traced: the compiled model has one graph, with and without us."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    model = mlp()
    compiled = torch.compile(model, backend=counter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        compiled(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    assert counter.frame_count == 1
    assert len(run.steps()) == 5


def test_init_before_torch_installs_the_probes_when_torch_comes(flight_dir: Path) -> None:
    """``torchobs run`` calls init() before the script imports torch."""
    script = f"""
import sys
sys.path[:0] = [{str(support.ROOT)!r}]
import torchobs
session = torchobs.init(flight_dir={str(flight_dir)!r})
assert "torch" not in sys.modules
import torch
from tests.training import loss_of, mlp
model = mlp(); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for index in range(3):
    loss_of(model, index).backward(); optimizer.step()
assert torch.__spec__.loader is torch.__loader__ and "torchobs" not in repr(torch.__loader__)
print(session.context.recorder.step)
"""
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert (child.returncode, child.stdout.strip(), child.stderr) == (0, "3", "")


def test_import_and_a_run_load_nothing_heavy(flight_dir: Path) -> None:
    """No SDK, protobuf, HTTP, YAML or click, from import to shutdown."""
    heavy = ("opentelemetry.sdk", "google.protobuf", "http", "requests", "urllib3", "yaml", "click", "prometheus_client")
    script = f"""
import sys, torch
sys.path[:0] = [{str(support.ROOT)!r}]
from tests.training import loss_of, mlp
before = set(sys.modules)
import torchobs
torchobs.init(flight_dir={str(flight_dir)!r})
model = mlp(); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for index in range(3):
    loss_of(model, index).backward(); optimizer.step()
torchobs.shutdown()
print([name for name in sorted(set(sys.modules) - before) if name.startswith({heavy!r})])
"""
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert child.stdout == "[]\n", child.stderr


def test_the_applications_own_instruments_and_spans_are_in_the_file(flight_dir: Path) -> None:
    """Imported after init(), OpenTelemetry's API writes into the flight file, below the launcher's TRACEPARENT."""
    script = f"""
import sys, torch
sys.path[:0] = [{str(support.ROOT)!r}]
import torchobs
torchobs.init(flight_dir={str(flight_dir)!r})
assert "opentelemetry" not in sys.modules
from opentelemetry import metrics, trace
metrics.get_meter("mine").create_counter("my.batches").add(3, {{"split": "a"}})
with trace.get_tracer("mine").start_as_current_span("work"):
    pass
import os, signal; os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "TRACEPARENT": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    child = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60, env=environment
    )
    assert child.returncode == -9, child.stderr
    (path,) = flight_dir.glob("*.flight")
    file = reader.open_path(str(path))
    points = {point.series.name: point.value for point in file.read(final=True).points}
    frames = {fields["name"]: fields for _, fields in file.events() if fields["k"] != "event"}
    file.close()
    assert points["my.batches"] == 3
    assert {fields["trace_id"] for fields in frames.values()} == {"0af7651916cd43dd8448eb211c80319c"}
    assert frames["torchobs.run"]["parent"] == "b7ad6b7169203331"
    assert frames["work"]["parent"] == frames["torchobs.run"]["span_id"]


def test_plain_loader_batches(run: Recording) -> None:
    """A TensorDataset through a loader is counted as data, batch by batch."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for (inputs,) in DataLoader(TensorDataset(torch.randn(12, 8)), batch_size=4):
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
    assert [record.phase_s[0] > 0 for record in run.steps()] == [True] * 3


def test_the_other_groups_learning_rates_are_shown(run: Recording) -> None:
    """Groups count on over several optimizers, in the order of their first step; each is a gauge."""
    model = mlp()
    groups: list[dict[str, Any]] = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters()}]
    first = torch.optim.SGD(groups, lr=0.25)
    second = torch.optim.SGD(mlp().parameters(), lr=0.125)
    for index in range(3):
        for optimizer in (first, second):
            loss_of(model, index).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    expected = {("torchobs.learning_rate", str(group)): rate for group, rate in enumerate((0.5, 0.25, 0.125))}
    support.wait_until(lambda: expected.items() <= run.values().items())
