"""Floating-point operations of a training step, and how much of the device's peak they are. Pure.

A product of a weight matrix takes 2 operations for each weight and token in the forward pass, and twice as many in the backward
pass: 6 for each parameter and token (Kaplan et al., 2020, arXiv:2001.08361, section 2.1). A frozen weight has no gradient, but
the gradient of its input is computed where a trained layer lies before it (an adapter in every layer): 4.

The model FLOPs utilization is the number of these operations per second over the peak (PaLM: Chowdhery et al., 2022,
arXiv:2204.02311, appendix B), which counts no operation done twice (activation checkpointing). Left out are attention's
products of queries with keys and of weights with values, 12 x layers x width x sequence length for each token: PaLM has them,
a small part where the sequence is much shorter than six times the width.
"""

from __future__ import annotations

from typing import NamedTuple

TRAINED, FROZEN = 6, 4
"""Operations for each parameter and token"""


class Parameters(NamedTuple):
    """Elements of the parameters that are multiplied with every token, on this rank."""

    trained: float
    frozen: float


class Progress(NamedTuple):
    """Totals since the rank's start; the seconds are those of the steps that were timed."""

    steps: int
    tokens: int
    timed: int
    timed_s: float

    def since(self, before: Progress) -> Progress:
        """Return what was added since then."""
        return Progress(
            self.steps - before.steps, self.tokens - before.tokens, self.timed - before.timed, self.timed_s - before.timed_s
        )


def step_flops(parameters: Parameters, tokens: float) -> float:
    """Return the operations of a step with so many tokens."""
    return (TRAINED * parameters.trained + FROZEN * parameters.frozen) * tokens


def utilization(flops: float, step_s: float, peak: float) -> float | None:
    """Return the share of the peak, in operations per second; ``None`` if it cannot be: more than all of it.

    Such an estimate is of a model that does not use all parameters for every token (a mixture of experts).
    """
    share = flops / step_s / peak if step_s > 0 and peak > 0 else None
    return share if share is not None and 0 < share <= 1 else None
