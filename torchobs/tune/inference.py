"""Quantised weights, for inference alone: with gradients the model runs as it is."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchobs.tune.techniques import Reclassed, first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

QUANTIZATIONS = ("dynamic", "torchao_int8", "torchao_int8_weights")


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
