"""The error of ``init(raise_on={"nonfinite"})``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchobs.probes.nonfinite.origin import NonfiniteOrigin


class NonFiniteError(FloatingPointError):
    """A loss or a gradient is not finite. ``origin``: where it was born, if that was found."""

    def __init__(self, what: str, origin: NonfiniteOrigin | None) -> None:
        super().__init__(what if origin is None else f"{what} {origin.sentence()}")
        self.origin = origin
