"""`python -m draftfleet`: the command `draftfleet`."""

import sys

from jobs.cli import main

if __name__ == "__main__":
    sys.exit(main())
