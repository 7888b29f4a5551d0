"""Entry point of the ``torchobs`` program and of ``python -m torchobs``."""

from __future__ import annotations

import sys
from collections.abc import Sequence


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
        from torchobs.cli import dispatch

        return dispatch.main(given)
    except KeyboardInterrupt:  # during the import
        return 130


if __name__ == "__main__":
    sys.exit(main())
