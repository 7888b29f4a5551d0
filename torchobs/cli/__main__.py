"""``torchobs``: what the installed program and ``python -m torchobs`` do."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_EXTRA = frozenset({"click", "prometheus_client", "starlette", "uvicorn", "h11", "anyio", "opentelemetry", "msgspec", "yaml"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name and return its exit status.

    ``run`` works on a plain install, in a training image: it comes before anything else is imported.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["run"]:
        from torchobs.cli import run

        run.main(given[1:])
        return 0
    try:
        from torchobs.cli.commands import group

        group.main(given, prog_name="torchobs")
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package not in _EXTRA:
            raise
        name = f"torchobs {given[0]}" if given and not given[0].startswith("-") else "torchobs"
        print(f"{name}: {package} is not installed: pip install 'torchobs[exporter]'", file=sys.stderr)  # noqa: T201
        return 1


if __name__ == "__main__":
    sys.exit(main())
