"""Recording and its probes are switched off and on while training runs."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import torch

import torchobs
from tests import support
from tests.surface import torch_hooks
from tests.training import Recording, StepFlag, has, mlp, recording, train
from torchobs.config.settings import PROBES
from torchobs.flight.files import control

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@contextlib.contextmanager
def commanding(run: Recording, flight_dir: Path) -> Iterator[Callable[[control.Command], None]]:
    """Yield what gives the rank a command and waits until it has been read."""
    writer = run.session.writer
    assert writer is not None
    (flight_dir / "control").mkdir()
    directory = os.open(flight_dir / "control", os.O_RDONLY)
    reader = control.ControlReader(str(flight_dir / "control"), writer.header.incarnation)

    def give(command: control.Command) -> None:
        control.write_command(directory, writer.header.incarnation, command)
        assert run.session.context is not None
        assert reader.poll() is not None
        for _ in range(2):  # the round under way may have looked before
            beat = run.view().live.heartbeat_ns
            support.wait_until(lambda beat=beat: run.view().live.heartbeat_ns != beat)  # type: ignore[misc]

    try:
        yield give
    finally:
        os.close(directory)
        reader.close()


def test_the_control_file_switches_recording_off_and_on(flight_dir: Path) -> None:
    """Off leaves no hook, the heartbeat goes on. On again: the first step has no duration, the others have."""
    before = torch_hooks()
    for run in recording(flight_dir):
        with commanding(run, flight_dir) as give:
            train(3)
            give(control.Command(level=0))
            train(4)
            assert run.view().live.level == 0
            assert torch_hooks() == before
            torchobs.log(loss=1.0, tokens=3)
            torchobs.step()
            assert len(run.steps()) == 3
            give(control.Command(level=1))
            train(5)
            assert len(run.steps()) == 3 + 5
        assert [has(record, StepFlag.UNTIMED) for record in run.steps()[3:]] == [True, False, False, False, False]
        assert run.values()[("torchobs.tokens",)] == 0


def test_a_single_probe_is_switched_off_and_on(flight_dir: Path) -> None:
    """The others go on."""
    for run in recording(flight_dir):
        with commanding(run, flight_dir) as give:
            train(3)
            give(control.Command(probes_off=1 << PROBES.index("loss")))
            train(3)
            give(control.Command(probes_off=0))
            train(3)
        assert [has(record, StepFlag.LOSS) for record in run.steps()] == [True] * 3 + [False] * 3 + [True] * 3
        assert all(has(record, StepFlag.GRAD_NORM) for record in run.steps())


def test_what_a_probe_has_counted_is_kept_when_it_is_switched_off(flight_dir: Path) -> None:
    """Steps of a scheduler in the tenth of a second before count; those without the probe do not."""
    for run in recording(flight_dir):
        with commanding(run, flight_dir) as give:
            optimizer = torch.optim.SGD(mlp().parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            for probes_off in (1 << PROBES.index("schedulers"), 0):
                optimizer.step()
                for _ in range(4):
                    scheduler.step()
                give(control.Command(probes_off=probes_off))
        assert run.values()[("torchobs.scheduler.steps",)] == 4


def test_a_rank_that_starts_off_can_be_switched_on(flight_dir: Path) -> None:
    """It has a file and a heartbeat, and no hook until then."""
    before = torch_hooks()
    for run in recording(flight_dir, level="off"):
        with commanding(run, flight_dir) as give:
            train(3)
            assert torch_hooks() == before
            give(control.Command(level=1))
            train(3)
            assert len(run.steps()) == 3


def test_a_rank_says_whether_it_records_steps(flight_dir: Path) -> None:
    """So that the exporter calls no rank hung whose steps nobody counts: by the level, or by the probe alone."""
    for run in recording(flight_dir, level="off"):
        assert run.view().live.steps_since_ns is None
        with commanding(run, flight_dir) as give:
            give(control.Command(level=1))
            train(3)
            since_ns = run.view().live.steps_since_ns
            assert since_ns
            assert run.view().header.monotonic_ns < since_ns
            give(control.Command(probes_off=1 << PROBES.index("loss")))
            assert run.view().live.steps_since_ns == since_ns
            give(control.Command(probes_off=1 << PROBES.index("step")))
            assert run.view().live.steps_since_ns is None
    for run in recording(flight_dir):
        assert run.view().live.steps_since_ns == 0
