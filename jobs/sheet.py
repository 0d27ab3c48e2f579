"""`python -m jobs.sheet OUT [OTHER]`: draw the images of an output as a contact sheet: the replicas of each prompt, or
two outputs side by side, with seeds and guidance.

Exit status: 0 written, 2 refused: an output holds no images, or the file cannot be written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from configs.load import ConfigError
from jobs.terminal.arguments import new_parser
from pipeline.output.recorded_job import read_any_job
from pipeline.sheets.sheet import MAX_ROWS, make_sheet, write_sheet
from pipeline.storage import access

DONE, REFUSED = 0, 2
MIN_SIDE_PX, MAX_SIDE_PX = 32, 2048
SUFFIXES = (".png", ".html", ".htm")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = new_parser("sheet", __doc__ or "", "out/lantern out/plain --to sheet.html")
    add = parser.add_argument
    add("output", metavar="OUT", help="the output directory of a synthesis job, its sink.path")
    add("other", metavar="OTHER", nargs="?", help="another output of the same prompts, whose images are shown beside")
    add("--to", required=True, metavar="FILE", help="the sheet: a path that ends in .png or .html")
    add("--rows", type=_between(1, MAX_ROWS), default=24, metavar="N", help="number of prompts; default 24")
    about = "longer side of an image in pixels; default 192"
    add("--side", type=_between(MIN_SIDE_PX, MAX_SIDE_PX), default=192, metavar="PX", help=about)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Draw one sheet and return the exit status."""
    arguments = parser().parse_args(argv)
    try:
        if not arguments.to.lower().endswith(SUFFIXES):
            raise ConfigError(f"--to: {arguments.to} ends neither in .png nor in .html")
        names = [("OUT", arguments.output), ("OTHER", arguments.other)]
        given = [(dotted, path) for dotted, path in names if path is not None]
        jobs = [read_any_job(path, dotted) for dotted, path in given]
        sheet = make_sheet(jobs, [dotted for dotted, _ in given], arguments.rows, arguments.side)
        size = write_sheet(sheet, arguments.to, arguments.side)
    except ConfigError as error:
        print(f"refused: {error}", file=sys.stderr)
        return REFUSED
    print(f"{access.shown(arguments.to)}: {sheet.note}, {size / 1e6:.1f} MB")
    return DONE


def _between(low: int, high: int) -> Callable[[str], int]:
    """Return a type of argparse: an integer from `low` to `high`."""

    def number(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be from {low} to {high}, not {text}")
        return value

    return number


if __name__ == "__main__":
    sys.exit(main())
