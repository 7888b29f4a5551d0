"""``torch.compile`` is seen: how often and why, what it took; and what people compile has the graphs that it has without us."""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import nn
from torch._dynamo import config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed, Unsupported
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.data import DataLoader, TensorDataset

import torchobs
from tests import support
from tests.training import Recording, batch, loss_of, mlp, recording
from torchobs import catalog, debug
from torchobs.catalog.findings import RECOMPILE_REMEDIES
from torchobs.flight.layout import PHASE_NAMES
from torchobs.probes.compile import read_break, read_failure, read_guard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Function = Callable[[torch.Tensor], Any]


@pytest.fixture(autouse=True)
def _compiler_as_new() -> Iterator[None]:
    """Nothing is compiled yet, and nothing stays compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def series(run: Recording) -> dict[tuple[str, ...], float]:
    """The compiler's series, after the sampler has seen all there is."""
    run.whole_round()
    return {key: value for key, value in run.values().items() if key[0].startswith("torchobs.compile.")}


def counted(values: dict[tuple[str, ...], float], metric: catalog.Metric) -> dict[str, float]:
    """What is not zero of a counter with one attribute."""
    return {key[1]: value for key, value in values.items() if key[0] == metric.name and value}


def scaled(inputs: torch.Tensor, factor: Any = 1, more: Any = None) -> torch.Tensor:
    """Something to compile, with arguments that become guards."""
    outputs: torch.Tensor = inputs * factor
    return outputs if more is None else outputs + more


def test_recompilations_are_counted_by_the_guard_that_failed(run: Recording) -> None:
    """Five forced ones of known cause: as many as torch compiled graphs, each with an event without values.

    All series come with the first compilation: who does not compile has none.
    """
    assert series(run) == {}
    counter = CompileCounter()
    compiled = torch.compile(scaled, backend=counter, dynamic=False)
    compiled(torch.ones(3), 2)
    compiled(torch.ones(4), 2)
    compiled(torch.ones(4, dtype=torch.float64), 2)
    with torch.no_grad():
        for arguments in ((2,), (3,), (3, 2.5)):
            compiled(torch.ones(4, dtype=torch.float64), *arguments)
    values = series(run)
    assert values["torchobs.compile.in_progress",] == 0.0
    assert counted(values, catalog.COMPILE_COMPILATIONS) == {"first": 1, "recompile": 5}
    assert counter.frame_count == 6
    assert counted(values, catalog.COMPILE_RECOMPILES) == {"shape": 1, "tensor": 1, "global_state": 1, "value": 2}
    events = run.attributes(catalog.EVENT_RECOMPILE.name)
    expressions = [attributes["expression"] for attributes in events]
    assert expressions == ["inputs: size at index 0", "inputs: dtype", "grad_mode", "factor == …", "more is None"]
    assert {frame["step"] for frame in run.frames(catalog.EVENT_RECOMPILE.name)} == {1}, "the step in progress"
    line = scaled.__code__.co_firstlineno
    assert {attributes["location"] for attributes in events} == {f"{__file__}:{line}"}
    spans = run.attributes(catalog.SPAN_COMPILE.name)
    assert [span["cause"] for span in spans] == ["first"] + ["recompile"] * 5
    assert {span["function"] for span in spans} == {"scaled"}


def broken(inputs: torch.Tensor) -> torch.Tensor:
    """Two graph breaks: a call that cannot be traced, and a branch on a value."""
    outputs = inputs + 1
    print("a secret")  # noqa: T201  # it breaks the graph
    outputs *= 2
    return outputs + 1 if outputs.sum() > 0 else outputs


def test_graph_breaks_are_those_that_torch_explains(run: Recording) -> None:
    """As many as ``torch._dynamo.explain`` finds, by class; each place once as an event, with no source and no value."""
    inputs = torch.ones(3)
    explained = len(torch._dynamo.explain(broken)(inputs).break_reasons)
    before = series(run)
    torch._dynamo.reset()
    torch.compile(broken, backend="eager")(inputs)
    values = series(run)
    assert explained == 2
    for kind in ("call", "data_dependent"):
        key = catalog.COMPILE_GRAPH_BREAKS.name, kind
        assert values[key] - before[key] == 1
    events = run.attributes(catalog.EVENT_GRAPH_BREAK.name)
    assert [attributes["reason"] for attributes in events] == ["call", "data_dependent"]
    line = broken.__code__.co_firstlineno
    assert [attributes["location"] for attributes in events] == [f"{__file__}:{line + 3}", f"{__file__}:{line + 5}"]
    assert "secret" not in str(events)


def test_what_is_compiled_on_trial_is_no_finding_of_the_training(run: Recording) -> None:
    """`debug.explain_compile` shows graph breaks and recompilations, and the run neither counts nor reports them."""

    class Branching(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + 1 if x.sum() > 0 else x)

    torch.compile(scaled, backend="eager")(torch.ones(2))
    torch.compile(Branching(4, 2), backend="eager")(torch.ones(4, 4))  # the training's own break, which counts once
    before, breaks = series(run), run.frames(catalog.EVENT_GRAPH_BREAK.name)
    assert len(breaks) == 1
    assert run.session.context is not None
    recorded = len(run.session.context.recorder.trace)
    for model in (Branching(4, 2), torch.nn.Linear(4, 2)):
        explanation = debug.explain_compile(model, torch.ones(4, 4))
        assert (len(explanation.breaks), len(explanation.recompiles) > 0) == (isinstance(model, Branching), True)
    assert len(run.session.context.recorder.trace) == recorded  # nor is its time the training's
    assert series(run) == before
    assert counted(before, catalog.COMPILE_COMPILATIONS)
    for event in (catalog.EVENT_RECOMPILE, catalog.EVENT_RECOMPILE_STORM):
        assert run.frames(event.name) == []
    assert run.frames(catalog.EVENT_GRAPH_BREAK.name) == breaks
    torch.compile(scaled, backend="eager")(torch.ones(2, dtype=torch.float64))
    assert counted(series(run), catalog.COMPILE_COMPILATIONS) != counted(before, catalog.COMPILE_COMPILATIONS)


def test_a_function_that_is_given_up_is_told(run: Recording, caplog: pytest.LogCaptureFixture) -> None:
    """Torch's limit of recompilations: counted, an event, and one line that says what failed and what to do."""
    compiled = torch.compile(scaled, backend="eager", dynamic=False)
    with caplog.at_level(logging.WARNING, "torchobs"):
        for factor in range(2, 14):
            compiled(torch.ones(3), float(factor))
        values = series(run)
    limit = torch._dynamo.config.recompile_limit
    assert counted(values, catalog.COMPILE_COMPILATIONS) == {"first": 1, "recompile": limit - 1}
    assert counted(values, catalog.COMPILE_FAILURES) == {"recompile_limit": 1}
    (given_up,) = run.attributes(catalog.EVENT_COMPILE_FAILED.name)
    assert given_up["reason"] == "recompile_limit"
    assert given_up["location"].startswith(f"{__file__}:")
    (storm,) = run.attributes(catalog.EVENT_RECOMPILE_STORM.name)
    assert storm["expression"] == "factor == …"
    (line,) = (record.getMessage() for record in caplog.records if record.name == "torchobs")
    assert f"{__file__}:" in line
    assert "pass a tensor" in line


def test_what_cannot_be_compiled_fails_as_without_us(run: Recording) -> None:
    """fullgraph=True over a graph break, and a backend that raises: the same exceptions, counted, and their spans failed."""

    def raises(*_: Any) -> Any:
        msg = "the backend's own"
        raise ZeroDivisionError(msg)

    with pytest.raises(Unsupported, match="Failed to trace builtin"):
        torch.compile(broken, backend="eager", fullgraph=True)(torch.ones(3))
    with pytest.raises(BackendCompilerFailed, match="the backend's own"):
        torch.compile(scaled, backend=raises)(torch.ones(3))
    values = series(run)
    assert counted(values, catalog.COMPILE_FAILURES) == {"unsupported": 1, "error": 1}
    assert counted(values, catalog.COMPILE_COMPILATIONS) == {}
    assert values["torchobs.compile.in_progress",] == 0.0
    assert run.session.context is not None
    assert PHASE_NAMES[run.session.context.recorder.phase()[0]] == "other"


class Gate:
    """A backend that waits until it may go on."""

    def __init__(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        self.held_s = 0.0

    def __call__(self, graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        """Compile."""
        self.reached.set()
        begun = time.perf_counter()
        assert self.go.wait(60)
        self.held_s += time.perf_counter() - begun
        return graph.forward


@contextlib.contextmanager
def watching(run: Recording, gate: Gate) -> Iterator[list[tuple[str | None, float]]]:
    """Look at the file while the gate is closed, from another thread, as an exporter would; then open it."""
    looks: list[tuple[str | None, float]] = []

    def look() -> None:
        try:
            assert gate.reached.wait(60)
            support.wait_until(lambda: run.values().get(("torchobs.compile.in_progress",)) == 1.0)
            time.sleep(0.25)
            run.whole_round()  # the phase is written at a round's beginning, what is in progress at its end
            looks.append((run.view().live.phase, run.values()["torchobs.compile.in_progress",]))
        finally:
            gate.go.set()

    thread = threading.Thread(target=look)
    thread.start()
    yield looks
    thread.join()


@pytest.mark.serial
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_long_compilation_is_shown_as_one_and_not_as_a_hang(run: Recording, part: str) -> None:
    """The exporter is patient in this phase; the step that it fell into is not a slow one."""
    gate = Gate()
    plain = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        bw_compiler=lambda graph, inputs: make_boxed_func(gate(graph, inputs)),
    )
    model = mlp()
    compiled = torch.compile(model, backend=gate if part == "forward" else plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    times: list[float] = []
    for index in range(3):
        if index == 1:
            torch._dynamo.reset()
            gate.reached.clear()
            gate.go.clear()
            gate.held_s = 0.0
        else:
            gate.go.set()
        with contextlib.ExitStack() as watched:
            looks = watched.enter_context(watching(run, gate)) if index == 1 else []
            inputs, targets = batch()
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(compiled(inputs), targets).backward()  # type: ignore[no-untyped-call]
            times += [time.perf_counter()]
            optimizer.step()
            times += [time.perf_counter()]
        assert looks == ([("compile", 1.0)] if index == 1 else [])
    steps = run.steps()
    assert len(steps) == 3
    assert steps[1].phase_s[PHASE_NAMES.index("compile")] > gate.held_s > 0.25
    assert steps[1].duration_s < times[3] - times[0] - gate.held_s
    values = series(run)
    assert values["torchobs.compile.in_progress",] == 0.0
    compiling = run.values()["torchobs.goodput.time", "compile"]
    # shown while it lasts, and never taken back: ahead by the moments in which its end was known to one thread only
    assert compiling == pytest.approx(sum(record.phase_s[7] for record in steps), rel=0.1)
    assert compiling >= sum(record.phase_s[7] for record in steps) * (1 - 1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own looking at it
def test_a_compiled_train_step_is_counted_right(run: Recording) -> None:
    """Forward, backward and optimizer in one compiled function: every step, its loss, and no break or failure of our making."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(seed: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, seed)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    compiled = torch.compile(step, backend="eager")
    losses = [compiled(seed).item() for seed in range(5)]
    steps = run.steps()
    assert [record.loss for record in steps] == pytest.approx(losses)
    values = series(run)
    assert counted(values, catalog.COMPILE_FAILURES) == {}
    assert "torchobs" not in str([event["message"] for event in run.attributes(catalog.EVENT_GRAPH_BREAK.name)])
    assert {event["location"] for event in run.attributes(catalog.EVENT_GRAPH_BREAK.name)}


def test_nothing_imports_dynamo_before_its_time(flight_dir: Path) -> None:
    """It takes seconds and 80 MB, of which ``debug.context()``, which needs it, measures none; then the probe is there, too."""
    script = """
import sys, torch, torchobs
torchobs.init()
assert not any(name.startswith("torch._dynamo") for name in sys.modules)
with torchobs.debug.context("step", anomaly="warn"):
    modules = set(sys.modules)
    torch.ones(10).sum()
    assert len(sys.modules.keys() - modules) < 10
from torch._dynamo.callback import CompilationCallbackHandler
watched = CompilationCallbackHandler.install_callbacks
torchobs.shutdown()
assert CompilationCallbackHandler.install_callbacks is not watched
"""
    environment = support.clean_environment() | {"TORCHOBS_DIR": str(flight_dir)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


def test_inductor_cold_and_warm(flight_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cold start generates code and waits for compilers; a warm one hits the caches. Its workers leave no file of ours."""
    if shutil.which("g++") is None:
        pytest.skip(support.NEEDS_COMPILER)
    with support.quick_inductor(tmp_path, monkeypatch):
        for run in recording(flight_dir):
            before = {path.name for path in flight_dir.iterdir() if ".stuck-" not in path.name}
            torch.compile(scaled)(torch.ones(3))
            cold = series(run)
            torch._dynamo.reset()
            torch.compile(scaled)(torch.ones(3))
            warm = series(run)
            assert {path.name for path in flight_dir.iterdir() if ".stuck-" not in path.name} == before
            assert set(counted(cold, catalog.COMPILE_TIME)) == set(catalog.COMPILE_STAGES)
            lookups = catalog.COMPILE_CACHE_LOOKUPS.name
            for cache in catalog.COMPILE_CACHE.values:
                assert [cold[lookups, cache, result] for result in ("hit", "miss")] == [0, 1]
                assert [warm[lookups, cache, result] for result in ("hit", "miss")] == [1, 1]
            assert [span["cached"] for span in run.attributes(catalog.SPAN_COMPILE.name)] == [False, True]


GUARDS = {
    "0/2: tensor 'self._buffers['seen']' rank mismatch. expected 1, actual 2": ("shape", "self._buffers['seen']: rank"),
    "0/0: Duplicate tensors found: ['x', 'y']": ("tensor", "Duplicate tensors found: […, …]"),
    "0/6: ___check_type_id(n, 139854489), type=<class 'int'>  # y = x*n  # a.py:1 in f\nUser stack trace:\n  File":
        ("type", "type(n) is int"),
    "0/4: expected type of 'm._parameters['bias']' to be a tensor type, ' but found <class 'NoneType'>":
        ("type", "m._parameters['bias'] is a tensor"),
    "0/1: len(d) == 1                          # if d: y = 1": ("value", "len(d) == …"),
    "0/0: G['SCALE'] == 3.5                    # def g(x): return x*SCALE": ("value", "G['SCALE'] == …"),
    '0/0: mode == "it\'s # secret"': ("value", "mode == …"),
    "0/0: d['a b; secret'] == -1e-05": ("value", "d[…] == …"),
    "0/0: ___check_obj_id(self.act, 139854489161376), type=<class 'function'>": ("value", "id(self.act)"),
    "0/0: 2 <= x.size()[1] <= 4096": ("shape", "… <= x.size()[1] <= …"),
    "0/0: ___check_torch_function_mode_stack()": ("global_state", "___check_torch_function_mode_stack()"),
    "0/0: BACKEND_MATCH failure: torch.compile detected different backend callables. Cached: /home/me": ("other", "backend"),
    "Unable to find recompilation reasons": ("other", "Unable to find recompilation reasons"),
}  # fmt: skip


def test_a_guard_is_read_and_has_a_remedy() -> None:
    """Its kind, and its expression without the values that it compared."""
    assert {reason: tuple(read_guard(reason)) for reason in GUARDS} == GUARDS
    assert tuple(RECOMPILE_REMEDIES) == catalog.COMPILE_GUARDS
    assert {kind for kind, _ in GUARDS.values()} == set(catalog.COMPILE_GUARDS)


BREAKS = {
    "generic_jump TensorVariable()": "data_dependent",
    "Unsupported Tensor.item() call with capture_scalar_outputs=False\n  Explanation: secret": "data_dependent",
    "Failed to trace builtin operator\n  Explanation: print('secret')": "call",
    "Call to `torch._dynamo.graph_break()`": "call",
    "call_function BuiltinVariable(print) [ConstantVariable(str: 'secret')] {}": "call",
    "Reconstruction failure": "other",
}
FAILURES = {
    ("Unsupported", "Dynamo recompile limit exceeded\n  Explanation: ..."): "recompile_limit",
    ("FailOnRecompileLimitHit", "Hard failure due to fullgraph=True"): "recompile_limit",
    ("Unsupported", "Failed to trace builtin operator\n limit exceeded"): "unsupported",
    ("BackendCompilerFailed", "backend='inductor' raised"): "error",
}


def test_graph_breaks_and_failures_are_read() -> None:
    """A break's class, and the first line of its reason without values; whether torch gave up, and why."""
    assert {reason: read_break(reason)[0] for reason in BREAKS} == BREAKS
    for reason in BREAKS:
        message = read_break(reason)[1]
        assert message.partition("(")[0] == reason.partition("\n")[0].partition("(")[0]
        assert "secret" not in message
    assert {failure: read_failure(*failure) for failure in FAILURES} == FAILURES


def trained_model() -> tuple[nn.Sequential, torch.optim.SGD]:
    """A model with gradients and an optimizer that has stepped."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def evaluation() -> Function:
    """``eval()`` and ``train()`` around a forward, in a function decorated with ``no_grad``."""
    model = mlp()

    @torch.no_grad()
    def function(inputs: torch.Tensor) -> Any:
        model.eval()
        outputs = model(inputs)
        model.train()
        return outputs

    return function


def registered() -> Function:
    """A module is given a parameter."""
    model = mlp()

    def function(inputs: torch.Tensor) -> Any:
        model.register_parameter("more", nn.Parameter(torch.ones(2)))
        return model(inputs)

    return function


def containers() -> Function:
    """Containers that are made in the region."""
    model = mlp()

    def function(inputs: torch.Tensor) -> Any:
        listed = nn.ModuleList([model])
        listed.append(nn.Sequential(nn.ReLU(), model[0]))
        return listed[0](inputs)

    return function


def clipped() -> Function:
    """Clipping."""
    model, _ = trained_model()
    return lambda inputs: inputs + nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def whole_step() -> Function:
    """A whole step, with a loss scaler."""
    model, optimizer = trained_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def function(inputs: torch.Tensor) -> torch.Tensor:
        model.train()
        loss: torch.Tensor = model(inputs).sum()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return function


def scheduled() -> Function:
    """A scheduler's step, after the optimizer's."""
    _, optimizer = trained_model()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def function(inputs: torch.Tensor) -> torch.Tensor:
        scheduler.step()
        return inputs + 1

    return function


def loaded() -> Function:
    """An iteration over a data loader."""
    loader = DataLoader(TensorDataset(torch.ones(4, 8)), batch_size=2)

    def function(inputs: torch.Tensor) -> torch.Tensor:
        for (rows,) in loader:
            inputs = inputs + rows  # a sum
        return inputs

    return function


def saved(inputs: torch.Tensor) -> Any:
    """A save, and a load."""
    buffer = io.BytesIO()
    torch.save(inputs, buffer)
    buffer.seek(0)
    return torch.load(buffer) + 1


def described(inputs: torch.Tensor) -> torch.Tensor:
    """What the script says itself."""
    with torchobs.phase("data"):
        torchobs.log(loss=1.0)
        torchobs.event("test")
    return inputs + 1


CASES: dict[str, Callable[[], Function]] = {
    "train": evaluation,
    "register_parameter": registered,
    "containers": containers,
    "clip_grad_norm_": clipped,
    "scaled step": whole_step,
    "StepLR": scheduled,
    "loader": loaded,
    "save": lambda: saved,
    "torchobs": lambda: described,
}


class Compiled(NamedTuple):
    """What came of it."""

    outcome: str
    operations: tuple[tuple[str, ...], ...] = ()
    breaks: int = 0


def attempt(act: Callable[[list[tuple[str, ...]]], object]) -> Compiled:
    """Do it as if nothing had been compiled, with a list for the operations of its graphs."""
    torch._dynamo.reset()
    counters.clear()
    graphs: list[tuple[str, ...]] = []
    outcome = ""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            act(graphs)
        except Exception as error:  # noqa: BLE001  # whatever torch says to it
            outcome = type(error).__name__
    return Compiled(outcome, tuple(graphs), sum(Counter(counters["graph_break"]).values()))


def compiled_by(function: Function, *, fullgraph: bool) -> Compiled:
    """Compile and call it."""

    def act(graphs: list[tuple[str, ...]]) -> None:
        def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
            graphs.append(tuple(sorted(str(node.target) for node in graph.graph.nodes if "call" in node.op)))
            return graph.forward

        torch.compile(function, backend=backend, fullgraph=fullgraph)(torch.ones(2, 8))

    return attempt(act)


def exported(function: Function) -> Compiled:
    """Export it."""

    class Whole(nn.Module):
        def forward(self, inputs: torch.Tensor) -> Any:
            return function(inputs)

    return attempt(lambda graphs: graphs.append(targets(torch.export.export(Whole(), (torch.ones(2, 8),), strict=False).graph)))


def targets(graph: torch.fx.Graph) -> tuple[str, ...]:
    """Its operations."""
    return tuple(str(node.target) for node in graph.nodes)


WAYS: dict[str, Callable[[Function], Compiled]] = {
    "fullgraph": lambda function: compiled_by(function, fullgraph=True),
    "compile": lambda function: compiled_by(function, fullgraph=False),
    "export": exported,
    "make_fx": lambda function: attempt(lambda graphs: graphs.append(targets(make_fx(function)(torch.ones(2, 8)).graph))),
}


def by_all_ways(make: Callable[[], Function]) -> dict[str, Compiled]:
    """Do it, with what this torch can compile of backward passes compiled."""
    with config.patch(trace_autograd_ops=True) if hasattr(config, "trace_autograd_ops") else contextlib.nullcontext():
        return {way: act(make()) for way, act in WAYS.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_the_graphs_are_those_without_torchobs(flight_dir: Path, case: str) -> None:
    """The same outcome, the same operations in as many graphs, and no graph break more; no probe fails on the way.

    Fewer breaks are possible where an optimizer steps: Dynamo gives up on its hooks before it comes to a break of torch's own.
    """
    expected = by_all_ways(CASES[case])
    session = torchobs.init(flight_dir=flight_dir)
    try:
        watched = by_all_ways(CASES[case])
        assert session.context is not None
        assert [breaker.probe for breaker in session.context.breakers.values() if breaker.errors] == []
    finally:
        torchobs.shutdown()
        torch._dynamo.reset()
    for way, plain in expected.items():
        assert watched[way]._replace(breaks=0) == plain._replace(breaks=0), way
        assert watched[way].breaks <= plain.breaks, way
