"""Leave no run behind of a program that a person started by mistake: a name that is mistyped, an import that fails, ``--help``.

It would be shown as the newest run from then on. Under a scheduler, and in Kubernetes, a program that does not come to its
first step is a failure that somebody has to hear of, and stays.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torchobs.config import settings
from torchobs.flight.files.location import KUBERNETES_MOUNT
from torchobs.support.process_group import rank_and_size

if TYPE_CHECKING:
    from torchobs.probes.core.context import ProbeContext

LONGEST_S = 60.0
"""Who has loaded data for a minute has begun."""
_LAUNCHERS = frozenset({"python", "torchrun"})
_UNATTENDED = frozenset({"KUBERNETES_SERVICE_HOST", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"})
"""Variables of a pod, and of the jobs of schedulers, of which nobody sees the output"""
_HELP = frozenset({"-h", "--help", "--helpfull", "--version"})
_USAGE = 2
"""Status with which argparse, click and the shell refuse a command line"""


def is_mistake(error: BaseException) -> bool:
    """Return True for the exception of a program that cannot begin: its module is not there, or it was only asked for help."""
    if not isinstance(error, SystemExit):
        return isinstance(error, (ImportError, SyntaxError))
    if error.code == _USAGE or (not error.code and not _HELP.isdisjoint(sys.argv[1:])):
        return True
    return isinstance(error.code, str) and _raised_by_runpy(error)


def hide(context: ProbeContext, error: BaseException | None) -> None:
    """Remove the flight file of a program that ends by that exception, if it is a mistake and nothing has begun."""
    if error is None or not is_mistake(error) or context.writer.elapsed_ns() > LONGEST_S * 1e9:
        return
    resource, environ = context.writer.header.resource, settings.environment()
    attended = resource.get("launcher") in _LAUNCHERS and _UNATTENDED.isdisjoint(environ)
    if not attended or context.writer.path.startswith(KUBERNETES_MOUNT):
        return
    alone = resource.get("world_size", 1) == 1
    if not alone and not isinstance(error, SystemExit):
        return  # the other ranks may wait for this one
    begun = context.recorder.last_complete or context.recorder.has_begun() or rank_and_size() is not None
    if not begun and not context.writer.hidden:
        context.writer.hide()


def _raised_by_runpy(error: SystemExit) -> bool:
    """Return True if ``python -m`` itself refuses the module: behind its frames are none but ours."""
    trace, last = error.__traceback__, ""
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__"))
        last = last if name.startswith("torchobs.") else name
        trace = trace.tb_next
    return last == "runpy"
