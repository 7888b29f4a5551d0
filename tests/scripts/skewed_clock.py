"""`skewed_clock.py SECONDS SCRIPT ARGUMENT...`: run a script with Python's wall clock ahead by so much, or behind.

The monotonic clock stays as it is, as on a machine whose wall clock was set wrong.
"""

import runpy
import sys
import time

wall_s, wall_ns, ahead_s = time.time, time.time_ns, int(sys.argv[1])


def skewed_s() -> float:
    """Seconds of the skewed clock."""
    return wall_s() + ahead_s


def skewed_ns() -> int:
    """The same in nanoseconds."""
    return wall_ns() + ahead_s * 1_000_000_000


time.time, time.time_ns = skewed_s, skewed_ns
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
