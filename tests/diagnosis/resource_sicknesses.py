"""A slower phase, late batches and a memory leak: minutes of a run's life, told by a clock that the test moves."""

from __future__ import annotations

import ctypes
import math
import random
import sys
from collections.abc import Callable

import torch

from tests.diagnosis.observing import Look, observe
from tests.diagnosis.planting import Verdict, notes
from tests.diagnosis.random_trainings import Setup, build
from torchobs import catalog


def slowdown(setup: Setup, chance: random.Random) -> Verdict:
    """From some step on a phase of the step takes two and a half to six times as long as the whole step before."""
    training, at = build(setup), chance.randrange(200, 300)
    usual, factor, phase = 10 ** chance.uniform(-0.6, 0.3), chance.uniform(1.5, 5), chance.choice(("forward", "backward"))
    noise = chance.uniform(0.02, 0.3)

    def train(look: Look) -> None:
        clock, main = look.clock, training.losses[training.main]
        assert clock is not None
        slow = [False]

        def loss(x: torch.Tensor) -> torch.Tensor:
            result = main(x)
            clock.sleep(usual * chance.lognormvariate(0.0, noise))
            if slow[0] and phase == "forward":
                clock.sleep(usual * factor * chance.lognormvariate(0.0, noise))
            if slow[0] and phase == "backward":
                result.register_hook(lambda _: clock.sleep(usual * factor))  # type: ignore[no-untyped-call]
            return result

        training.losses[training.main] = loss
        for number in range(1, at + max(int(0.7 * at / (1 + factor)), math.ceil(12 / usual / (1 + factor)))):
            slow[0] = number >= at
            training.step()
            look.stepped()

    observed = observe(train, fed=True)
    text = observed.text("slowdown")
    last = observed.reports[0].last_step
    began = last + 1 - int(text.split(" steps")[0].rsplit(" ", 1)[1].replace(",", "")) if text else None
    # a single step without a fetch has no forward phase: what lies before its backward pass is called between
    named = phase in text or (phase == "forward" and "the phase between" in text)
    return Verdict("slowdown" in observed.kinds(), named, None, f"{phase} {at} {began} {text} {notes(observed)}")


class _Slow(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, fetch: Callable[[int], torch.Tensor], size: int) -> None:
        self.fetch, self.size = fetch, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.fetch(index)


def starvation(setup: Setup, chance: random.Random) -> Verdict:
    """From some step on a batch takes a third of the time of the step, up to five times as long."""
    training, at, usual = build(setup), chance.randrange(1, 120), 10 ** chance.uniform(-0.6, 0.3)
    share = chance.uniform(0.4, 5.0)
    steps = at + 2 * int(60 / usual / (1 + share)) + 60

    def train(look: Look) -> None:
        clock, main = look.clock, training.losses[training.main]
        assert clock is not None

        def fetch(index: int) -> torch.Tensor:
            clock.sleep(usual * share if index + 1 >= at else usual * 0.001)
            return training.make_batch()

        def loss(x: torch.Tensor) -> torch.Tensor:
            clock.sleep(usual)
            return main(x)

        training.losses[training.main] = loss
        for batch in torch.utils.data.DataLoader(_Slow(fetch, steps), batch_size=None):
            training.step(batch)
            look.stepped()

    observed = observe(train, fed=True)
    facts = observed.events(catalog.EVENT_STARVED)
    note = f"{usual:.2f} {share:.2f} {notes(observed)}"
    return Verdict(bool(facts), None, (facts[0].step or 0) - at if facts else None, note)


def leak(setup: Setup, chance: random.Random) -> Verdict:
    """Every step keeps memory, and what is left lasts for minutes or hours."""
    from torchobs.probes.process_memory import Machine, MemoryLimits, MemoryProbe

    training, at = build(setup), chance.randrange(1, 60)
    size, step_s, hours = int(2 ** chance.uniform(18, 20)), 10 ** chance.uniform(-0.5, 0), 10 ** chance.uniform(-1, 0.2)
    left = size / step_s * 3600 * hours
    steps = at + int(300 / step_s)
    kept: list[bytearray] = []
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # what an earlier run gave back to malloc would be taken again without growing

    def train(look: Look) -> None:
        clock = look.clock
        assert clock is not None
        assert look.session.context is not None
        probe = MemoryProbe(clock=clock.monotonic)
        probe.install(look.session.context)
        machine = Machine(int(2 * left), int(left), 0, 0)
        probe._limits = MemoryLimits(look.session.context.writer, lambda: machine, root="/nowhere")
        observed_s = read_s = clock.monotonic()
        for number in range(1, steps + 1):
            training.step()
            clock.sleep(step_s)
            if number >= at:
                kept.append(bytearray(b"x") * size)
            if clock.monotonic() - read_s >= 1.0:
                read_s = clock.monotonic()
                probe._read(thorough=False)
            if clock.monotonic() - observed_s >= 10.0:
                observed_s = clock.monotonic()
                probe.observe()

    observed = observe(train, fed=True, disable_probes="memory")
    kept.clear()
    facts = observed.events(catalog.EVENT_MEMORY_GROWTH)
    if not facts:
        return Verdict(found=False, note=f"{size / 1024:.0f} KiB {step_s:.2f} s {hours:.2f} h {notes(observed)}")
    per_step = facts[0].number("per_step") or 0.0
    note = f"{size} {per_step} {hours:.2f} h"
    return Verdict(found=True, culprit=math.isclose(per_step, size, rel_tol=0.3), steps=(facts[0].step or 0) - at, note=note)
