"""Measure the outputs of every layer on some steps, at level extreme, or where ``debug.enable`` requests it.

Such a step is one window: it opens when a backward pass begins, with forward hooks on the chosen modules, and closes when the
next one begins, so that recomputation by checkpointing during a backward pass does not count. In a step that accumulates
gradients one part is measured. How often is decided by ``SamplingInterval``, within three times the overhead budget. In the
other steps, and at the other levels, no module has a hook.

Numbers leave a device by one copy for all layers, and nothing waits for it.

``torch.compile`` does not look for hooks where there were none when it compiled, so a compiled region is neither compiled anew
nor interrupted, and its modules are silent. A module that is silent in two windows gets no further hook: code that is compiled
while a window is open is compiled once more afterwards, only in those two. A look ends at once when our tensors would become
part of something else: tracing, CUDA graphs, ``torch.func``, and any dispatch mode, such as the cache of selective
checkpointing.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from threading import get_ident
from time import monotonic, monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch

from torchobs import catalog
from torchobs.catalog.findings import Finding
from torchobs.detect.learning import LASTING_STEPS
from torchobs.flight.value_blocks import LAYERS
from torchobs.probes.context import SamplingInterval
from torchobs.probes.layers import WIDER
from torchobs.support.graph_safe import OutputHook, dispatch_modes, transformed
from torchobs.tensors.device_reads import PendingCopies
from torchobs.tensors.names import all_modules, clean, layer_of, roots
from torchobs.tensors.statistics import MOST_ELEMENTS, NUMBERS, combine, first_tensor, numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torchobs.probes.context import ProbeContext
    from torchobs.tensors.device_reads import PendingCopy
    from torchobs.tensors.statistics import ActivationStats


EXTREME = 3
MOST_LAYERS = 64
_BUDGETS = 3
"""Most time that this may take, as a multiple of the overhead budget, which is for level basic"""
_FIRST_STEP = 3
"""Ended steps before modules are collected: a compiled training compiles most of its code in its first two"""
_SILENT = 2
"""Windows without a call of a module, after which it gets no further hook"""
_MOST_CALLS = 4
"""Calls of a module that are measured in one step"""
_LONGEST = 8
"""Backward passes after which a window without any call closes"""
_SHOW_S = 1.0
_MOST_SCANS = 4
_TRAINING, _FROZEN, _WITHOUT_GRAD = 3, 2, 1
"""Rank of a call: the best ones of a window count. In training with grad; in evaluation mode with grad, as frozen layers
run; in training mode without grad, as reentrant checkpointing runs the forward pass"""


class _Call(NamedTuple):
    """Kind of a vector of numbers."""

    length: int
    """of the vector"""
    elements: int
    """examined"""
    shape: tuple[int, ...]
    since: Since | None
    """of a rectifier: the basis for the number of its silent units, the vector's last element"""


class _Slot:
    """One module in the window that is open."""

    __slots__ = ("calls", "name", "silent", "units", "worth")

    def __init__(self, name: str, module: Any) -> None:
        self.name = name
        self.calls: list[tuple[Any, _Call]] = []
        self.units = FiredUnits() if is_rectifier(module) else None
        self.worth = self.silent = 0


class _Sent(NamedTuple):
    """One step's numbers of one device, that may not have arrived yet."""

    step: int
    rows: list[tuple[str, list[_Call]]]
    """For each layer its calls"""
    copies: PendingCopy | list[float]


class ActivationProbe:
    """Looks at layers' outputs."""

    name = "activations"

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        self._context, self._breaker = context, context.breaker(self.name)
        self._pace = SamplingInterval(context.settings.overhead_budget * _BUDGETS, context.hooks.layers.every or None)
        self._modes, self._transformed = dispatch_modes(), transformed()
        self._copies = PendingCopies(context.device.cuda)
        self._dead_layers: set[str] = set()
        self._on = self._listening = self._removed = False
        self._chosen: Chosen | None = None
        self._model, self._scans = 0, 0
        self._slots: list[tuple[_Slot, Any]] = []
        self._window: list[tuple[_Slot, Any]] = []
        """Those of the window that is open; the sampler thread may choose others meanwhile"""
        self._opened_in = -1
        """The step in which the last window was opened"""
        self._latest: tuple[int, dict[str, ActivationStats]] | None = None
        """The last step with numbers that have arrived, and its layers"""
        self._fresh = False
        """Whether that step is still to be published"""
        self._handles: list[Any] = []
        self._open = 0
        self._sent: deque[_Sent] = deque(maxlen=64)
        self._shown_s = 0.0
        self._reported: tuple[int, ...] = ()
        context.hooks.layers.changed = self._breaker.guard(self._change_pace)

    def _change_pace(self) -> None:
        """Apply the requested interval from now on, or stop."""
        every = self._context.hooks.layers.every
        self._pace.fixed = every or None
        self._pace.begin(self._context.recorder.step)
        if not every:
            self._close()

    def remove(self) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        self._removed = True  # the sampler's last round comes later, and must arm nothing
        self._end()

    # -- in the sampler thread ---------------------------------------------------------------------------------------------

    def sample(self) -> None:
        """Follow the level and the model, and process numbers that have arrived."""
        self._receive(now=False)
        if not self._removed:
            self._follow()

    def _is_wanted(self) -> bool:
        hooks = self._context.hooks
        return hooks.level.value >= EXTREME or hooks.layers.every > 0

    def _follow(self) -> None:
        """Begin or end after a change of level or model."""
        context, on = self._context, self._is_wanted()
        if on != self._on:
            self._on, self._chosen, self._scans = on, None, 0
        if self._model != context.recorder.models.changes:
            self._model, self._chosen, self._scans = context.recorder.models.changes, None, 0
        if self._on and self._chosen is None and context.recorder.step >= _FIRST_STEP and self._scans < _MOST_SCANS:
            self._choose()
        if (self._on and self._chosen is not None) != self._listening:
            self._listening = not self._listening
            context.at_backward(self._breaker.guard(self._begin if self._listening else self._end))

    def observe(self) -> None:
        """Publish the last step, and which layers are measured."""
        self._receive(now=True)
        self._report_choice()

    def _choose(self) -> None:
        """Choose modules among those that are trained."""
        context = self._context
        self._scans += 1
        trained = set(map(id, context.trained()))
        models = [model for model in context.models() if _trains(model, trained)]
        models = models or [model for model in roots(all_modules(context.yield_gil)) if _trains(model, trained)]
        if models:
            modules, self._chosen = choose(models, min(MOST_LAYERS, context.settings.layers * WIDER))
            self._slots = [(_Slot(name, module), ref(module)) for name, module in modules]

    def _receive(self, *, now: bool) -> None:
        """Process the numbers of steps that have ended; once a second, or ``now``, set the series by the last one."""
        last = self._context.recorder.step
        while self._sent and self._sent[0].step <= last:
            sent = self._sent[0]
            if not isinstance(sent.copies, list) and not sent.copies.ready():
                break
            self._sent.popleft()
            same = self._latest[1] if self._latest is not None and self._latest[0] == sent.step else {}  # of another device
            self._latest, self._fresh = (sent.step, same | self._unpacked(sent)), True
            self._context.hooks.layers.ask(*self._latest)
            self._context.yield_gil()
        if self._latest is not None and self._fresh and (now or monotonic() - self._shown_s >= _SHOW_S):
            self._shown_s, self._fresh = monotonic(), False
            self._show(self._latest[1])

    def _unpacked(self, sent: _Sent) -> dict[str, ActivationStats]:
        """Return each layer's statistics; judge its units."""
        values = sent.copies if isinstance(sent.copies, list) else sent.copies.take()
        layers, at = {}, 0
        for name, calls in sent.rows:
            rows = []
            for length, elements, _, since in calls:
                rows.append((values[at : at + NUMBERS], elements))
                at += length
                if since is not None:
                    self._judge_units(name, int(values[at - 1]), since, sent.step)
            layers[name] = combine(rows)._replace(shape=calls[0].shape)
        return layers

    def _judge_units(self, layer: str, silent: int, since: Since, step: int) -> None:
        """Report a layer once if half of its units or more are dead."""
        dead = self._dead_layers
        if since.enough and silent >= DEAD_SHARE * since.units and layer not in dead and len(dead) < _MOST_REPORTED:
            dead.add(layer)
            attributes = {"layer": layer, "units_dead": silent, "units": since.units, "steps": since.steps}
            self._context.writer.event(catalog.EVENT_DEAD_UNITS.name, attributes, step)
            self._context.warn_limited("dead units", Finding("dead_units", "", step, attributes).short)

    def _show(self, layers: dict[str, ActivationStats]) -> None:
        cell = self._context.writer.table.cell
        for name, stats in layers.items():
            for metric, value in (
                (catalog.ACTIVATION_LAYER_MEAN_ABS, stats.mean_abs),
                (catalog.ACTIVATION_LAYER_STD, stats.std),
                (catalog.ACTIVATION_LAYER_MAX, stats.max_abs),
                (catalog.ACTIVATION_LAYER_ZERO, stats.zero),
                (catalog.ACTIVATION_LAYER_NONFINITE, stats.nonfinite),
            ):
                series = cell(metric, {"layer": name}, LAYERS)
                if series is not None:
                    series.set(value)
            self._context.yield_gil()

    def _report_choice(self) -> None:
        """Record the number of observed layers, and why others are not observed, whenever that has changed."""
        chosen = self._chosen
        if chosen is None or not self._on:
            return
        silent = sum(1 for slot, _ in self._slots if slot.silent >= _SILENT)
        counts = chosen.layers - silent, chosen.left_out, chosen.compiled, silent
        if counts != self._reported:
            self._reported = counts
            named = dict(zip(("layers", "left_out", "compiled", "silent"), counts, strict=True))
            self._context.event(catalog.EVENT_ACTIVATIONS, named)

    # -- in the training thread --------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        hook = self._context.hooks.takes_loss
        hook.unregister(self.name)
        hook.register(self._breaker, self._backward_begins)

    def _end(self) -> None:
        self._context.hooks.takes_loss.unregister(self.name)
        self._close()

    def _backward_begins(self, _tensors: Any, _gradients: Any, _accumulates: bool) -> None:  # noqa: FBT001  # a listener
        begun_ns, step = monotonic_ns(), self._context.recorder.step
        if self._open:
            self._open += 1
            if not any(slot.calls for slot, _ in self._window) and self._open <= _LONGEST:
                return  # another model's backward pass, perhaps
            self._close()
            self._send(step + 1)
            self._spend(monotonic_ns() - begun_ns)
        # it may have been switched off since the sampler's last round, and this be the last backward pass
        if self._opened_in != step and self._is_wanted() and self._pace.is_due(step + 1):
            begun_ns, self._opened_in = monotonic_ns(), step
            self._open_window()
            self._spend(monotonic_ns() - begun_ns)

    def _spend(self, ns: int) -> None:
        """Count our own time; of a device its launches, which take longer than the work on 262,144 elements."""
        self._pace.spend(ns)
        spent = self._context.spent_ns
        spent[self.name] = spent.get(self.name, 0) + ns

    def _open_window(self) -> None:
        """Put a hook on every module, except those known to be silent."""
        self._window = self._slots
        for slot, module_ref in self._window:
            module = module_ref()
            slot.calls, slot.worth = [], 0
            if module is not None and slot.silent < _SILENT:
                observe = self._breaker.guard(partial(self._observe_output, slot, module_ref))
                self._handles.append(module.register_forward_hook(OutputHook(observe)))
        self._open = 1 if self._handles else 0

    def _close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._open = [], 0

    def _observe_output(self, slot: _Slot, module_ref: Any, module: Any, output: Any) -> None:
        """Take the numbers of a module's output; called by its hook, and by the hook of a copy of the module."""
        context = self._context
        if module_ref() is not module or not self._open or context.training.backwards or get_ident() != context.training.thread:
            return
        grad = torch.is_grad_enabled()
        worth = (_TRAINING if module.training else _FROZEN) if grad else _WITHOUT_GRAD if module.training else 0
        if worth < max(slot.worth, 1) or (worth == slot.worth and len(slot.calls) >= _MOST_CALLS):
            return
        jit: Any = torch.jit  # torch has no types for it
        if self._modes() or self._transformed() or jit.is_tracing():
            return
        begun_ns = monotonic_ns()
        tensor = first_tensor(output)
        if tensor is None or not tensor.numel() or tensor.layout is not torch.strided or not context.device.cuda.holds(tensor):
            return
        if tensor.device.type not in {"cpu", "cuda"} or (tensor.is_cuda and context.device.cuda.capturing()):
            return
        with torch.no_grad():
            row, count = numbers(tensor)
            units = slot.units.add(tensor, context.recorder.step) if slot.units is not None else None
            if units is not None:
                row = torch.cat([row, units[0].to(row.dtype)])
        if worth > slot.worth:
            slot.calls, slot.worth = [], worth
        slot.calls.append((row, _Call(len(row), count, tuple(tensor.shape), units[1] if units is not None else None)))
        self._spend(monotonic_ns() - begun_ns)

    def _send(self, step: int) -> None:
        """Begin to copy the measured numbers: one copy for each device, which is one."""
        by_device: dict[Any, list[tuple[str, list[tuple[Any, _Call]]]]] = {}
        for slot, _ in self._window:
            slot.silent = 0 if slot.calls else slot.silent + 1
            if slot.calls:
                by_device.setdefault(slot.calls[0][0].device, []).append((slot.name, slot.calls))
            slot.calls = []
        for device, layers in by_device.items():
            rows = [(name, [call for _, call in calls]) for name, calls in layers]
            vectors = [row.to(device) for _, calls in layers for row, _ in calls]
            with torch.no_grad():
                if device.type == "cpu":
                    self._sent.append(_Sent(step, rows, torch.cat(vectors).tolist()))
                    continue
                with self._context.device.cuda.on(device):
                    if not self._context.device.cuda.capturing():
                        self._sent.append(_Sent(step, rows, self._copies.send(torch.cat(vectors))))


def _trains(model: Any, trained: set[int]) -> bool:
    """Return whether a model has any of these parameters; not if it is being changed meanwhile."""
    try:
        return any(id(parameter) in trained for parameter in model.parameters())
    except RuntimeError:  # a dictionary changed size
        return False


_WHOLE = frozenset({"MultiheadAttention", "TransformerEncoder"})
"""Modules that compute with the parameters of their children and never call these, and their parent"""
_COMPILED, _CLOSED = "OptimizedModule", frozenset({"TransformerEncoderLayer", "ScriptModule"})
_PASSING = frozenset(
    {
        *("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout"),
        *("Identity", "Flatten", "Unflatten", "ParameterList", "ParameterDict", "ModuleList", "ModuleDict", "_Loss"),
    }
)
"""Modules that compute nothing, or are never called"""


class Chosen(NamedTuple):
    """Return how many modules of a model are measured, and how many others there are."""

    layers: int
    left_out: int
    """Beyond the limit"""
    compiled: int
    """In a compiled module"""


def choose(roots: Iterable[Any], room: int) -> tuple[list[tuple[str, Any]], Chosen]:
    """Choose at most ``room`` modules below these ones: those without children, in the model's order, evenly.

    Left out are modules in what ``torch.compile`` has compiled, which would have to be compiled anew for a hook, scripted
    ones, and those inside of a ``torch.nn.TransformerEncoderLayer``: with a hook in one, its evaluation takes another way,
    with results that differ in the last bits. There the whole encoder's output is looked at.
    """
    roots, compiled, modules = list(roots), [0], list[tuple[str, Any]]()
    for root in roots:
        title = f"{type(root).__name__}." if len(roots) > 1 else ""
        for path, module in _leaves(root, "", set(), compiled):
            name = layer_of(clean(path + ".weight")) if path else type(module).__name__
            modules.append((title + name, module))
    kept = [modules[index * len(modules) // room] for index in range(room)] if len(modules) > room else modules
    return kept, Chosen(len(kept), len(modules) - len(kept), compiled[0])


def _leaves(module: Any, path: str, visited: set[int], compiled: list[int]) -> Iterator[tuple[str, Any]]:
    names = {kind.__name__ for kind in type(module).__mro__}  # never isinstance, which runs code of lazy objects
    if id(module) in visited:
        return
    visited.add(id(module))
    if _COMPILED in names or getattr(module, "_compiled_call_impl", None) is not None:
        compiled[0] += sum(1 for part in module.modules() if not any(True for _ in part.children()))
        return
    if names & _CLOSED or (names & _PASSING and not vars(module).get("_modules")):
        return
    children = [(name, child) for name, child in list(vars(module)["_modules"].items()) if child is not None]
    if names & _WHOLE or not children:
        yield path, module
        return
    for name, child in children:
        yield from _leaves(child, f"{path}.{name}" if path else name, visited, compiled)


RECTIFIERS = frozenset({"ReLU", "ReLU6"})
DEAD_SHARE = 0.5
LEAST_UNITS, LEAST_LOOKS, LEAST_SAMPLES = 8, 16, 1024
"""Before a verdict"""
_MATRIX, _SEQUENCE = 2, 3
_MOST_REPORTED = 16


class Since(NamedTuple):
    """Basis for a count of units that have not fired; ``enough``: whether that is long enough for a verdict."""

    units: int
    steps: int
    enough: bool


class FiredUnits:
    """Which units of one rectifier have fired; in the training thread, where the outputs are. Begins anew after a verdict.

    A unit that gives zero for every sample, for long, is dead: it has no gradient and learns nothing (Lu et al. 2019, "Dying
    ReLU and Initialization"). The gradient norms of its layer do not show it, for those of the living units are in them. That
    some units are dead is ordinary; where half of a layer is, the learning rate or a bias has killed them. A unit that
    fires seldom is alive: so a verdict takes many samples. A unit is a column of a matrix, a channel of an image, and an
    element of the last dimension of a sequence.
    """

    __slots__ = ("_begun", "_fired", "_looks", "_samples")

    def __init__(self) -> None:
        self._fired: Any = None
        self._begun = self._looks = self._samples = 0

    def add(self, output: Any, step: int) -> tuple[Any, Since] | None:
        """Take in an output; return the number of units that have not fired, a tensor of one element, and since when.

        ``None`` for an output without units. To be called without grad.
        """
        dimensions = output.dim()
        if dimensions < _MATRIX:
            return None
        axis = dimensions - 1 if dimensions <= _SEQUENCE else 1
        samples, units = output.shape[0], output.shape[axis]
        if units < LEAST_UNITS:
            return None
        part = output.detach().narrow(0, 0, min(samples, max(1, MOST_ELEMENTS * samples // output.numel())))
        fired = (part > 0).movedim(axis, -1).reshape(-1, units).any(0)
        if self._fired is None or self._fired.shape != fired.shape or self._fired.device != fired.device:
            self._fired, self._begun, self._looks, self._samples = fired, step, 0, 0
        else:
            self._fired = self._fired | fired
        self._looks, self._samples = self._looks + 1, self._samples + part.shape[0]
        steps, silent = step - self._begun, (~self._fired).sum().reshape(1)
        enough = self._looks >= LEAST_LOOKS and self._samples >= LEAST_SAMPLES and steps >= LASTING_STEPS
        since = Since(units, steps, enough)
        if since.enough:
            self._fired = None
        return silent, since


def is_rectifier(module: Any) -> bool:
    """Return whether the units of a module may die, by the names of its classes."""
    return any(kind.__name__ in RECTIFIERS for kind in type(module).__mro__)
