"""`python -m jobs.export`: export the results of a job as tars, files, a dataset, sidecars, result lines or a column.

The job may be finished or running: what was published and not exported yet is exported, so the same command resumes.
Exit status: 0 done, 1 failed, 2 refused (nothing was exported), 3 some rows were refused or files of the output are
damaged, 143 and 130 stopped by SIGTERM and SIGINT.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from configs.load import ConfigError, load_job
from configs.output import ExportJobConfig
from configs.pool import JobSectionConfig
from jobs.terminal.arguments import new_parser
from pipeline.cluster import signals
from pipeline.exports.run import run_exports
from pipeline.output.recorded_job import read_any_job
from pipeline.run.external_parts import install_recorded
from pipeline.run.job_plan import JobPlan
from pipeline.run.plan import recorded
from pipeline.storage import access

DONE, FAILED, REFUSED, ROWS_REFUSED = 0, 1, 2, 3


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = new_parser("export", __doc__ or "", "--from out/mine --config EXPORTS.yaml")
    add = parser.add_argument_group("output").add_argument
    add("--from", dest="output", required=True, metavar="OUT", help="the output directory of the job, its sink.path")
    about = "the source, or the folder of an export, was moved: write into the folder that its path names now"
    add("--accept-moved", action="store_true", help=about)
    add = parser.add_argument_group("exports").add_argument
    add("--config", type=Path, help="a YAML with exports; by default the job's own sink.exports")
    add("overrides", nargs="*", metavar="section.field=value", help="values that replace the YAML's")
    add("--ray-address", default="local", help="the Ray cluster of long exports; by default this machine")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the exports from the command line and return the exit status."""
    arguments = parser().parse_intermixed_args(argv)
    with signals.catch_signals() as stop:
        try:
            job = read_any_job(arguments.output, "--from")
            exports, dotted = job.config.sink.exports, "sink.exports"
            if arguments.config is not None:
                exports = load_job(ExportJobConfig, arguments.config, tuple(arguments.overrides)).exports
                dotted = "exports"
            elif arguments.overrides:
                raise ConfigError("section.field=value: replaces values of --config, which is missing")
            if not exports:
                raise ConfigError("--config: is missing, and the job has no sink.exports; name a YAML with exports")
            ray = JobSectionConfig(ray_address=arguments.ray_address)
            install_recorded(job.config, job.source_code)
            reports = run_exports(job, exports, ray, dotted, arguments.accept_moved)
        except ConfigError as error:
            print(f"refused: {error}", file=sys.stderr)
            return REFUSED
        except KeyboardInterrupt:
            if stop.number is None:
                raise
            print(f"stopped by {stop.name}; the same command resumes", file=sys.stderr)
            return stop.status
        except RuntimeError as error:
            print(f"failed: {error}", file=sys.stderr)
            return FAILED
        except Exception as error:  # storage drivers raise any error
            traceback.print_exc()
            print(f"failed: {access.reason_of(error)}; the same command resumes", file=sys.stderr)
            return FAILED
    for report in reports:
        print(*report.lines(), sep="\n")
    return ROWS_REFUSED if any(report.num_refused or report.damaged for report in reports) else DONE


def export_results(plan: JobPlan) -> list[str]:
    """Run `sink.exports` of a job; return the lines of their reports."""
    config = plan.config
    reports = run_exports(recorded(plan), config.sink.exports, config.job, "sink.exports")
    return [f"export        {line}" for report in reports for line in report.lines()]


if __name__ == "__main__":
    sys.exit(main())
