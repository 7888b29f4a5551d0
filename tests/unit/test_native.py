"""The compiled part: its hooks and its steps do what Python's do."""

from __future__ import annotations

import gc
import math
import struct
import sys
import weakref
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as some

from tests import flights
from tests.step_hooks import OPTIMIZERS, STATE, Loss, perform, ready
from tests.support import NEEDS_COMPILER
from torchobs.flight.layout import Region
from torchobs.flight.native import compiled
from torchobs.flight.step_record import NO_FETCH, PLAIN_CODES, unpack
from torchobs.flight.storage import Storage
from torchobs.flight.writer import FlightWriter
from torchobs.probes.step_recorder import METER_EVERY
from torchobs.probes.timeline import LONG_TRACE

NATIVE: Any = compiled()
pytestmark = pytest.mark.skipif(NATIVE is None, reason=NEEDS_COMPILER)
ALL: tuple[tuple[Any, ...], ...] = (
    ("fetch", None),
    ("backward", [Loss(0.5), None], None),
    *((hook, OPTIMIZERS[0], (OPTIMIZERS[0],), {}) for hook in ("before", "after")),
)
"""A plain step"""
odd: Any = some.sampled_from(
    [0, 1, 2, -1, True, False, None, 0.5, math.nan, math.inf, 3.5e38, 65536, 1 << 32, (1 << 64) - 1, 1 << 64, 1 << 200, "1", []]
)
numbers: Any = some.one_of(some.floats(), odd, some.just(RuntimeError("of two elements")), some.just(ValueError("of ours")))
losses: Any = some.one_of(some.builds(Loss, numbers), some.builds(Loss, numbers, is_cpu=odd), odd)
acts = some.one_of(
    some.tuples(some.just("set"), some.sampled_from(STATE), odd),
    some.tuples(some.just("fetch"), some.sampled_from([None, StopIteration(), KeyError()])),
    some.tuples(some.just("backward"), some.lists(losses, max_size=2), some.sampled_from([None, None, KeyError()])),
    some.tuples(some.just("take_loss"), losses, odd, odd),
    some.tuples(
        some.sampled_from(["before", "after"]),
        some.sampled_from(OPTIMIZERS),
        some.lists(odd, max_size=3).map(tuple),
        some.dictionaries(some.just("closure"), odd, max_size=1),
    ),
    some.tuples(some.just("plain"), some.floats()),
)


@given(some.sampled_from(OPTIMIZERS), some.lists(acts, max_size=8))
@example(OPTIMIZERS[0], [("plain", 0.5)] * (METER_EVERY + 3))
@example(OPTIMIZERS[0], [("lengthen", LONG_TRACE - 1), *[("fetch", None)] * 3])
def test_both_leave_the_same_in_any_state(optimizer: Any, done: list[tuple[Any, ...]]) -> None:
    """Odd values in every attribute that the hooks read, odd arguments, exceptions of the user's and of ours."""
    both = [ready(native=native, optimizer=optimizer) for native in (False, True)]
    for act in [*done, ("plain", 0.25)]:
        python, native = (perform(hooks, optimizer, *act) for hooks in both)
        assert repr(native) == repr(python), act  # NaN is not equal to itself
        assert both[1].state() == both[0].state(), act


def test_a_plain_step_is_recorded_without_the_hooks_in_python() -> None:
    """Else the test above compares them with themselves."""
    hooks, called = ready(native=True), list[str]()
    gc.disable()  # hypothesis is called by collections
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        hooks.plain(OPTIMIZERS[0], 0.75)
    finally:
        sys.setprofile(None)
        gc.enable()
    around = {"plain", "<lambda>", "act", "_act", "_act_given", "__init__", "item"}
    assert [name for name in called if name not in around] == ["watched", "backward", "call_before", "call_after"]
    assert hooks.recorder.step == 3


def _interrupted(error: BaseException) -> Loss:
    """Return a loss that can be read the second time only: the first is interrupted, as by a signal handler that raises."""

    def item() -> float:
        tensor.item = lambda: 0.5  # type: ignore[method-assign]
        raise error

    tensor = Loss(0.5)
    tensor.item = item  # type: ignore[method-assign]
    return tensor


@pytest.mark.parametrize("error", [RuntimeError("DataLoader worker is killed by signal"), KeyboardInterrupt(), MemoryError()])
def test_what_a_signal_handler_raises_is_not_lost(error: BaseException) -> None:
    """A loss is read once: the second time it would succeed, and the exception be gone."""
    found = []
    for native in (False, True):
        hooks = ready(native=native)
        try:
            hooks.take_loss(_interrupted(error), None, True)  # noqa: FBT003  # a listener
            raised = None
        except BaseException as seen:  # noqa: BLE001  # whichever
            raised = type(seen)
        found.append((raised, hooks.breaker.errors, hooks.state()))
    assert found[0] == found[1]
    assert found[1][0] is not None or found[1][1]


class _Odd(float):
    """A number of a tensor subclass, with an addition of its own in which the step's values are others."""

    hooks: Any = None

    def __radd__(self, other: float) -> float:
        self.hooks.recorder.values = type(self.hooks.recorder.values)()
        gc.collect()
        return other + float(self)


@pytest.mark.parametrize("where", ["loss", "sum"])
def test_values_that_are_replaced_meanwhile_are_not_written_to_once_freed(where: str) -> None:
    """As the sanitizers would say."""
    found = []
    for native in (False, True):
        hooks = ready(native=native)
        odd = _Odd(0.5)
        odd.hooks = hooks
        if where == "sum":
            hooks.recorder.values.loss_sum = odd
        hooks.take_loss(Loss(odd if where == "loss" else 0.5), None, True)  # noqa: FBT003  # a listener
        found.append(hooks.state()[:2])
    assert found[0] == found[1]


def test_hooks_are_freed() -> None:
    """They refer to the probes, and what the probes install refers to them: the garbage collector sees it."""
    hooks = ready(native=True)
    known = weakref.ref(hooks)
    hooks.recorder.arguments.append(hooks)  # type: ignore[arg-type]  # which each hook holds, and this each hook
    del hooks
    gc.collect()
    assert known() is None


HEADER = flights.header(4)
EDGES = [bits + step for width in (16, 32, 64) for bits in (1 << width,) for step in (-2, -1, 0, 1)]

counts = some.one_of(some.integers(0, 1 << 20), some.sampled_from([-1, *EDGES]), some.booleans(), some.floats())
values = some.one_of(some.floats(), some.integers(-(1 << 1100), 1 << 1100), some.sampled_from([3.5e38, 1e39, -1e39, None, "1"]))
stamps = some.one_of(
    some.builds(
        lambda codes, times: [at << 4 | code for at, code in zip(times, codes, strict=False)],
        some.sampled_from([PLAIN_CODES, PLAIN_CODES[2:], NO_FETCH, (0, 2, 5, 6, 7), (0, 1, 5, 6, 7, 7)]),
        some.lists(some.integers(0, 1 << 61), min_size=6, max_size=6),
    ),
    some.lists(some.one_of(counts, some.none()), max_size=6),
    some.just(()),
)
plain = some.lists(some.integers(0, 1 << 59), min_size=5, max_size=5).map(
    lambda times: [at << 4 | code for at, code in zip(times, PLAIN_CODES, strict=True)]
)
u16, u32, u64 = (some.integers(0, (1 << width) - 1) for width in (16, 32, 64))
steps = some.one_of(
    some.tuples(stamps, *[counts] * 5, *[values] * 3, *[counts] * 2, values),
    some.tuples(plain, u64, u64, u64, u16, u32, *[some.floats()] * 3, u64, u32, values),
)


def pair() -> tuple[FlightWriter, FlightWriter]:
    """Two writers of one file's header, the first without the compiled part; the map of each is bytes."""
    made = [FlightWriter(HEADER, Storage(memoryview(bytearray(HEADER.file_size))), native=native) for native in (False, True)]
    return made[0], made[1]


def ring(writer: FlightWriter) -> bytes:
    """The step ring's bytes."""
    region = HEADER.regions[Region.STEPS]
    return writer.memory.snapshot()[region.offset : region.offset + region.length]


def outcome(writer: FlightWriter, step: tuple[Any, ...]) -> object:
    """What the writer returns, or the error that it raises."""
    try:
        return writer.append_plain(*step)
    except Exception as error:  # noqa: BLE001  # whichever: it has to be the same
        return type(error), str(error)


@given(some.lists(steps, max_size=8))
def test_both_leave_the_same_bytes_on_any_input(given_steps: list[tuple[Any, ...]]) -> None:
    """Values that no field holds, others' types, boundaries of any kind: the answer, the ring, and what the fold is given."""
    python, native = pair()
    for step in given_steps:
        assert outcome(native, step) == outcome(python, step)
        assert ring(native) == ring(python)
    assert list(native._recent) == list(python._recent)
    assert next(native._sequence) == next(python._sequence), "the next number"


@given(some.floats(), some.floats(width=32), some.integers(0, (1 << 60) - 1))
def test_any_value_that_its_fields_hold_is_read_back(loss: float, scale: float, at_ns: int) -> None:
    """With the CRC that ``zlib`` computes, without going through Python."""
    _, writer = pair()
    boundaries = [at_ns << 4 | code for code in PLAIN_CODES]
    assert writer.append_plain(boundaries, 1, at_ns, at_ns, 3, 1, loss, 0.5, 0.25, 7, 8, scale)
    made = unpack(writer._recent[0], HEADER.seed)
    assert made is not None
    assert struct.pack("<d", made.loss) == struct.pack("<d", loss)
    assert (made.seq, made.end_ns, made.tokens, made.samples) == (1, at_ns, 7, 8)
