"""``PlainSteps`` and its compiled twin: whatever is called, in whatever state, both leave the same attributes and bytes."""

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
from tests.step_hooks import OPTIMIZERS, PUBLIC, Loss, StepHooks, perform, ready
from tests.support import NEEDS_COMPILER
from torchobs.flight.layout import Region
from torchobs.flight.native import compiled
from torchobs.flight.step_record import NO_FETCH, PLAIN_CODES, unpack
from torchobs.flight.storage import Storage
from torchobs.flight.writer import FlightWriter
from torchobs.probes.hot_path import METER_EVERY, PlainSteps, plain_steps
from torchobs.probes.timeline import EXHAUSTED, LONG_TRACE

NATIVE: Any = compiled()
pytestmark = pytest.mark.skipif(NATIVE is None, reason=NEEDS_COMPILER)
U64 = (1 << 64) - 1
EDGES = [0, 1, 2, *(bits + step for width in (16, 32) for bits in (1 << width,) for step in (-2, -1, 0, 1)), U64 - 1, U64]
wholes = some.one_of(some.integers(0, 1 << 20), some.sampled_from(EDGES))
norms = some.one_of(some.floats(0.0), some.just(math.nan))
odd: Any = some.sampled_from(
    [0, 1, 2, -1, True, False, None, 0.5, math.nan, math.inf, 3.5e38, 65536, 1 << 32, U64, 1 << 64, 1 << 200, "1", []]
)
WHOLES = ("step", "begun_ns", "called_ns", "flags", "losses", "tokens", "samples", "batch_tokens", "batch_samples")
YES_OR_NO = (
    "evaluated", "clean", "timed", "metered", "log_wins", "fetching", "backwards", "stepping", "in_closure", "in_pass",
    "step_breaker", "data_breaker", "loss_breaker", "gradients",
)  # fmt: skip
STATE: dict[str, Any] = {
    **dict.fromkeys(YES_OR_NO, some.booleans()),
    **dict.fromkeys(WHOLES, wholes),
    "losses": some.integers(0, 1 << 33),
    **dict.fromkeys(("loss_sum", "learning_rate", "norm_scale"), some.floats()),
    **dict.fromkeys(("norm_squared", "norm_base"), norms),
    "depth": some.integers(-1, 2),
    "due_at": some.sampled_from([0, 1, 2, 3, sys.maxsize]),
    "traced": some.integers(0, 2),
    "expected": some.sampled_from([None, [], [id(OPTIMIZERS[0])], [1, 2]]),
    "scaled": some.sampled_from([None, 1]),
    "thread": some.just(1),
    **dict.fromkeys(["sole", "rated", "outer"], some.sampled_from([0, *map(id, OPTIMIZERS)])),
}
"""What the twins' attributes may be, and those of what they ask"""
numbers: Any = some.one_of(some.floats(), odd, some.just(RuntimeError("of two elements")), some.just(ValueError("of ours")))
losses: Any = some.one_of(some.builds(Loss, numbers), some.builds(Loss, numbers, is_cpu=odd), odd)
boundaries = some.one_of(
    some.builds(
        lambda codes, times: [at << 4 | code for at, code in zip(times, codes, strict=False)],
        some.sampled_from([PLAIN_CODES, PLAIN_CODES[2:], NO_FETCH, (0, 2, 5, 6, 7), (0, 1, 5, 6, 7, 7)]),
        some.lists(some.integers(0, 1 << 59), min_size=6, max_size=6),
    ),
    some.lists(wholes, max_size=6),
)
acts = some.one_of(
    some.sampled_from(sorted(STATE)).flatmap(lambda name: some.tuples(some.just("set"), some.just(name), STATE[name])),
    some.tuples(some.just("fetch"), some.sampled_from([None, *OPTIMIZERS[:2]]), some.sampled_from([None, StopIteration()])),
    some.tuples(some.just("backward"), some.lists(losses, max_size=3), some.sampled_from([None, None, KeyError()])),
    some.tuples(
        some.sampled_from(["before_step", "after_step"]),
        some.sampled_from(OPTIMIZERS),
        some.lists(odd, max_size=3).map(tuple),
        some.dictionaries(some.just("closure"), odd, max_size=1),
    ),
    some.tuples(some.just("boundaries"), boundaries),
    some.tuples(some.just("append"), some.integers(0, 1 << 59)),
    some.tuples(some.just("plain"), some.floats()),
)


def test_both_have_the_same_attributes_and_begin_alike() -> None:
    """None is the one's alone, and what the one is new is what the other is."""
    python, native = PlainSteps(), NATIVE.PlainSteps()
    assert {name for name in vars(NATIVE.PlainSteps) if not name.startswith("_")} == {
        *PUBLIC, "fetch", "backward", "before_step", "after_step", "append",
    }  # fmt: skip
    assert {name: repr(getattr(native, name)) for name in PUBLIC} == {name: repr(getattr(python, name)) for name in PUBLIC}


@given(some.sampled_from(OPTIMIZERS), some.lists(acts, max_size=8))
@example(OPTIMIZERS[0], [("plain", 0.5)] * (METER_EVERY + 3))
@example(OPTIMIZERS[0], [("boundaries", [EXHAUSTED] * (LONG_TRACE - 1)), *[("fetch", OPTIMIZERS[0], None)] * 3])
def test_both_leave_the_same_in_any_state(optimizer: Any, sequence: list[tuple[Any, ...]]) -> None:
    """Odd arguments, exceptions of the user's and of ours, any values of the attributes; handed on is the same, too."""
    both = [ready(native=native, optimizer=optimizer) for native in (False, True)]
    for act in [*sequence, ("plain", 0.25)]:
        python, native = (perform(hooks, optimizer, *act) for hooks in both)
        assert repr(native) == repr(python), act  # NaN is not equal to itself
        assert both[1].state() == both[0].state(), act


@pytest.mark.parametrize("native", [False, True])
def test_a_plain_step_is_recorded_and_handed_to_nobody(native: bool) -> None:  # noqa: FBT001  # a case
    """Else the test above compares what is handed on."""
    hooks = ready(native=native)
    hooks.calls.clear()
    hooks.plain(OPTIMIZERS[0], 0.75)
    assert hooks.calls == [("listener", "Loss", "NoneType", "bool")]
    record = unpack(hooks.writer._recent[-1], hooks.writer.header.seed)
    assert record is not None
    assert (hooks.steps.step, record.step, record.loss, record.learning_rate) == (3, 3, 0.75, 0.1)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("error", [RuntimeError("DataLoader worker is killed by signal"), KeyboardInterrupt(), MemoryError()])
def test_what_a_signal_handler_raises_is_not_lost(error: BaseException, native: bool) -> None:  # noqa: FBT001  # a case
    """A loss is read once: the second time it would succeed, and the exception be gone."""
    hooks, raised_again = ready(native=native), list[object]()
    hooks.steps.loss_failed = lambda raised, _: raised_again.append(raised)
    try:
        hooks.backward(Loss(error), None)
    except KeyboardInterrupt as interrupt:
        raised_again.append(interrupt)
    assert raised_again == [error]
    assert ("take_loss", "Loss", "NoneType", "bool") not in hooks.calls


@pytest.mark.parametrize("native", [False, True])
def test_an_error_of_ours_opens_the_breaker_and_goes_no_further(native: bool) -> None:  # noqa: FBT001  # a case
    """In the end of a step, where no other guard is; a signal handler's goes on."""
    hooks = ready(native=native)

    def fail(_: int) -> None:
        raise ValueError

    hooks.steps.slow_end, hooks.steps.expected = fail, []
    hooks.plain(OPTIMIZERS[0])
    assert (hooks.breakers["step_breaker"].is_open, hooks.breakers["step_breaker"].errors) == (True, 1)


@pytest.mark.parametrize("native", [False, True])
def test_hooks_are_freed(native: bool) -> None:  # noqa: FBT001  # a case
    """They refer to the probes, and what the probes install refers to them: the garbage collector sees it."""
    hooks = StepHooks(native=native)
    reference = weakref.ref(hooks)
    hooks.steps.arguments.append(hooks)  # type: ignore[arg-type]
    del hooks
    gc.collect()
    assert reference() is None


HEADER = flights.header(4)


def ring(writer: FlightWriter) -> bytes:
    """The step ring's bytes."""
    region = HEADER.regions[Region.STEPS]
    return writer.memory.snapshot()[region.offset : region.offset + region.length]


def writers() -> list[FlightWriter]:
    """Two writers of one file's header, the first without the compiled part; the map of each is bytes."""
    return [FlightWriter(HEADER, Storage(memoryview(bytearray(HEADER.file_size))), native=native) for native in (False, True)]


VALUES = "loss_sum", "norm_squared", "learning_rate", "norm_scale"
steps = some.fixed_dictionaries(
    {
        **dict.fromkeys(WHOLES, wholes),
        **dict.fromkeys(VALUES, some.floats()),
        "norm_squared": norms,
        "trace": some.one_of(
            boundaries,
            some.lists(some.integers(0, 1 << 59), min_size=5, max_size=5).map(
                lambda times: [at << 4 | code for at, code in zip(times, PLAIN_CODES, strict=True)]
            ),
        ),
        "end_ns": wholes,
    }
)


@given(some.lists(steps, max_size=8))
def test_both_leave_the_same_bytes(sequence: list[dict[str, Any]]) -> None:
    """Values that no field holds, boundaries of any kind: the answer, the ring, what the fold is given, and the attributes."""
    both = writers()
    twins = [plain_steps(writer) for writer in both]
    for twin in twins:
        twin.clean, twin.timed, twin.expected = True, True, []
    for step in sequence:
        answers = []
        for twin in twins:
            twin.trace[:] = step["trace"]
            for name in (*WHOLES, *VALUES):
                setattr(twin, name, step[name])
            answers.append(twin.append(step["end_ns"]))
        assert answers[0] is answers[1]
        assert ring(both[1]) == ring(both[0])
        python, native = ({name: repr(getattr(twin, name)) for name in (*WHOLES, *VALUES, "trace")} for twin in twins)
        assert native == python
    assert list(both[1]._recent) == list(both[0]._recent)
    assert next(both[1]._sequence) == next(both[0]._sequence), "the next number"


@given(some.floats(), some.floats(width=32), some.integers(0, (1 << 60) - 1))
def test_any_value_that_its_fields_hold_is_read_back(loss: float, scale: float, at_ns: int) -> None:
    """With the CRC that ``zlib`` computes, without going through Python."""
    writer = writers()[1]
    twin = plain_steps(writer)
    twin.clean, twin.timed, twin.expected = True, True, []
    twin.trace[:] = [at_ns << 4 | code for code in PLAIN_CODES]
    twin.loss_sum, twin.norm_scale, twin.tokens, twin.samples = loss, scale, 7, 8
    assert twin.append(at_ns)
    record = unpack(writer._recent[0], HEADER.seed)
    assert record is not None
    assert struct.pack("<d", record.loss) == struct.pack("<d", loss)
    assert (record.seq, record.end_ns, record.tokens, record.samples) == (1, at_ns, 7, 8)
