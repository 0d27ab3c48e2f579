"""`python -m jobs.check OUTPUT`: check an output against its manifest: missing rows, ids, columns, checksums.

Changes nothing. Exit status: 0 complete and undamaged, 1 rows are missing or pending, 2 not an output of a job, or
unreadable, 3 files are damaged or unknown, or rows are repeated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from configs.load import ConfigError
from jobs.terminal.arguments import new_parser
from pipeline.check.output import check_output
from pipeline.storage import access, retries
from pipeline.storage.first_touch import check_stores
from pipeline.storage.output_dir import OutputDir

COMPLETE, INCOMPLETE, REFUSED, UNSOUND = 0, 1, 2, 3


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = new_parser("check", __doc__ or "", "out/mine")
    parser.add_argument("output", help="the output directory, as sink.path has it")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Check one output and return the exit status."""
    arguments = parser().parse_args(argv)
    try:
        with retries.planning():
            check_stores("OUTPUT", [arguments.output])
            check = check_output(OutputDir(arguments.output))
    except ConfigError as error:
        print(f"refused: {error}", file=sys.stderr)
        return REFUSED
    except Exception as error:  # storage drivers raise any error, from PermissionError to HTTP errors
        reason = access.reason_of(error, arguments.output)
        print(f"refused: {access.shown(arguments.output)} cannot be read: {reason}", file=sys.stderr)
        return REFUSED
    for line in check.lines():
        print(line)
    if check.problems:
        return UNSOUND
    return COMPLETE if check.is_complete else INCOMPLETE


if __name__ == "__main__":
    sys.exit(main())
