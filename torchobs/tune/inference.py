"""Techniques for inference alone: quantised weights and graphs recorded ahead. With gradients the model runs as it is."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchobs.support.kept_state import state_kept
from torchobs.support.model_calls import call
from torchobs.support.module_modes import evaluating
from torchobs.tune.techniques import Reclassed, first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_TracerWarning: type[Warning] = torch.jit.TracerWarning  # type: ignore[attr-defined]
_OF_SHAPES = (
    "Converting a tensor to a Python boolean",
    "Converting a tensor to a Python integer",
    "Converting a tensor to a Python float",
    "Converting a tensor to a Python index",
    "Iterating over a tensor",
    "torch.tensor results are registered as constants",
)
"""Warnings of a trace, for which a size is a tensor, too: of sizes alone they do not matter, since the graph has one shape"""
QUANTIZATIONS = ("dynamic", "torchao_int8", "torchao_int8_weights")
GRAPHS = ("export", "torchscript")


class DynamicQuantization(Reclassed):
    """Computes linear layers in 8-bit integers by torch.ao; inputs are quantised anew at each call.

    The float32 weights stay where they are, for ``undo`` and the state dict: it saves time, and no memory.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__(modules)
        self._quantized: dict[int, tuple[tuple[tuple[int, int], ...], Any]] = {}

    def apply(self) -> None:
        """Quantise weights that changed since the last time, and take over the forward pass."""
        for module in self._modules:
            self._current(module)
        super().apply()

    def _current(self, module: nn.Module) -> Any:
        """Return the layer in integers, made anew if its weight or bias is another than the last time."""
        made_of = tuple((id(each), each._version) for each in (module.weight, module.bias) if isinstance(each, torch.Tensor))
        known = self._quantized.get(id(module))
        if known is None or known[0] != made_of:
            known = self._quantized[id(module)] = (made_of, _quantized_linear(module))
        return known[1]

    def forward_of(self, kind: type[nn.Module]) -> Callable[..., Any]:
        """Return a forward pass that is quantised where nothing asks for gradients."""
        current = self._current

        def forward(self: nn.Module, input: torch.Tensor) -> Any:  # noqa: A002  # nn.Linear's name for it
            if torch.is_grad_enabled() or input.dtype is not torch.float32:
                return kind.forward(self, input)
            return current(self)(input)  # a state dict may have been loaded, or a step been taken, since

        return forward


def _quantized_linear(module: nn.Module) -> Any:
    from torch.ao.nn.quantized.dynamic import Linear
    from torch.ao.quantization import default_dynamic_qconfig

    with warnings.catch_warnings(), torch.random.fork_rng([]):  # constructors of layers draw first weights
        twin = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)  # type: ignore[arg-type]
        twin.load_state_dict({name: tensor.detach() for name, tensor in module.state_dict().items()})
        twin.qconfig = default_dynamic_qconfig  # type: ignore[assignment]
        warnings.simplefilter("ignore")  # that torch will give this up is said in the plan's reason
        return Linear.from_float(twin)  # type: ignore[no-untyped-call]


def torchao_obstacle() -> str | None:
    """Return why torchao cannot be imported, or None: each of its releases fits few of torch's."""
    try:
        with torch.random.fork_rng([]):  # its import draws random numbers
            from torchao import quantization  # noqa: F401
    except (ImportError, AttributeError, RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {first_line(error)}"
    return None


class TorchaoQuantization:
    """Puts torchao's quantised parameters in the place of these linear layers' own, and these back again."""

    def __init__(self, model: nn.Module, kind: str, linear: Sequence[nn.Module]) -> None:
        self._model, self._kind, self._linear = model, kind, linear
        self._before: list[tuple[nn.Module, nn.Parameter]] = []
        self._after: list[nn.Parameter] = []
        self._versions: list[int] = []
        self._added: list[tuple[nn.Module, set[str]]] = []

    def apply(self) -> None:
        """Quantise, unless no weight changed since the last time."""
        self._before = [(module, module.weight) for module in self._linear]  # type: ignore[misc]
        versions = [weight._version for _, weight in self._before]
        if versions == self._versions:
            for (module, _), weight in zip(self._before, self._after, strict=True):
                module._parameters["weight"] = weight
            return
        from torchao import quantization

        names = [(module, set(vars(module))) for module, _ in self._before]

        config = (
            quantization.Int8DynamicActivationInt8WeightConfig()
            if self._kind == "torchao_int8"
            else quantization.Int8WeightOnlyConfig()
        )
        chosen = set(self._linear)
        quantization.quantize_(self._model, config, filter_fn=lambda module, _: module in chosen)
        self._added = [(module, set(vars(module)) - before) for module, before in names]
        self._versions, self._after = versions, [module.weight for module, _ in self._before]  # type: ignore[misc]

    def undo(self) -> None:
        """Give each layer its own parameter back, the same object, unless it was given another one since."""
        for (module, weight), ours in zip(self._before, self._after, strict=True):
            if module._parameters["weight"] is ours:
                module._parameters["weight"] = weight
        for module, names in self._added:
            for name in names:  # a representation of their own
                vars(module).pop(name, None)


class Graph:
    """Runs calls like the example's by a graph that ``torch.export`` or TorchScript recorded; all others eagerly.

    Like the example's: the same shapes, types and devices, in evaluation mode, without gradients. The graph has the model's own
    parameters, not copies; a model that was given others since (``load_state_dict(assign=True)``) runs eagerly.
    """

    def __init__(self, model: nn.Module, kind: str, example: Any, failed: Callable[[str], None]) -> None:
        self._model, self._kind, self._example, self._failed = model, kind, example, failed
        self._call: Callable[..., Any] | None = None

    def apply(self) -> None:
        """Record the graph, the first time; should that fail, the model stays eager and the plan says why."""
        if self._call is None:
            try:
                self._call = self._recorded()
            except Exception as error:  # noqa: BLE001  # each kind of model fails in another way, and none may end a training
                self._failed(f"{type(error).__name__}: {first_line(error)}")
                self._call = self._model._call_impl
        self._model.__dict__["_compiled_call_impl"] = self._call

    def undo(self) -> None:
        """Run eagerly again."""
        self._model.__dict__.pop("_compiled_call_impl", None)

    def _recorded(self) -> Callable[..., Any]:
        model, wanted = self._model, []

        def note(*args: Any, **kwargs: Any) -> Any:
            wanted.append((args, kwargs))

        call(note, self._example)
        args, kwargs = wanted[0]
        with evaluating(model), state_kept(model), torch.no_grad():
            exports = self._kind == "export"
            graph = torch.export.export(model, args, kwargs).module() if exports else _traced(model, args, kwargs)
        signature = _signature(args, kwargs)
        recorded = [
            (owned, name, tensor)
            for module in model.modules()
            for owned in (module._parameters, module._buffers)
            for name, tensor in owned.items()
        ]

        def is_recorded() -> bool:
            return all(owned.get(name) is tensor for owned, name, tensor in recorded)

        def recorded_call(*args: Any, **kwargs: Any) -> Any:
            if not model.training and not torch.is_grad_enabled() and _signature(args, kwargs) == signature and is_recorded():
                return graph(*args, **kwargs)
            return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

        return recorded_call


def _traced(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    if kwargs:
        raise TypeError("TorchScript traces positional arguments alone")
    with _ValuesRead() as eager:  # type: ignore[no-untyped-call]
        model(*args)
    with warnings.catch_warnings(record=True) as raised:
        # Said in the plan's reason. A DeprecationWarning before torch 2.14, a FutureWarning since.
        warnings.filterwarnings("ignore", ".torch.jit.* is deprecated")
        warnings.simplefilter("always", _TracerWarning)
        traced: Callable[..., Any] = torch.jit.trace(model, args)  # type: ignore[no-untyped-call]
    told = []
    for each in raised:
        if issubclass(each.category, _TracerWarning):
            told.append(str(each.message))
        else:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    if eager.values or (eager.sizes and told):
        raise RuntimeError("the forward pass goes by the values of tensors, of which a trace has those of the example alone")
    if other := next((words for words in told if not words.startswith(_OF_SHAPES)), None):
        raise RuntimeError(other)
    return traced


class _ValuesRead(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether Python is given tensors' values (``item``, ``bool``, ``equal``), or sizes that depend on values.

    It may branch or loop by them, where a trace has what the example did.
    """

    values = sizes = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.values |= torch.Tag.data_dependent_output in func.tags
        if torch.Tag.dynamic_output_shape in func.tags:
            masks = {torch.bool, torch.uint8}  # of other indices the size is that of the index
            is_by_index = func is torch.ops.aten.index.Tensor
            self.sizes |= not is_by_index or any(index is not None and index.dtype in masks for index in args[1])
        return func(*args, **(kwargs or {}))


def _signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, structure = _pytree.tree_flatten((args, kwargs))
    described = [
        (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf) for leaf in leaves
    ]
    return described, structure
