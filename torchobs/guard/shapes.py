"""Shape patterns, in the notation of einops and jaxtyping: ``"batch 3 height width"``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_NAME = re.compile(r"\*?[A-Za-z_]\w*", re.ASCII)
_ANY = "_"
_ELLIPSIS = "..."


class ShapePattern(NamedTuple):
    """A parsed pattern: ``before`` and ``after`` stand around a part of any length, which ``rest`` names (``None``: none)."""

    text: str
    before: tuple[int | str, ...]
    rest: str | None
    after: tuple[int | str, ...]

    def mismatch(self, shape: Sequence[int], sizes: dict[str, object]) -> str | None:
        """Return why a shape does not match, or None if it does.

        Args:
            shape: the tensor's shape.
            sizes: sizes of the names seen so far, which other tensors of one check share; new names are added.
        """
        if self.rest is None and len(shape) == len(self.before):  # of most patterns; fast
            for wanted, size in zip(self.before, shape, strict=True):
                if wanted != size and (isinstance(wanted, int) or (wanted != _ANY and sizes.setdefault(wanted, size) != size)):
                    break
            else:
                return None
        least = len(self.before) + len(self.after)
        if len(shape) < least or (len(shape) > least and self.rest is None):
            return f"{len(shape)} dimensions where {least}{' or more' if self.rest is not None else ''} are expected"
        end = len(shape) - len(self.after)
        pairs = [*zip(self.before, shape, strict=False), *zip(self.after, shape[end:], strict=True)]
        for index, (wanted, size) in enumerate(pairs):
            position = index if index < len(self.before) else end + index - len(self.before)
            why = _size_mismatch(wanted, size, sizes)
            if why is not None:
                return f"dimension {position} is {size} where {why}"
        if self.rest is not None and self.rest not in {_ELLIPSIS, _ANY}:
            between = tuple(shape[len(self.before) : end])
            if sizes.setdefault(f"*{self.rest}", between) != between:
                return f"*{self.rest} is {between} where it was {sizes[f'*{self.rest}']}"
        return None


def parse(shape: str | Sequence[int | None]) -> ShapePattern:
    """Parse a pattern.

    Args:
        shape: words separated by spaces, one for each dimension: a number is an exact size, a name any size (but the same
            wherever the name occurs), ``_`` any size, ``...`` or ``*name`` any number of dimensions, once. ``""`` is a scalar.
            Or a sequence of sizes, where ``None`` is any size.

    Raises:
        ValueError: a word is none of these, or two of them may have any length.
    """
    if not isinstance(shape, (str, Sequence)):
        raise ValueError(f"shape {shape!r}: a pattern such as 'batch 3 height width', or a sequence of sizes")  # noqa: TRY004
    words = shape.split() if isinstance(shape, str) else [_ANY if size is None else str(size) for size in shape]
    parts: list[list[int | str]] = [[]]
    rest: str | None = None
    for word in words:
        if word == _ELLIPSIS or (word.startswith("*") and _NAME.fullmatch(word)):
            if rest is not None:
                raise ValueError(f"shape {' '.join(words)!r}: only one of its words may stand for any number of dimensions")
            rest = word.removeprefix("*")
            parts.append([])
        elif word.isdecimal() or _NAME.fullmatch(word):
            parts[-1].append(int(word) if word.isdecimal() else word)
        else:
            raise ValueError(f"shape {' '.join(words)!r}: {word!r} is no size, name, _, ... or *name")
    return ShapePattern(" ".join(words), tuple(parts[0]), rest, tuple(parts[1]) if rest is not None else ())


def _size_mismatch(wanted: int | str, size: int, sizes: dict[str, object]) -> str | None:
    if isinstance(wanted, int):
        return None if size == wanted else f"{wanted} is expected"
    if wanted != _ANY and sizes.setdefault(wanted, size) != size:
        return f"{wanted} was {sizes[wanted]} before"
    return None
