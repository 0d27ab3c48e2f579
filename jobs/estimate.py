"""`python -m jobs.estimate JOB`: run a sample of a job's rows, write nothing, and print what the whole job would take.

Times, sizes and costs have intervals, wide ones for few samples; `--rows 1000000` plans a job of that many rows. The
same as `--estimate` of the job's own command. Options that are not listed are those of that command.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jobs.cli import module_of
from jobs.terminal.arguments import add_job_file, new_parser, take_job_file
from jobs.terminal.command import positive

KINDS = ("caption", "synthesize")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    example = "demo_folder source.path=PICTURES --rows 1000000 --price-per-hour 2.5"
    parser = new_parser("estimate", __doc__ or "", example)
    add_job_file(parser)
    add = parser.add_argument_group("estimate").add_argument
    add("--samples", type=positive, default=64, metavar="N", help="samples to run, from all over; default 64")
    add("--rows", type=positive, metavar="N", help="rows of the whole job; by default those of the source")
    add("--json", action="store_true", help="print one JSON object, and nothing else")
    add("--job", choices=KINDS, default=KINDS[0], help=f"what the YAML is; default {KINDS[0]}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Estimate one job and return the exit status of its command."""
    known = parser()
    arguments, others = known.parse_known_intermixed_args(sys.argv[1:] if argv is None else argv)
    take_job_file(known, arguments)
    words = ["--config", str(arguments.config), *arguments.overrides, "--estimate", str(arguments.samples), *others]
    words += ["--rows", str(arguments.rows)] if arguments.rows is not None else []
    words += ["--json"] if arguments.json else []
    status: int = module_of(arguments.job).main(words)
    return status


if __name__ == "__main__":
    sys.exit(main())
