"""``explain_compile``: where ``torch.compile`` breaks a model's graph, and which calls compile it anew, and why."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torchobs.catalog.findings import RECOMPILE_REMEDIES
from torchobs.debug.findings import record_findings
from torchobs.debug.memory_use import resized
from torchobs.debug.tensors import require_model
from torchobs.probes.compile import read_break, read_guard
from torchobs.runtime.session import current
from torchobs.support.result import Checked, Problem, Result
from torchobs.tensors.batches import FAILURES, batch_sizes, call, first_line, raised_by
from torchobs.tensors.running import state_kept

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
    """file:line of the user's code; the model's class if it is the model's call"""


@dataclass(frozen=True, slots=True)
class Recompile(Result):
    """A call for which a function was compiled anew."""

    call: str
    """What was different about the call"""
    function: str
    """The function that is compiled anew; the model's class for the whole of its call"""
    guard: str
    """Kind of the guard that failed: shape, tensor, global_state, type, value or other"""
    expression: str
    remedy: str


@dataclass(frozen=True, slots=True)
class CompileCheck(Checked):
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
    """Conditions under which the first call's graphs are valid, counted by what they check"""
    error: str | None
    problems: tuple[Problem, ...]


def explain_compile(model: Any, batch: Any, *, more_batches: Sequence[Any] = ()) -> CompileCheck:
    """Trace a model as ``torch.compile`` does, and report where its graph breaks and what makes it compile anew.

    Graphs, breaks and guards are those of ``torch._dynamo.explain``, which drops what the program has compiled: it is compiled
    again at its next call. Then the model is called under the compiler without a backend (nothing is generated or tuned): with
    the batch twice, with a batch of two other sizes, with each of ``more_batches``, and without gradients. Buffers and the
    random state are put back, and gradients are not computed.

    Args:
        model: the module; if it is compiled already, the module in it is traced.
        batch: as for :func:`torchobs.debug.forward_pass`.
        more_batches: others that training has, such as a longer sequence.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: it is on the device meta. What the compiler or the model raises is in ``error``.
    """
    require_model(model, "explain_compile")
    model, name = getattr(model, "_orig_mod", model), type(model).__name__
    import torch._dynamo

    breaks, recompiles = list[GraphBreak](), list[Recompile]()
    with state_kept(model), _on_trial():
        try:
            explained, error = call(torch._dynamo.explain(model), batch), None  # torch's documented name
        except FAILURES as raised:
            explained, error = None, first_line(raised)
        by = "model" if error is not None and raised_by(model, batch) is not None else "compiler"
        if explained is not None:
            breaks = _breaks(explained.break_reasons)
            error = _call_variants(model, batch, more_batches, breaks, recompiles)
        torch._dynamo.reset()  # what was compiled here counts towards no limit
    guards, graphs, operators = dict[str, int](), 0, 0
    if explained is not None:
        graphs, operators = explained.graph_count, explained.op_count
        guards = dict(Counter(guard.create_fn_name().lower() for guard in explained.out_guards or ()))
    texts = [("graph_break", row.location, f"graph break: {row.reason}") for row in breaks]
    for row in recompiles:
        if (row.call, row.guard) != (_EVALUATION, "global_state"):  # its graphs keep nothing for a backward pass
            text = f"it is compiled anew for {row.call}: {row.expression}. Remedy: {row.remedy}"
            texts.append(("recompile", row.function, text))
    texts += [("compile_error", name, f"the {by} raised {error}")] if error is not None else []
    return CompileCheck(
        model=name, graphs=graphs, operators=operators, full_graph=graphs == 1 and not breaks, breaks=tuple(breaks),
        recompiles=tuple(recompiles), guards=guards, error=error, problems=record_findings("explain_compile", texts),
    )  # fmt: skip


@contextmanager
def _on_trial() -> Iterator[None]:
    """Keep our compilations out of the session's counts."""
    session = current()
    hooks = [session.context.hooks.compiles_on_trial] if session is not None and session.context is not None else []
    for hook in hooks:
        hook.notify(True)  # noqa: FBT003  # hooks have no keywords
    try:
        yield
    finally:
        for hook in hooks:
            hook.notify(False)  # noqa: FBT003  # as above


def _call_variants(
    model: Any, batch: Any, more_batches: Sequence[Any], breaks: list[GraphBreak], recompiles: list[Recompile]
) -> str | None:
    """Add where torch gives up a function, and what each variant of the call compiles anew; return the first error."""
    from torch._dynamo.utils import get_compilation_metrics

    def call_model(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    compiled: Any = torch.compile(call_model, backend="eager")
    first_error = None
    before = {id(record) for record in get_compilation_metrics()}
    for what, other, grad, ours in _variants(batch, more_batches):
        with torch.set_grad_enabled(grad):
            error = raised_by(compiled, other)
            refused = error is not None and ours and raised_by(model, other) is not None
        fresh = [record for record in get_compilation_metrics() if id(record) not in before]
        before |= {id(record) for record in fresh}
        if refused:
            continue  # it takes no other size, or differentiates in its forward pass: nobody will call it so
        for record in fresh:
            # the function that calls the model is ours: what is compiled there is the model
            name = type(model).__name__ if record.co_filename in {__file__, None} else record.co_name or ""
            if record.recompile_reason:
                guard = read_guard(record.recompile_reason)
                recompiles.append(Recompile(what, name, guard.kind, guard.expression, RECOMPILE_REMEDIES[guard.kind]))
            elif record.fail_type and error is None:  # it runs eagerly
                file, line = record.fail_user_frame_filename, record.fail_user_frame_lineno
                location = name if file in {__file__, None} else f"{file}:{line}"
                if location not in {row.location for row in breaks}:
                    breaks.append(GraphBreak(*read_break(record.fail_reason or record.fail_type), location))
        first_error = first_error or error
    return first_error


def _variants(batch: Any, more: Sequence[Any]) -> Iterator[tuple[str, Any, bool, bool]]:
    """Yield calls: in words, the batch, whether gradients are on, and whether the call is our idea."""
    yield "the first batch", batch, True, False
    yield "the same batch again", batch, True, False
    size = batch_sizes(batch).samples
    if size > 2:  # noqa: PLR2004  # of 1 torch always makes a graph of its own
        for what, other in (("another batch size", size - 1), ("a third batch size", size + 1)):
            if batch_sizes(cut := resized(batch, size, other)).samples == other:  # what cannot be cut is the same batch again
                yield what, cut, True, True
    for index, another in enumerate(more):
        yield f"more_batches[{index}]", another, True, False
    yield _EVALUATION, batch, False, True


def _breaks(reasons: Sequence[Any]) -> list[GraphBreak]:
    rows = []
    for reason in reasons:
        location = "".join(f"{frame.filename}:{frame.lineno}" for frame in reason.user_stack[-1:])
        rows.append(GraphBreak(*read_break(reason.reason), location))
    return list(dict.fromkeys(rows))
