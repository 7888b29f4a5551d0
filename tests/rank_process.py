"""A rank as a process of its own, for tests that stop and kill it: `python -m tests.rank_process DIRECTORY [RANK]`.

It takes ten steps a second and prints each one's number once it is in the file.
"""

import sys
import time
from itertools import count
from pathlib import Path

from tests.rank_files import live_rank, train

if __name__ == "__main__":
    writer = live_rank(Path(sys.argv[1]), rank=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    for step in count(1):
        train(writer, [step])
        sys.stdout.write(f"{step}\n")
        sys.stdout.flush()
        time.sleep(0.1)
