from collections.abc import Callable, Iterator, Sequence
from typing import Any

INTERFACE: int

class Map:
    def __init__(self, anchor: object, address: int, size: int) -> None: ...

class PlainSteps:
    def __init__(
        self, map_type: type[Map], sequence: Iterator[int], memory: object, recent: object, force: Callable[[], object],
        reference: Callable[..., bool], offset: int, mask: int, forced_at: int, seed: int,
    ) -> None: ...  # fmt: skip
    def append_plain(
        self, boundaries: Sequence[int], step: int, end_ns: int, begun_ns: int, flags: int, losses: int, loss: float,
        grad_norm: float, learning_rate: float, tokens: int, samples: int, norm_scale: float, /,
    ) -> bool: ...  # fmt: skip

class PlainLoss:
    def __init__(self, owners: tuple[object, ...], held: tuple[object, ...]) -> None: ...
    def take(self, tensors: object, gradients: object, accumulates: bool, /) -> None: ...

class PlainBackward:
    def __init__(self, owners: tuple[object, ...], held: tuple[object, ...]) -> None: ...
    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Any: ...

class PlainFetch:
    def __init__(self, owners: tuple[object, ...], held: tuple[object, ...]) -> None: ...
    def run(self, iterator: object, /) -> Any: ...

class PlainOptimizerStep:
    def __init__(self, owners: tuple[object, ...], held: tuple[object, ...]) -> None: ...
    def before(self, optimizer: object, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Any: ...
    def after(self, optimizer: object, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> None: ...
