"""Which modules are looked at: those without children, in the model's order, evenly chosen where they are too many.

Not looked at are modules in what ``torch.compile`` has compiled, which would have to be compiled anew for a hook, scripted
ones, and those inside of a ``torch.nn.TransformerEncoderLayer``: with a hook in one, its evaluation takes another way, whose
results differ in the last bits. Of these the whole encoder's output is looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from torchobs.probes.gradients.parameter_names import clean, layer_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_WHOLE = frozenset({"MultiheadAttention", "TransformerEncoder"})
"""Modules that compute with the parameters of their children, which are never called, and the one of above"""
_COMPILED, _CLOSED = "OptimizedModule", frozenset({"TransformerEncoderLayer", "ScriptModule"})
_PASSING = frozenset(
    {
        *("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout"),
        *("Identity", "Flatten", "Unflatten", "ParameterList", "ParameterDict", "ModuleList", "ModuleDict", "_Loss"),
    }
)
"""What computes nothing, or is never called"""


class Watched(NamedTuple):
    """A module whose outputs are looked at."""

    name: str
    module: ref[Any]


class Chosen(NamedTuple):
    """The modules of a model that are looked at, and how many others there are."""

    modules: list[Watched]
    left_out: int
    """Beyond the limit"""
    compiled: int
    """In a compiled module"""


def choose(roots: Iterable[Any], room: int) -> Chosen:
    """Choose at most ``room`` modules below these ones."""
    roots, compiled, found = list(roots), [0], list[Watched]()
    for root in roots:
        title = f"{type(root).__name__}." if len(roots) > 1 else ""
        for path, module in _leaves(root, "", set(), compiled):
            name = layer_of(clean(path + ".weight")) if path else type(module).__name__
            found.append(Watched(title + name, ref(module)))
    kept = [found[index * len(found) // room] for index in range(room)] if len(found) > room else found
    return Chosen(kept, len(found) - len(kept), compiled[0])


def _leaves(module: Any, path: str, seen: set[int], compiled: list[int]) -> Iterator[tuple[str, Any]]:
    names = {kind.__name__ for kind in type(module).__mro__}  # never isinstance, which runs code of lazy objects
    if id(module) in seen:
        return
    seen.add(id(module))
    if _COMPILED in names or getattr(module, "_compiled_call_impl", None) is not None:
        compiled[0] += sum(1 for each in module.modules() if not any(True for _ in each.children()))
        return
    if names & _CLOSED or (names & _PASSING and not vars(module).get("_modules")):
        return
    children = [(name, child) for name, child in list(vars(module)["_modules"].items()) if child is not None]
    if names & _WHOLE or not children:
        yield path, module
        return
    for name, child in children:
        yield from _leaves(child, f"{path}.{name}" if path else name, seen, compiled)
