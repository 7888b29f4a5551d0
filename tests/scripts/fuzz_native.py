"""Call the compiled part with anything, ``python fuzz_native.py MODULE CALLS SEED``: it does as the one in Python does.

For a module that is built with sanitizers, which end the process at the first fault.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from types import ModuleType
from typing import Any

from tests.step_hooks import OPTIMIZERS, STATE, Loss, owner_of, perform, ready
from torchobs.flight.files.create import new_header
from torchobs.flight.format.layout import MIN_SIZE
from torchobs.flight.format.step_record import PLAIN_CODES
from torchobs.flight.writer.native import compiled
from torchobs.flight.writer.storage import Storage
from torchobs.flight.writer.writer import FlightWriter

EDGES = (0, 1, 15, 16, (1 << 16) - 1, 1 << 16, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, (1 << 64) - 1, 1 << 64, -1, 1 << 200)
OTHERS: tuple[Any, ...] = (None, "1", b"", True, 0.5, float("nan"), float("inf"), -0.0, 3.4e38, 3.5e38, 1e308, (), [], object())


def loaded(path: str) -> ModuleType:
    """Import the module at that path."""
    spec = importlib.util.spec_from_file_location("torchobs._native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def anything(chance: random.Random) -> Any:
    """Return a number at the edge of a field, another one, or no number at all."""
    return chance.choice((chance.choice(EDGES), chance.choice(OTHERS), chance.random(), chance.getrandbits(70)))


def step(chance: random.Random) -> list[Any]:
    """Return the arguments of a plain step, some of them replaced by anything."""
    stamps: Any = [chance.getrandbits(60) << 4 | code for code in PLAIN_CODES][chance.choice((0, 0, 2, 1)) :]
    made = [stamps, *(chance.getrandbits(16) for _ in range(5)), *(chance.gauss(0, 1e6) for _ in range(3)), 1, 2, 1.0]
    for _ in range(chance.choice((0, 0, 1, 3))):
        made[chance.randrange(len(made))] = anything(chance)
    if chance.random() < 0.1 and isinstance(made[0], list) and made[0]:
        made[0][chance.randrange(len(made[0]))] = anything(chance)
    return made if chance.random() < 0.98 else made[: chance.randrange(13)]


def outcome(function: Any, arguments: list[Any]) -> object:
    """Return what the function returns, or its error."""
    try:
        return function(*arguments)
    except Exception as error:  # noqa: BLE001  # whichever
        return type(error), str(error)


def act(chance: random.Random) -> tuple[Any, ...]:
    """Return something to do to the hooks of a step: most often a plain step, or what one is made of."""
    odd = anything(chance)
    loss = chance.choice((0.5, 2, Loss(0.5), Loss(odd), Loss(RuntimeError()), Loss(OSError())))
    return chance.choice((
        ("plain", chance.choice((0.5, odd))),
        ("plain", 0.5),
        ("set", chance.choice(STATE), odd),
        ("fetch", chance.choice((0.5, odd))),
        ("backward", [loss, None, *OTHERS][: chance.choice((0, 1, 2, 2, 2, 5))], chance.choice((None, KeyError()))),
        ("take_loss", loss, chance.choice((None, 1)), odd),
        (
            chance.choice(("before", "after")),
            chance.choice(OPTIMIZERS),
            ((), (1,), (1, 2))[chance.randrange(3)],
            chance.choice(({}, {"closure": act})),
        ),
    ))  # fmt: skip


def compare_hooks(module: ModuleType, chance: random.Random, calls: int) -> int:
    """Compare so many calls of hooks, in states that grow odd until a new training begins; return the steps written."""
    written = 0
    for _ in range(calls // 8):
        optimizer = chance.choice(OPTIMIZERS)
        both = [ready(native=native, optimizer=optimizer) for native in (False, True)]
        for done in (act(chance) for _ in range(8)):
            one, other = (perform(hooks, optimizer, *done) for hooks in both)
            assert one == other, (done, one, other)
            assert both[0].state() == both[1].state(), done
        if chance.random() < 0.1:
            delattr(*owner_of(both[1], chance.choice(STATE)))
            perform(both[1], optimizer, "plain", 0.5)
        written += len(both[0].writer._recent)
        for name in ("Loss", "Backward", "Fetch", "OptimizerStep"):
            made = getattr(module, f"Plain{name}")
            outcome(made, [tuple(anything(chance) for _ in range(chance.choice((0, 3, 4, 7)))) for _ in range(2)])
    return written


def main(module: ModuleType, calls: int, seed: int) -> None:
    """Compare so many calls."""
    chance, header = random.Random(seed), new_header({"rank": 0}, MIN_SIZE)
    sys.modules["torchobs._native"] = module
    assert compiled() is module
    writers = [FlightWriter(header, Storage(memoryview(bytearray(MIN_SIZE))), native=native) for native in (False, True)]
    written = 0
    for call in range(calls):
        arguments = step(chance)
        one, other = (outcome(writer.append_plain, arguments) for writer in writers)
        assert one == other, (arguments, one, other)
        written += other is True
        if not call % 1000:
            assert writers[0].memory.snapshot()[4096 + 256 :] == writers[1].memory.snapshot()[4096 + 256 :]
            writers[1].detach()
            writers[0].detach()
        outcome(module.Map, [b"", anything(chance), anything(chance)])
        outcome(module.PlainSteps, [anything(chance) for _ in range(10)])
    assert written > calls // 5
    stepped = compare_hooks(module, chance, calls // 10)
    print(f"{calls} calls, {written} records, {stepped} by hooks")


if __name__ == "__main__":
    main(loaded(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
