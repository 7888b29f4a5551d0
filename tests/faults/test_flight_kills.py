"""SIGKILL at random moments: what a rank that is gone without a word leaves to be read."""

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import flights
from tests.faults.flight_victims import BUCKETS, HISTOGRAMS
from torchobs import catalog
from torchobs.flight.files.create import lock_name
from torchobs.flight.files.location import open_directory
from torchobs.flight.reader import reader

Kill = Callable[[str, float], tuple[reader.View, int]]


@pytest.fixture
def kill(start: Callable[..., subprocess.Popen[str]], flight_dir: Path) -> Kill:
    """Let a child of that role live for some seconds, kill it, and tell what it left and what it had acknowledged."""
    program = start(
        sys.executable, "-m", "tests.faults.flight_victims", flight_dir, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    directory_fd = open_directory(str(flight_dir))

    def one(role: str, life_s: float) -> tuple[reader.View, int]:
        assert program.stdin
        assert program.stdout
        program.stdin.write(f"{role} {life_s}\n")
        program.stdin.flush()
        name, acknowledged = program.stdout.readline().split()
        file = reader.open_file(directory_fd, name)
        view = file.read(final=True)
        file.close()
        (flight_dir / name).unlink()
        (flight_dir / lock_name(name)).unlink()
        return view, int(acknowledged)

    return one


@pytest.mark.long
def test_a_block_that_is_only_published_is_never_unreadable_and_never_mixed(kill: Kill, share_of: Callable[[int], int]) -> None:
    """400 kills of a process that only publishes 306 words: each time all words of one publication, the last acknowledged."""
    chance = random.Random(400)
    published, kills = 0, share_of(400)
    for _ in range(kills):
        view, acknowledged = kill("publish", chance.uniform(0.0, 0.003))
        shown = flights.values(view)
        one, other = (shown[metric.name, ()] for metric in HISTOGRAMS)
        number = sum(one.counts)
        assert number in {acknowledged, acknowledged + 1}
        assert one == other
        assert one.counts == tuple((number - rest) // BUCKETS + (rest > 0) for rest in range(BUCKETS))
        published += acknowledged
    assert published > kills


@pytest.mark.long
@pytest.mark.timeout(900)  # 10 s of work, but two thousand processes on a busy machine
def test_no_acknowledged_step_is_lost_in_a_thousand_kills(kill: Kill, share_of: Callable[[int], int]) -> None:
    """1,000 ranks killed at random moments, the sampler folding meanwhile: each step whose append returned counts, once."""
    chance = random.Random(1000)
    appended, kills = 0, share_of(1000)
    for _ in range(kills):
        view, acknowledged = kill("rank", chance.uniform(0.0, 0.003))
        steps = flights.whole(flights.value(view, catalog.STEPS))
        assert acknowledged <= steps <= acknowledged + 1
        assert flights.value(view, catalog.TOKENS) == 16 * steps
        assert flights.value(view, catalog.FLIGHT_DROPPED, what="record") == 0
        if steps:
            assert flights.value(view, catalog.LOSS) == steps / 64
        appended += acknowledged
    assert appended > kills
