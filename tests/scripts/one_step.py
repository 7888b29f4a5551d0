"""Record a step and read it back: ``python - COMPILED``, in an environment that has torchobs and nothing else."""

from __future__ import annotations

import os
import sys
import tempfile

from torchobs.flight import reader
from torchobs.flight.directory import open_place
from torchobs.flight.native import compiled
from torchobs.flight.step_record import PLAIN_CODES
from torchobs.flight.writer import open_writer
from torchobs.probes.hot_path import plain_steps

with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
    writer = open_writer(open_place(folder, None), {"rank": 0})
    begun_ns = writer.header.monotonic_ns
    stamps = [begun_ns + 1000 * place << 4 | code for place, code in enumerate(PLAIN_CODES)]
    steps = plain_steps(writer)
    steps.clean, steps.timed, steps.expected, steps.begun_ns = True, True, [], begun_ns
    steps.flags, steps.losses, steps.loss_sum = 1, 1, 2.5
    steps.trace[:] = stamps
    steps.append(begun_ns + 9000)
    file = reader.open_path(writer.path)
    (record,) = file.steps()
    file.close()
    writer.close()
print("bare install, compiled:", compiled() is not None)
sys.exit((record.step, record.loss, str(compiled() is not None)) != (1, 2.5, sys.argv[1]))
