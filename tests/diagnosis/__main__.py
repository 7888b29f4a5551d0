"""`python -m tests.diagnosis`: see ``table``."""

import sys

from tests.diagnosis.table import main

if __name__ == "__main__":
    sys.exit(main())
