"""Whether what a sample shows may be an accident: for checks that look at some batches and speak of all."""

from __future__ import annotations

from math import exp, log

CHANCE = 0.01
"""Probability of an accident in random samples below which it is taken for none"""


def most_probability(successes: int, trials: int, chance: float) -> float:
    """Return an upper bound of the probability of so many successes or more (Hoeffding 1963, theorem 1, eq. 2.1).

    ``chance``: that of a success in a trial, above 0 and below 1; there is a trial.
    """
    share = successes / trials
    if share <= chance:
        return 1.0
    divergence = share * log(share / chance) + ((1 - share) * log((1 - share) / (1 - chance)) if share < 1 else 0.0)
    return exp(-trials * divergence)
