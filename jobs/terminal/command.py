"""Implements the command line of bulk jobs: one YAML file, overrides, options, and the messages on the terminal. Exit
statuses are those of `jobs.terminal.exit_status`."""

from __future__ import annotations

import argparse
import contextlib
import math
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel

from actors.losses import MetricError
from actors.results import torch_threads
from actors.serving.crash_ledger import EngineFailed, ErrorBudgetSpent, LossBudgetExceeded
from configs.load import ConfigError, load_job
from files.installation import command
from files.plurals import counted
from jobs.terminal.arguments import add_job_file, new_parser, take_job_file
from jobs.terminal.clock import command_start
from jobs.terminal.exit_status import DONE, FAILED, NO_RESULT, REFUSED, TOO_LOSSY, TOO_MANY_ERRORS
from jobs.terminal.refusals import as_refusal, print_failure, refuse
from pipeline.cluster import signals
from pipeline.cluster.signals import Stop
from pipeline.output.publishing import Fenced
from pipeline.pilot import estimate
from pipeline.pilot.repeats import repeated
from pipeline.pilot.run import run_pilot
from pipeline.reports import summary
from pipeline.reports.outcome import JobOutcome, JobVerdict
from pipeline.reports.summary import Summary
from pipeline.run import resume
from pipeline.run.graph import Build
from pipeline.run.job_plan import JobPlan, ResumeOptions
from pipeline.run.reporting import REPORT
from pipeline.storage import retries
from pipeline.storage.damage import DamagedFile
from pipeline.storage.shard import WHOLE, Shard

ENDED: dict[type[Exception], int] = {
    ErrorBudgetSpent: TOO_MANY_ERRORS,
    LossBudgetExceeded: TOO_LOSSY,
    EngineFailed: FAILED,
    MetricError: FAILED,
}
"""Exit status by the error that ended a job."""
FINISHED = {JobOutcome.DONE: DONE, JobOutcome.TOO_MANY_ERRORS: TOO_MANY_ERRORS, JobOutcome.NO_RESULT: NO_RESULT}
"""Exit status by the outcome of a finished job."""

SWITCHES = {
    "--retry-errors": "go on with an output and run the rows that failed again",
    "--allow-mixed": "go on with an output that was begun with another configuration",
    "--accept-touched": "go on although files of the source have other times or etags, where sizes and row counts are "
    "the same: the source was copied",
    "--skip-digests": "go on with an output and compare only sizes and footers of its files, not their SHA-256",
}
"""Options of the command line that control how a job resumes."""

Config = TypeVar("Config", bound=BaseModel)
AnyPlan = TypeVar("AnyPlan", bound=JobPlan)


@dataclass(frozen=True)
class Command(Generic[Config, AnyPlan]):
    """The command of one kind of job: `make_plan(config, limit, runs, resume, shard, folder)` plans it and
    `run(plan)` runs it.

    `describe` returns the text of a dry run; `verb` begins the message at the start of a job.
    """

    name: str
    verb: str
    doc: str
    example: str
    model: type[Config]
    make_plan: Callable[[Config, int | None, bool, ResumeOptions, Shard, Path | None], AnyPlan]
    describe: Callable[[AnyPlan], Sequence[str]]
    run: Callable[[AnyPlan], Summary]
    build: Build
    export: Callable[[AnyPlan], Sequence[str]] = lambda plan: ()
    """Exports the results of an output without missing rows, and returns lines to print."""

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run one job from the command line and return the exit status."""
        began_s = command_start(argv is None)
        arguments = self.parse(sys.argv[1:] if argv is None else argv)
        arguments.out = sys.stdout
        with signals.catch_signals() as stop, _only_json(arguments.json):
            try:
                plan = self._plan(arguments)
                if plan is None:
                    return DONE
                if resume.is_complete(plan):
                    return self._complete(plan, arguments)
                if arguments.estimate is not None:
                    return self._estimate(plan, arguments)
                return self._run(plan, arguments, stop, began_s)
            except ConfigError as error:
                return refuse(error, arguments.config, arguments.overrides)
            except KeyboardInterrupt:
                if stop.number is None:
                    raise
                print(f"stopped by {stop.name} before the job began", file=sys.stderr)
                return stop.status

    @retries.planning()
    def _plan(self, arguments: argparse.Namespace) -> AnyPlan | None:
        """Check and plan the job; print the plan and return None if it is a dry run. Raises ConfigError."""
        config = load_job(self.model, arguments.config, tuple(arguments.overrides))
        estimates = arguments.estimate is not None
        for flag in ("--rows", "--json", "--price-per-hour"):
            if is_set(arguments, flag) and not estimates:
                raise ConfigError(f"{flag}: belongs to --estimate")
        if estimates and (arguments.dry_run or arguments.limit is not None):
            raise ConfigError("--estimate: takes neither --limit nor --dry-run; it is about all that the job has to do")
        flags = (arguments.allow_mixed, arguments.retry_errors, arguments.accept_touched, arguments.skip_digests)
        runs = not estimates and not arguments.dry_run
        shard, folder = Shard.parse(arguments.shard), arguments.config.parent
        try:
            plan = self.make_plan(config, arguments.limit, runs, ResumeOptions(*flags), shard, folder)
        except (ConfigError, AssertionError):
            raise
        except Exception as error:  # drivers raise errors of no common class
            raise as_refusal(error) from error
        if not arguments.dry_run:
            return plan
        print(*resume.resume_lines(plan), *self.describe(plan), sep="\n")
        return None

    def _complete(self, plan: AnyPlan, arguments: argparse.Namespace) -> int:
        """Export an output without missing rows, and return the exit status that its rows have."""
        left_out = resume.limit_text(plan)
        print(f"nothing is missing in {plan.output.shown()}", *([left_out] if left_out else []), sep="; ")
        if arguments.estimate is None:
            print(resume.resume_lines(plan)[-1], *self.export(plan), sep="\n")
        return self._judged(resume.verdict_of(plan))

    def parser(self) -> argparse.ArgumentParser:
        """Return the parser of the command line."""
        parser = new_parser(self.name, self.doc, self.example)
        add_job_file(parser)
        add = parser.add_argument_group("before a run").add_argument
        add("--dry-run", action="store_true", help="check everything, print the plan, start nothing")
        about = "run N samples from all over; say what the job would take"
        add("--estimate", type=positive, metavar="N", help=about)
        about = "for --estimate: the rows of the whole job, in place of those of the source"
        add("--rows", type=positive, metavar="N", help=about)
        add("--json", action="store_true", help="for --estimate: print one JSON object, and nothing else")
        add("--price-per-hour", type=_price, metavar="P", help="for --estimate: of one GPU, or core without one")
        add = parser.add_argument_group("rows").add_argument
        add("--limit", type=positive, metavar="N", help="only the first N samples (of the shard)")
        about = "run only shard I (from 0) of the N shards of the job, each of which has a driver"
        add("--shard", default=f"{WHOLE}", metavar="I/N", help=about)
        add = parser.add_argument_group("resume").add_argument
        for flag, about in SWITCHES.items():
            add(flag, action="store_true", help=about)
        return parser

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse the command line; argparse exits with status 2 if it is invalid."""
        parser = self.parser()
        return take_job_file(parser, parser.parse_intermixed_args(argv))

    def _estimate(self, plan: AnyPlan, arguments: argparse.Namespace) -> int:
        """Run a pilot and print an estimate of the cost of the job's missing rows; write nothing."""
        pilot = estimate.draw(plan.datasource, arguments.estimate)
        method, pool, seed = plan.config.method, plan.config.pool, plan.config.job.seed
        spans = f"{counted(len(pilot.tables), 'span')} out of {pilot.num_spans:,}"
        print(f"trying {counted(pilot.size, 'sample')} of {spans}", flush=True)
        _print_gpus(plan)
        pilot = repeated(pilot, method, pool, plan.rows_per_sample or 1)
        if pilot.repeats > 1:
            times = f"every sample is decoded {pilot.repeats} times, by each method in turns"
            print(f"comparing methods takes more rows: {times}", flush=True)
        try:
            rows, verdict = run_pilot(plan, self.build, pilot)
        except tuple(ENDED) as error:
            print(f"the pilot was ended, as the job would be: {error}", file=sys.stderr)
            return ENDED[type(error)]
        except Exception:
            traceback.print_exc()
            print("the pilot failed, as the job would", file=sys.stderr)
            return FAILED
        label = method.label if method.auto is None or verdict is None else verdict.fastest
        price = arguments.price_per_hour
        threads, total = torch_threads(pool), arguments.rows
        result = estimate.estimate(pilot, rows, pool, threads, price, seed, verdict, label, total)
        print(result.to_json() if arguments.json else result.show(), file=arguments.out, flush=True)
        summary = plan.empty_summary()
        summary.add_rows(rows)
        return self._judged(summary.judge(plan.config.job.max_error_share), "the pilot")

    def _run(self, plan: AnyPlan, arguments: argparse.Namespace, stop: Stop, began_s: float) -> int:
        """Run the missing rows; print the summary of the whole output, its path, and the command for another run."""
        print(f"{self.verb} {counted(plan.manifest.num_files, 'file')} into {plan.output.shown()}", flush=True)
        _print_gpus(plan)
        if plan.warning:
            print(f"warning: {plan.warning}", flush=True)
        try:
            done = self.run(plan)
            exported = self.export(plan)
        except tuple(ENDED) as error:
            print_failure(f"the job was ended: {error}")
            print(self._kept(plan, arguments), file=sys.stderr)
            return ENDED[type(error)]
        except ConfigError as error:
            refuse(error, arguments.config, arguments.overrides)
            print(self._kept(plan, arguments), file=sys.stderr)
            return FAILED if isinstance(error, DamagedFile) else REFUSED
        except Fenced as error:
            print(f"the job was ended: {error}; what this one had finished counts there", file=sys.stderr)
            return FAILED
        except (Exception, KeyboardInterrupt) as error:  # a bad row never ends a job
            interrupted = isinstance(error, KeyboardInterrupt)
            if interrupted and stop.number is None:
                raise
            if not interrupted:
                traceback.print_exc()
            ending = "failed" if stop.number is None else f"was stopped by {stop.name}"
            print(f"the job {ending}; {self._kept(plan, arguments)}", file=sys.stderr)
            return FAILED if stop.number is None else stop.status
        verdict = done.judge(plan.config.job.max_error_share)
        done.command_s = time.monotonic() - began_s
        print(summary.show(done))
        print(f"output        {plan.output.shown()}", *exported, sep="\n")
        print(f"report        {plan.output.shown(REPORT)}")
        if done.num_errors:
            print(f"retry errors  {self._command(arguments)}{'' if arguments.retry_errors else ' --retry-errors'}")
        print(f"run it again  {self._command(arguments, 'NEW')}")
        return self._judged(verdict)

    @staticmethod
    def _judged(verdict: JobVerdict, what: str = "the job") -> int:
        """Return the exit status of a finished job; print why it failed, if it did."""
        if verdict.reason:
            print_failure(f"{what} failed: {verdict.reason}")
        return FINISHED[verdict.outcome]

    def _kept(self, plan: AnyPlan, arguments: argparse.Namespace) -> str:
        return f"finished rows are kept in {plan.output.shown()}; resume with: {self._command(arguments)}"

    def _command(self, arguments: argparse.Namespace, output: str = "") -> str:
        """Return the command that resumes this output, or with `output`, repeats the job into another one."""
        overrides = [text for text in arguments.overrides if not (output and text.startswith("sink.path="))]
        limit = ["--limit", str(arguments.limit)] if arguments.limit is not None else []
        shard = ["--shard", arguments.shard] if Shard.parse(arguments.shard) != WHOLE else []
        switches = [flag for flag in SWITCHES if is_set(arguments, flag)]
        words = [*command(self.name), "--config", str(arguments.config), *overrides, *limit, *shard, *switches]
        return shlex.join([*words, *([f"sink.path={output}"] if output else [])])


def _only_json(is_json: bool) -> contextlib.AbstractContextManager[object]:
    """Print everything but the JSON object to standard error in the block, if the output is JSON."""
    return contextlib.redirect_stdout(sys.stderr) if is_json else contextlib.nullcontext()


def is_set(arguments: argparse.Namespace, flag: str) -> bool:
    """Return whether a flag is set on the command line."""
    return bool(getattr(arguments, flag.strip("-").replace("-", "_")))


def _print_gpus(plan: JobPlan) -> None:
    if line := plan.resources.line():
        print(f"gpus: {line}", flush=True)


def _price(text: str) -> float:
    price = float(text)
    if not 0 <= price < math.inf:
        raise argparse.ArgumentTypeError(f"must be a price, not {text}")
    return price


def positive(text: str) -> int:
    """Parse an integer of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number
