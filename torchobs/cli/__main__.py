"""Entry point of the ``torchobs`` program and of ``python -m torchobs``."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name and return its exit status.

    ``run`` is handled before anything else is imported, so that the script finds the interpreter in its initial state.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["run"]:
        from torchobs.cli import run

        run.main(given[1:])
        return 0
    try:
        with _sigterm_kept_back() if given[:1] == ["exporter"] else nullcontext():
            from torchobs.cli import dispatch

            return dispatch.main(given)
    except KeyboardInterrupt:  # during the import
        return 130


@contextmanager
def _sigterm_kept_back() -> Iterator[None]:
    """Block SIGTERM until the exporter handles it, from the first moment on.

    The kernel discards unhandled signals to a container's first process. If training fails at once, while its sidecar still
    imports (7 s on a tenth of a core), the pod would stay for its whole grace period.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


if __name__ == "__main__":
    sys.exit(main())
