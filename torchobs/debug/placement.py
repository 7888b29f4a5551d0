"""``check_devices``: tensors on the wrong device, and copies between devices that a forward pass makes unasked."""

# mypy: disable-error-code="no-untyped-call, unreachable"
# torch has no types for its dispatch modes

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torchobs.debug.findings import record_findings
from torchobs.debug.steps import MOST_TENSORS
from torchobs.debug.tensors import require, require_optimizer
from torchobs.support.result import Checked, Problem, Result
from torchobs.support.text import size
from torchobs.tensors.batches import raised_by, walk
from torchobs.tensors.running import state_kept, wants_gradients
from torchobs.tensors.values import bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class DeviceUse(Result):
    """Tensors on one device."""

    device: str
    parameters: int
    buffers: int
    inputs: int
    size_bytes: int
    """Of all of them"""


@dataclass(frozen=True, slots=True)
class Misplaced(Result):
    """A tensor that is not where the model is."""

    kind: str
    """``parameter``, ``buffer``, ``input`` or ``optimizer state``"""
    name: str
    device: str
    expected: str


@dataclass(frozen=True, slots=True)
class SilentCopy(Result):
    """Transfers between devices that one line of the forward pass caused."""

    operator: str
    source: str
    target: str
    count: int
    size_bytes: int
    """Of all of them"""
    waits: bool
    """The host waits for the device (``item()``, ``cpu()``, a copy from pageable memory)"""
    location: str


@dataclass(frozen=True, slots=True)
class DeviceCheck(Checked):
    """Where a model, its batch and its optimizer are."""

    model: str
    device: str
    """The device of most bytes of the parameters; the batch should be there"""
    spread: bool
    """The model is on several devices on purpose (``hf_device_map``, pipeline): its parameters are not judged"""
    devices: tuple[DeviceUse, ...]
    misplaced: tuple[Misplaced, ...]
    copies: tuple[SilentCopy, ...]
    error: str | None
    """Error of the forward pass"""
    problems: tuple[Problem, ...]


def check_devices(model: Any, batch: Any = None, optimizer: Any = None) -> DeviceCheck:
    """Find tensors on the wrong device, and transfers between devices that the forward pass makes.

    With a batch the model is called without gradients, and again with them if its forward pass differentiates; buffers and the
    random state are put back. A dispatch mode finds the transfers, for operators of this thread; a compiled function runs
    eagerly in it.

    Args:
        model: the module.
        batch: as for :func:`torchobs.debug.forward_pass`; without it nothing is run.
        optimizer: its state should be where its parameters are.

    Raises:
        TypeError: ``model`` is no module, or ``optimizer`` no optimizer. An error of the forward pass is in ``error``.
        ValueError: the optimizer has other parameters.
    """
    require(model, "nn.Module", "check_devices")
    if optimizer is not None:
        require_optimizer(optimizer, model, "check_devices")
    parameters, buffers = list(model.named_parameters()), list(model.named_buffers())
    inputs = [pair for pair, _ in zip(walk(batch, "input"), range(MOST_TENSORS), strict=False)]
    home = _main_device([x for _, x in parameters] or [x for _, x in buffers] or [x for _, x in inputs])
    # a pipeline by hand has each child on one device of its own; a lone tensor elsewhere is a mistake
    stages = [stage for child in model.children() if (stage := {str(x.device) for x in child.parameters()})]
    is_staged = all(len(stage) == 1 for stage in stages) and len(set().union(*stages)) > 1
    spread = bool(getattr(model, "hf_device_map", None)) or (is_staged and not {"cpu", "meta"} & set().union(*stages))
    misplaced = [*_misplaced("input", inputs, home)]
    if not spread:
        misplaced = [*_misplaced("parameter", parameters, home), *_misplaced("buffer", buffers, home), *misplaced]
    misplaced += _misplaced_states(optimizer, {id(x): name for name, x in parameters})
    copies, error = ((), None) if batch is None else _watch_copies(model, batch)
    rows = _device_uses({"parameters": parameters, "buffers": buffers, "inputs": inputs})
    findings = []
    for tensor in misplaced:
        text = f"the {tensor.kind} is on {tensor.device}, not on {tensor.expected}"
        findings.append((f"misplaced_{tensor.kind.replace(' ', '_')}", tensor.name, text))
    for row in copies:
        text = f"it copies {size(row.size_bytes)} from {row.source} to {row.target} in {row.count} calls"
        text += ", and the host waits for it" * row.waits + (f" at {row.location}" if row.location else "")
        findings.append(("silent_copy", row.operator, text))
    findings += [("forward_error", type(model).__name__, f"the forward pass raised {error}")] if error else []
    problems = record_findings("check_devices", findings)
    return DeviceCheck(type(model).__name__, home, spread, rows, tuple(misplaced), copies, error, problems)


def _main_device(tensors: list[Any]) -> str:
    sizes: Counter[str] = Counter()
    for x in tensors:
        sizes[str(x.device)] += bytes_of(x) + 1
    return sizes.most_common(1)[0][0] if sizes else "cpu"


def _misplaced(kind: str, named: Iterable[tuple[str, Any]], home: str) -> list[Misplaced]:
    return [Misplaced(kind, name, str(x.device), home) for name, x in named if str(x.device) != home]


def _misplaced_states(optimizer: Any, names: dict[int, str]) -> list[Misplaced]:
    """Return state that is not where its parameter is; a step count, which has no dimension, belongs on the CPU."""
    rows = []
    for parameter, state in optimizer.state.items() if optimizer is not None else ():
        for key, x in state.items():
            if getattr(x, "dim", int)() and str(x.device) != str(parameter.device):
                name = f"{names.get(id(parameter), 'parameter')}.{key}"
                rows.append(Misplaced("optimizer state", name, str(x.device), str(parameter.device)))
    return rows


def _device_uses(groups: dict[str, list[tuple[str, Any]]]) -> tuple[DeviceUse, ...]:
    counts: dict[str, Counter[str]] = {}
    for group, named in groups.items():
        for _, x in named:
            row = counts.setdefault(str(x.device), Counter())
            row[group], row["size"] = row[group] + 1, row["size"] + bytes_of(x)
    return tuple(DeviceUse(name, r["parameters"], r["buffers"], r["inputs"], r["size"]) for name, r in counts.items())


def _watch_copies(model: Any, batch: Any) -> tuple[tuple[SilentCopy, ...], str | None]:
    from torchobs.debug.operator_watch import TransferWatch

    watch, error = TransferWatch(), None
    for needs_grad in (False, True):  # a forward pass may take derivatives: of a physics-informed network, of an energy
        watch.counts.clear()
        with state_kept(model), torch.set_grad_enabled(needs_grad), watch:
            error = raised_by(model, batch)
        if error is None or not wants_gradients(error):
            break
    rows = [SilentCopy(*key[:3], count, copied, *key[3:]) for key, (count, copied) in watch.counts.items()]
    return tuple(sorted(rows, key=lambda row: -row.size_bytes)), error
