"""``compile``: where ``torch.compile`` breaks a model's graph, which calls compile it anew, and why, in words."""

from __future__ import annotations

import inspect
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs.debug.findings import told
from torchobs.debug.module_values import raised_by
from torchobs.debug.tensors import require_module
from torchobs.probes.compile.reasons import REMEDIES, read_break, read_failure, read_guard
from torchobs.runtime.session import current
from torchobs.support.kept_state import state_kept
from torchobs.support.result import Result

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_EVALUATION = "no gradients (evaluation)"


@dataclass(frozen=True, slots=True)
class GraphBreak(Result):
    """A place where one graph ends and Python goes on."""

    kind: str
    """``data_dependent``, ``call`` or ``other``"""
    reason: str
    location: str
    """file:line of the user's code"""


@dataclass(frozen=True, slots=True)
class Recompile(Result):
    """A call for which a function was compiled anew."""

    call: str
    """What was different about the call"""
    function: str
    """The one that is compiled anew; the model's class for the whole of its call"""
    guard: str
    """Kind of the guard that failed: shape, tensor, global_state, type, value or other"""
    expression: str
    remedy: str

    @property
    def is_of_evaluation(self) -> bool:
        """It has graphs of its own, since it needs none for a backward pass: no anomaly."""
        return self.call == _EVALUATION and self.guard == "global_state"


class _Failure(NamedTuple):
    text: str
    by: str
    """``compiler``, or ``model`` if that raises without a compiler, too"""


@dataclass(frozen=True, slots=True)
class CompileCheck(Result):
    """What ``torch.compile`` makes of a model."""

    model: str
    graphs: int
    """Of the first call"""
    operators: int
    full_graph: bool
    """One graph without a break: ``fullgraph=True`` works"""
    breaks: tuple[GraphBreak, ...]
    recompiles: tuple[Recompile, ...]
    guards: dict[str, int]
    """Conditions that the first call's graphs hold for, by what they check"""
    error: str | None
    anomalies: tuple[str, ...]


def compile(model: Any, batch: Any, *, more_batches: Sequence[Any] = ()) -> CompileCheck:  # noqa: A001  # torch's own name for it
    """Trace a model as ``torch.compile`` does, and tell where its graph breaks and what makes it compile anew.

    The model is called under the compiler with a backend that only collects graphs (nothing is generated or tuned): with the
    batch twice, with a batch of another size, with each of ``more_batches``, and without gradients. Buffers and the random
    state are put back, and gradients are not computed. What the program has compiled already stays compiled; with a
    torch that cannot keep compilations apart (before ``isolate_recompiles``), they count towards the recompile limit.

    Args:
        model: the module, not yet compiled (of a compiled one, the module in it is taken).
        batch: as for :func:`torchobs.debug.forward_pass`.
        more_batches: others that training has, such as a longer sequence.

    Raises:
        TypeError: ``model`` is no module. What the compiler or the model raises is in ``error``.
    """
    require_module(model, "compile")
    model = getattr(model, "_orig_mod", model)
    graphs, tracer = list[Any](), _Tracer(model)
    failure, recompiles = None, list[Recompile]()
    with state_kept(model), _on_trial():
        try:
            _, graphs, failure = tracer.run(batch)
            first = list(graphs)
            for what, other, grad, ours in () if failure else _variants(batch, more_batches):
                records, _, failed = tracer.run(other, grad=grad)
                if failed and ours and failed.by == "model":
                    continue  # which takes no other size, or differentiates in its forward pass: nobody will call it so
                recompiles += _recompiles(what, type(model).__name__, records)
                failure = failure or failed
        finally:
            tracer.close()
    breaks, guards = _breaks(first), dict(tracer.guards)
    texts = [("graph_break", row.location, f"graph break at {row.location}: {row.reason}") for row in breaks]
    texts += [("recompile", row.function, _recompile_text(row)) for row in recompiles if not row.is_of_evaluation]
    texts += [("compile_error", type(model).__name__, f"the {failure.by} raised {failure.text}")] if failure else []
    operators = sum(_operators(graph) for graph in first)
    return CompileCheck(
        model=type(model).__name__, graphs=len(first), operators=operators, full_graph=len(first) == 1 and not breaks,
        breaks=breaks, recompiles=tuple(recompiles), guards=guards, error=failure.text if failure else None,
        anomalies=told("compile", texts),
    )  # fmt: skip


def _recompile_text(row: Recompile) -> str:
    return f"{row.function} is compiled anew for {row.call}: {row.expression}. Remedy: {row.remedy}"


class _Tracer:
    """Calls a module under the compiler with a backend that keeps the graphs."""

    def __init__(self, model: Any) -> None:
        import torch

        self._model = model
        self._graphs: list[Any] = []
        self.guards: Counter[str] = Counter()
        apart = {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}
        compiled: Any = torch.compile  # its types know no older or newer torch

        def called(*args: Any, **kwargs: Any) -> Any:
            return model(*args, **kwargs)

        self._compiled: Any = compiled(called, backend=self._keep, **apart)

    def _keep(self, graph: Any, example_inputs: Any) -> Any:
        from torch._guards import TracingContext

        del example_inputs
        self._graphs.append(graph)
        context = TracingContext.try_get()
        for guard in context.guards_context.dynamo_guards if context is not None else ():
            self.guards[guard.create_fn_name().lower()] += 1
        return graph.forward

    def run(self, batch: Any, *, grad: bool = True) -> tuple[list[Any], list[Any], _Failure | None]:
        """Call it; return the compilations that it took, their graphs, and what was raised."""
        import torch
        from torch._dynamo.utils import get_compilation_metrics

        before = {id(record) for record in get_compilation_metrics()}
        self._graphs = []
        with torch.set_grad_enabled(grad):
            error = raised_by(self._compiled, batch)
            own = raised_by(self._model, batch) if error else None
        records = [one for one in get_compilation_metrics() if id(one) not in before]
        failure = _Failure(own or error, "model" if own else "compiler") if error else None
        return records, self._graphs, failure

    def close(self) -> None:
        """Let go of the graphs."""
        self._compiled = self._model = None


@contextmanager
def _on_trial() -> Iterator[None]:
    """Keep our compilations out of what a session tells of the training, and our graph breaks out of torch's list of all."""
    from torch._dynamo.utils import graph_break_reasons

    session = current()
    context = session.context if session is not None else None
    length = len(graph_break_reasons)
    if context is not None:
        context.hooks.compiles_on_trial.notify(True)  # noqa: FBT003  # hooks have no keywords
    try:
        yield
    finally:
        del graph_break_reasons[length:]
        if context is not None:
            context.hooks.compiles_on_trial.notify(False)  # noqa: FBT003


def _variants(batch: Any, more: Sequence[Any]) -> Iterator[tuple[str, Any, bool, bool]]:
    """Yield calls in words, each with its batch, whether it has gradients, and whether it is an idea of ours."""
    from torchobs.debug.batch_memory import batch_size, resized

    yield "the same batch again", batch, True, False
    size = batch_size(batch)
    if size > 2:  # noqa: PLR2004  # of 1 torch always makes a graph of its own
        for what, other in (("another batch size", size - 1), ("a third batch size", size + 1)):
            if batch_size(cut := resized(batch, size, other)) == other:  # what cannot be cut is the same batch again
                yield what, cut, True, True
    for index, one in enumerate(more):
        yield f"more_batches[{index}]", one, True, False
    yield _EVALUATION, batch, False, True


def _recompiles(what: str, model: str, records: list[Any]) -> Iterator[Recompile]:
    for record in records:
        # the function that calls the model is ours: what is compiled there is the model
        name = model if record.co_filename == __file__ else record.co_name or ""
        if record.recompile_reason:
            guard = read_guard(record.recompile_reason)
            yield Recompile(what, name, guard.kind, guard.expression, REMEDIES[guard.kind])
        elif record.fail_type:
            kind = read_failure(record.fail_type, record.fail_reason or "")
            yield Recompile(what, name, "other", kind, REMEDIES["other"])


def _breaks(graphs: list[Any]) -> tuple[GraphBreak, ...]:
    rows = []
    for graph in graphs:
        reason = getattr(graph, "compile_subgraph_reason", None)
        if reason is not None and reason.graph_break:
            place = reason.user_stack[-1] if reason.user_stack else None
            location = f"{place.filename}:{place.lineno}" if place is not None else ""
            rows.append(GraphBreak(*read_break(reason.reason), location))
    return tuple(dict.fromkeys(rows))


def _operators(graph: Any) -> int:
    return sum(node.op in {"call_function", "call_method", "call_module"} for node in graph.graph.nodes)
