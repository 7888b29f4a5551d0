"""Run the tests that need a CUDA device, then measure what torchobs costs there: ``python -m tests.gpu``."""

from __future__ import annotations

import subprocess
import sys

import torch

from tests import support


def main() -> int:
    """Return the worse of the two exit codes."""
    if not torch.cuda.is_available():
        sys.exit(f"{support.NEEDS_CUDA}, and a build of torch for it; this is torch {torch.__version__}")
    codes = [
        subprocess.run([sys.executable, "-m", *command], cwd=support.ROOT, check=False).returncode
        for command in (("pytest", "-q", "tests/gpu"), ("tests.gpu.overhead",))
    ]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
