"""``python -m torchobs``."""

import sys

from torchobs.cli.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
