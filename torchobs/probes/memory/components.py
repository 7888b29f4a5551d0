"""What takes memory when it runs out: parameters, gradients, optimizer state and buffers, in all and by module.

Counted from the optimizers that have stepped and the modules that are alive, on one device; shapes are read and nothing is
computed. A tensor that several share counts once, a sharded one by its own part, a sparse one by what it stores.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs.probes.gradients.parameter_names import all_modules, clean, layer_of, roots
from torchobs.support.storages import stored

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torchobs.probes.core.context import ProbeContext

MOST_MODULES = 5


class Components(NamedTuple):
    """Bytes of each component, and the modules that take most as ``name size B``."""

    sizes: dict[str, int]
    modules: list[str]


def components(context: ProbeContext, device: str) -> Components:
    """Count what is on that device (``cpu``, ``cuda:0``)."""
    optimizers, models = context.recorder.optimizers(), roots(all_modules(_dont_wait))
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    named = {id(tensor): (tensor, name) for name, tensor in _named_parameters(models)}
    trained = (parameter for group in groups for parameter in group["params"])
    parameters = {id(one): one for one in trained} | {key: tensor for key, (tensor, _) in named.items()}
    state: dict[int, list[Any]] = {}
    for optimizer in optimizers:
        for parameter, values in list(optimizer.state.items()):
            state.setdefault(id(parameter), []).extend(values.values() if isinstance(values, dict) else [values])
    buffers = [(tensor, layer_of(clean(name))) for model in models for name, tensor in model.named_buffers()]
    sizes, layers, seen = Counter[str](), Counter[str](), set[int]()

    def add(component: str, tensor: Any, layer: str) -> None:
        local = getattr(tensor, "_local_tensor", tensor)
        if not hasattr(local, "untyped_storage") or str(local.device) != device or id(local) in seen:
            return
        seen.add(id(local))
        size = sum(int(part.numel()) * int(part.element_size()) for part in stored(local))
        sizes[component] += size
        layers[layer] += size

    for key, parameter in parameters.items():
        layer = layer_of(clean(named[key][1])) if key in named else "unknown"
        add("parameters", parameter, layer)
        add("gradients", parameter.grad, layer)
        for value in state.get(key, ()):
            add("optimizer_state", value, layer)
    for tensor, layer in buffers:
        add("buffers", tensor, layer)
    rows = [f"{layer} {size} B" for layer, size in layers.most_common(MOST_MODULES) if layer != "unknown"]
    return Components({name: sizes[name] for name in ("parameters", "gradients", "optimizer_state", "buffers")}, rows)


def _named_parameters(models: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for model in models:
        yield from model.named_parameters()


def _dont_wait() -> None:
    """There is nothing to yield to: the thread that failed is the one that asks."""
