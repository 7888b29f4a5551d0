"""Fill a small tmpfs and print what a session says of it: `python -m tests.shared_memory FLIGHT_DIRECTORY TMPFS`.

A JSON list of `[size, used, events]`, one for each filling.
"""

import json
import sys
from pathlib import Path

import torchobs
from tests.training import Recording
from torchobs import catalog
from torchobs.flight import reader
from torchobs.probes.process_memory import MemoryProbe

MIB = 1024**2

if __name__ == "__main__":
    session = torchobs.init(flight_dir=sys.argv[1], disable_probes="memory")
    writer, context, told = session.writer, session.context, []
    assert writer is not None
    assert context is not None
    probe = MemoryProbe(shared=sys.argv[2])
    probe.install(context)
    for filled in (0.0, 3.0, 3.75, 3.875, 3.5, 2.0, 3.75):
        (Path(sys.argv[2]) / "x").write_bytes(bytes(int(filled * MIB)))
        probe.observe()
        writer.publish()
        values = Recording(session).values()
        file = reader.open_path(writer.path)
        events = [1 for _, fields in file.events() if fields.get("name") == catalog.EVENT_SHARED_MEMORY_FULL.name]
        file.close()
        told.append((values[catalog.MEMORY_SHARED_SIZE.name,], values[catalog.MEMORY_SHARED_USED.name,], len(events)))
    sys.stdout.write(json.dumps(told))
