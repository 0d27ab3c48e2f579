"""`python -m jobs.compare JOB --methods A,B --output DIR`: run methods over the same rows of a job, and compare speed,
acceptance and outputs with plain decoding.

Every method writes a normal output below DIR, so the same command resumes. Exit status: 0 compared, 2 refused (nothing
was started), otherwise that of the job that ended first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from configs.load import ConfigError, load_job
from jobs.cli import module_of
from jobs.terminal.arguments import add_job_file, new_parser, take_job_file
from jobs.terminal.command import Command, positive
from jobs.terminal.exit_status import DONE, REFUSED
from pipeline.compare import plots, tables
from pipeline.compare.figures import Comparison, compare, read_rows
from pipeline.compare.methods import DOTTED, PLAIN, ComparedMethod, common_overrides, makes_images, read_methods
from pipeline.output.recorded_job import read_any_job
from pipeline.run.job_plan import DEFAULT_RESUME
from pipeline.storage import access, retries
from pipeline.storage.shard import WHOLE

ASSUMED_SLOTS = 16


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    example = "demo_caption --methods plain,sd_chain,suffix --limit 64 --output out/comparison"
    parser = new_parser("compare", __doc__ or "", example)
    add_job_file(parser)
    add = parser.add_argument_group("comparison").add_argument
    about = "names of configs/methods, or YAML files with a section method, with commas; NAME@PATH is a method with "
    add("--methods", required=True, metavar="A,B", help=f"{about}another drafter; plain is added")
    add("--limit", type=positive, default=512, metavar="N", help="the first N samples; default 512")
    about = "the folder of the outputs, the table and the plots"
    add("--output", required=True, metavar="DIR", help=about)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Compare methods and return the exit status."""
    known = parser()
    arguments = take_job_file(known, known.parse_intermixed_args(sys.argv[1:] if argv is None else argv))
    try:
        methods = read_methods(arguments.methods)
        images = makes_images(arguments.config)
        job: Command[Any, Any] = module_of("synthesize" if images else "caption").COMMAND
        words = {
            method.name: common_overrides(arguments.output, method, images, arguments.overrides) for method in methods
        }
        slots = _check(job, arguments, methods, words)
    except ConfigError as error:
        print(f"refused: {error}", file=sys.stderr)
        return REFUSED
    for number, method in enumerate(methods, start=1):
        print(f"\nmethod {number} of {len(methods)}: {method.name}", flush=True)
        limit = ["--limit", str(arguments.limit)]
        status = job.main(["--config", str(arguments.config), *words[method.name], *limit])
        if status != DONE:
            print(f"the comparison ended with {method.name}; the same command resumes it", file=sys.stderr)
            return status
    try:
        comparison = _compare(arguments.output, methods, slots)
        written = _write(arguments.output, comparison)
    except ConfigError as error:
        print(f"refused: {error}", file=sys.stderr)
        return REFUSED
    print("", tables.as_terminal(comparison), *written, sep="\n")
    return DONE


@retries.planning()
def _check(
    job: Command[Any, Any],
    arguments: argparse.Namespace,
    methods: Sequence[ComparedMethod],
    words: dict[str, list[str]],
) -> int:
    """Plan the job of every method, so that one that cannot run is refused before the first starts; return the number
    of slots. Raises ConfigError, which names the method."""
    slots: Any = ASSUMED_SLOTS
    for method in methods:
        try:
            config = load_job(job.model, arguments.config, tuple(words[method.name]))
            job.make_plan(config, arguments.limit, False, DEFAULT_RESUME, WHOLE, arguments.config.parent)
        except ConfigError as error:
            raise ConfigError(f"{DOTTED}: {method.name}: {error}") from None
        if method.name == PLAIN:
            slots = config.pool.slots
    return ASSUMED_SLOTS if slots == "auto" else int(slots)


def _compare(output: str, methods: Sequence[ComparedMethod], slots: int) -> Comparison:
    outputs = {}
    for method in methods:
        path = f"{output.rstrip('/')}/{method.name}"
        outputs[method.name] = read_rows(read_any_job(path, "--output"), "--output")
    try:
        return compare(outputs, slots)
    except ValueError as error:
        raise ConfigError(f"--output: {access.shown(output)}: {error}; _job/report.html of each shows why") from None


def _write(output: str, comparison: Comparison) -> list[str]:
    """Write tables and plots into the folder and return lines that name them."""
    files = {
        "comparison.csv": tables.as_csv(comparison).encode(),
        "comparison.md": tables.as_markdown(comparison).encode(),
        "comparison.json": tables.as_json(comparison).encode(),
    }
    lines = []
    if plots.can_draw():
        files |= plots.draw(comparison)
    else:
        lines.append(plots.NO_MATPLOTLIB)
    try:
        filesystem, root = access.open_url(output, "--output")
        filesystem.makedirs(root, exist_ok=True)
        for name, data in files.items():
            with filesystem.open(access.join(root, name), "wb") as file:
                file.write(data)
    except OSError as error:
        raise ConfigError(f"--output: {access.shown(output)} cannot be written: {access.reason_of(error)}") from None
    return [f"written: {access.shown(access.join(output, name))}" for name in files] + lines


if __name__ == "__main__":
    sys.exit(main())
