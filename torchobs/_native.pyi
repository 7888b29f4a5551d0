from collections.abc import Callable, Iterator, Sequence

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

def stamp(trace: list[int], code: int, /) -> None: ...
