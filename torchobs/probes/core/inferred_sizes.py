"""Tokens and samples of a step that are inferred from its batches, until the script gives them to ``torchobs.log``."""

from __future__ import annotations

from itertools import islice

MOST_LOADERS = 16
"""Loaders whose sizes are kept, the last ones: some loops make a new one for every epoch"""
_SEVERAL = 2
"""An amount of more than this many steps is that of all steps so far: a script that logs every tenth step"""


class GivenSizes:
    """Which sizes the script gives to ``torchobs.log``: from the first time on they are not inferred."""

    __slots__ = ("samples", "tokens")

    def __init__(self) -> None:
        self.tokens = self.samples = False

    @property
    def all(self) -> bool:
        """Whether none is left to infer."""
        return self.tokens and self.samples

    def left(self, tokens: int, samples: int) -> tuple[int, int]:
        """Return the sizes without those that are given."""
        return 0 if self.tokens else tokens, 0 if self.samples else samples


def with_sizes(known: dict[int, tuple[int, int]], loader: int, sizes: tuple[int, int]) -> dict[int, tuple[int, int]]:
    """Return the sizes by loader with this loader's, as a new dictionary: the training thread reads the old one."""
    others = {key: value for key, value in known.items() if key != loader}
    if not any(sizes):
        return others
    return dict(islice(others.items(), max(0, len(others) + 1 - MOST_LOADERS), None)) | {loader: sizes}


def uncounted(amount: int, counted: int, steps: int, *, ended: bool) -> int:
    """Return what of the first amount that a script gives has not been inferred before.

    It is that of one step, the one in progress or (``ended``) the last, or of all ``steps`` so far, in which ``counted`` were
    inferred: the latter if it is much more than a mean step's.
    """
    mean = counted / max(1, steps)
    before = counted if amount > _SEVERAL * mean else round(mean) if ended else 0
    return max(0, amount - before)
