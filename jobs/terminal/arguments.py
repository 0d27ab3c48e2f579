"""Arguments that commands share: the parser with its example, and the job file, which is a path or a name."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

from files.installation import command

_OVERRIDE = re.compile(r"[\w.]+=")


def new_parser(name: str, doc: str, example: str) -> argparse.ArgumentParser:
    """Return the parser of the command `name`; `doc` is its module's docstring, `example` the arguments of an example.

    The docstring begins with the command in backquotes and a colon, which the help leaves out.
    """
    about = doc.partition("`: ")[2] or doc
    words = command(name)
    return argparse.ArgumentParser(
        prog=" ".join(words),
        description=about[:1].upper() + about[1:],
        epilog=f"example: {shlex.join(words)} {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


JOB_FILE = "the job's YAML: a path, or the name of a shipped job file, such as demo_folder"


def add_job_file(parser: argparse.ArgumentParser, about: str = JOB_FILE) -> None:
    """Add the job file and the overrides of its values; `take_job_file` reads them."""
    add = parser.add_argument_group("job").add_argument
    add("job_file", nargs="?", metavar="JOB", help=about)
    add("overrides", nargs="*", metavar="section.field=value", help="values that replace the YAML's")
    add("--config", type=Path, metavar="JOB", help="the same as JOB")


def take_job_file(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, is_required: bool = True
) -> argparse.Namespace:
    """Set `config` to the job file, from `--config` or the first argument; exit with status 2 if it is missing."""
    first = arguments.job_file
    if first is not None and (arguments.config is not None or _OVERRIDE.match(first)):
        arguments.overrides = [first, *arguments.overrides]
    elif first is not None:
        arguments.config = Path(first)
    if arguments.config is None and is_required:
        parser.error("the job file is missing: give its path, or the name of a shipped one, as the first argument")
    return arguments
