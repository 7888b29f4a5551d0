"""What a benchmark of modes measured: data that prints as a table, becomes JSON or a picture, and says which mode to use."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchobs.support.result import Result
from torchobs.tune.quartiles import Quartiles

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence


@dataclass(frozen=True)
class ModeResult(Result):
    """One mode's measurements. Times are of one step, in seconds."""

    mode: str
    used: tuple[str, ...]
    """techniques that really ran"""
    step_s: Quartiles
    speedup_factor: Quartiles
    """first mode's time by this one's, of the same round"""
    first_step_s: float
    """the first step, compilation included; no other figure has it"""
    peak_bytes: int | None
    """most bytes allocated during one step, beyond those before it; None where torch does not tell"""
    memory_savings: float | None
    """share of the first mode's peak that this one does without; negative if it needs more"""
    difference: float | None
    """relative difference of outputs to float32 eager; None if the output has no floating tensor"""
    accepted: bool
    """the difference is within the plan's tolerance"""

    @property
    def is_noise(self) -> bool:
        """Return whether 1 lies between the quartiles of the speed-up: faster in some rounds, slower in others."""
        return self.speedup_factor.low <= 1.0 <= self.speedup_factor.high


@dataclass(frozen=True)
class LeftOut(Result):
    """A mode that was not measured to the end."""

    mode: str
    reason: str


@dataclass(frozen=True)
class Benchmark(Result):
    """Modes compared, and which to use."""

    device: str
    rounds: int
    recommended: str
    reason: str
    modes: tuple[ModeResult, ...]
    left_out: tuple[LeftOut, ...] = ()

    def __getitem__(self, mode: str) -> ModeResult:
        """Return a mode's measurements."""
        found = next((each for each in self.modes if each.mode == mode), None)
        if found is None:
            raise KeyError(f"{mode!r} was not measured; these were: {', '.join(each.mode for each in self.modes)}")
        return found

    def to_json(self) -> str:
        """Return all of it as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def plot(self, path: str | os.PathLike[str]) -> str:
        """Draw speed-ups with their quartiles, and memory, into a ``.png``, ``.svg`` or ``.pdf``; return the file's name.

        Raises:
            ImportError: matplotlib is missing: ``pip install 'torchobs[report]'``.
            OSError: the file cannot be written.
            ValueError: another ending.
        """
        try:
            from torchobs.tune import picture
        except ModuleNotFoundError as missing:
            raise ImportError(f"{missing.name} is missing: pip install 'torchobs[report]'") from None
        names, speedups = [each.mode for each in self.modes], [each.speedup_factor for each in self.modes]
        return str(picture.draw(names, speedups, [each.peak_bytes for each in self.modes], path))


def recommend(modes: Sequence[ModeResult]) -> tuple[str, str]:
    """Return the mode to use, and why: the fastest of those that gain beyond noise with outputs within the tolerance."""
    base, *others = modes
    better = [each for each in others if each.accepted and each.speedup_factor.low > 1.0]
    if better:
        best = max(better, key=lambda each: each.speedup_factor.median)
        return best.mode, f"{best.speedup_factor} times as fast as {base.mode}"
    refused = [each.mode for each in others if not each.accepted and each.speedup_factor.low > 1.0]
    if refused:
        return base.mode, f"{', '.join(refused)}: faster, but with outputs too far from float32"
    noise = [each.mode for each in others if each.is_noise]
    if noise:
        return base.mode, f"{', '.join(noise)}: the difference is within the noise"
    return base.mode, "no other mode is faster"
