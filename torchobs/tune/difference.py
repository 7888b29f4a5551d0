"""How far two outputs of a model are apart: what a faster way of computing costs in accuracy."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torchobs.support.result import Checked, Problem
from torchobs.tensors.batches import call, walk
from torchobs.tensors.losses import check_trained
from torchobs.tensors.running import evaluating, state_kept, wants_gradients

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

ROUNDINGS = 8
"""Accepted difference in roundings of the type: rounding errors of a chain of layers grow with the root of its length (Higham,
Accuracy and Stability of Numerical Algorithms, 2nd ed., section 2.8), so this allows for 64 layers."""
LEAST_TOLERANCE = 1e-4
"""For float32, where only the order of sums changes"""


@dataclass(frozen=True)
class Difference(Checked):
    """Difference of outputs to those of float32 eager execution, over all floating tensors of the outputs together."""

    relative: float
    """Euclidean norm of the difference, divided by that of the reference"""
    largest: float
    """largest absolute difference of an element"""
    finite: bool
    """True if all elements are finite, or the reference has some that are not"""
    tolerance: float
    """relative difference that is accepted"""

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Why it is refused: not finite, or beyond the tolerance."""
        if not self.finite:
            return (Problem("nonfinite", "", "the outputs are not finite"),)
        text = f"the outputs differ by {self.relative:.3g} (relative), and {self.tolerance:.3g} is accepted"
        return () if self.relative <= self.tolerance else (Problem("difference", "", text),)


class NumericalDifferenceError(RuntimeError):
    """Outputs of a plan differ from float32 eager execution by more than its tolerance; ``difference`` has the numbers."""

    def __init__(self, difference: Difference) -> None:
        self.difference = difference
        text = "; ".join(map(str, difference.problems))
        super().__init__(f"{text}. The plan is undone. Use a smaller level or mode, or pass a larger tolerance.")


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the accepted relative difference for ``dtype``: :data:`ROUNDINGS` of its roundings."""
    return max(LEAST_TOLERANCE, ROUNDINGS * torch.finfo(dtype).eps)


def outputs(model: nn.Module, batch: Any, *, gradients: bool | None = None) -> tuple[list[Tensor], bool]:
    """Return the floating tensors of the model's output for a batch, in evaluation mode, and whether gradients were on.

    By default they are on only if the forward pass takes derivatives (physics-informed networks, forces of an energy). Each
    call draws the same random numbers, for models that sample in evaluation mode; the caller's generators and the model's
    buffers do not change.

    Raises:
        ValueError: the model is on the device meta.
    """
    check_trained(model)
    with evaluating(model):
        if gradients is None:
            try:
                return _outputs(model, batch, gradients=False), False
            except RuntimeError as error:
                if not wants_gradients(str(error)):
                    raise
            gradients = True  # tried outside the handler: the error's frames keep the first pass's tensors
        return _outputs(model, batch, gradients=gradients), gradients


def _outputs(model: nn.Module, batch: Any, *, gradients: bool) -> list[Tensor]:
    with undisturbed(model), torch.set_grad_enabled(gradients):
        tensors = [tensor.detach() for _, tensor in walk(call(model, batch)) if tensor.is_floating_point()]
        return [tensor.to(torch.float64, copy=True) for tensor in tensors]  # one may be a buffer, which is put back


def compare(got: list[Tensor], reference: list[Tensor], tolerance: float) -> Difference:
    """Compare two results of :func:`outputs`.

    Raises:
        ValueError: there is no tensor, or they differ in number or shape of tensors.
    """
    if not reference:
        raise ValueError("the model's output has no floating tensor to compare; pass a batch for which it has one")
    if [tensor.shape for tensor in got] != [tensor.shape for tensor in reference]:
        raise ValueError("the two outputs have other shapes; is the model's output random in evaluation mode?")
    mine, theirs = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (got, reference))
    finite = bool((mine.isfinite() | ~theirs.isfinite()).all())
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())  # infinities of a mask have no difference
    difference = torch.where(same, 0.0, mine - theirs)
    norm = float(torch.where(theirs.isfinite(), theirs, 0.0).norm())
    return Difference(
        relative=float(difference.norm()) / norm if norm else float(difference.norm()),
        largest=float(difference.abs().max()) if difference.numel() else 0.0,
        finite=finite,
        tolerance=tolerance,
    )


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Draw the same random numbers in each block, and put generators and buffers (statistics, caches) back after it."""
    with state_kept(model):
        torch.default_generator.manual_seed(0)
        for index in {tensor.device.index or 0 for tensor in model.parameters() if tensor.is_cuda}:
            torch.cuda.default_generators[index].manual_seed(0)
        yield
