"""`python -m jobs.submit JOB`: submit a job to a cluster through Ray's Jobs API; follow, query or stop it.

A checkout is uploaded, so the cluster needs only its dependencies. An installed package uploads the job file only, and
the nodes need the same version. Exit status: that of the job if it
is followed to its end (1 if it was stopped), else 0; 2 if nothing was submitted.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from configs.load import ConfigError, load_job
from configs.schema import CaptionJobConfig
from configs.synthesis import SynthesizeJobConfig
from configs.training import TrainDrafterJobConfig
from files.installation import IS_INSTALLED, version
from jobs.cli import VERSION_VARIABLE
from jobs.terminal.arguments import add_job_file, new_parser, take_job_file
from jobs.terminal.command import is_set, positive
from jobs.terminal.exit_status import DONE, FAILED, REFUSED
from pipeline.cluster import code_archive
from pipeline.cluster.jobs import ADDRESS_VARIABLES, Cluster, ClusterJob
from pipeline.cluster.provenance import REVISION_VARIABLE, code_revision
from pipeline.cluster.signals import CLUSTER_WAIT_S
from pipeline.run.external_parts import archived, external_names
from pipeline.run.plan_checks import refuse_relative
from pipeline.storage import access
from pipeline.storage.shard import MAX_SHARDS, WHOLE, Shard

PASSED_ON = ("--retry-errors", "--allow-mixed")
ON_A_CLUSTER = "the job runs on a cluster"
STOP_WAIT_VARIABLE = "RAY_JOB_STOP_WAIT_TIME_S"
"""Environment variable of Ray's Jobs API: seconds between SIGTERM and SIGKILL of a driver, 3 by default."""
_USER_IN_URL = re.compile(r"://[^/?#\s]*@")


KINDS: dict[str, type[BaseModel]] = {
    "caption": CaptionJobConfig,
    "synthesize": SynthesizeJobConfig,
    "train_drafter": TrainDrafterJobConfig,
}


@dataclass(frozen=True)
class Submission:
    """A validated job to submit: `stem` begins its submission ids, `passed_on` are its arguments after the job file."""

    kind: str
    stem: str
    job_file: Path
    passed_on: tuple[str, ...]
    code: Mapping[str, bytes] = field(default_factory=dict)
    """Files of external code to ship beside the job file, by relative path."""

    def entrypoint(self, job_path: str) -> str:
        """Return the command that the cluster runs, with the job file at `job_path`."""
        words = ["draftfleet", self.kind] if IS_INSTALLED else ["python", "-m", f"jobs.{self.kind}"]
        return shlex.join([*words, "--config", job_path, *self.passed_on])


def main(argv: Sequence[str] | None = None) -> int:
    """Submit, follow, query or stop one job, and return the exit status."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    try:
        return run(arguments)
    except ConfigError as error:
        print(f"refused: {error}", file=sys.stderr)
        return REFUSED
    except (RuntimeError, OSError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return FAILED


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    example = "caption_webdataset --address http://HEAD:8265 source.path=s3://BUCKET/*.tar sink.path=s3://BUCKET/out"
    parser = new_parser("submit", __doc__ or "", example)
    add_job_file(parser)
    add = parser.add_argument_group("submission").add_argument
    add("--address", help=f"of the dashboard, as http://HEAD:8265; else ${ADDRESS_VARIABLES[0]}")
    add("--job", choices=tuple(KINDS), default="caption", help="what the YAML is (default: caption)")
    add("--detach", action="store_true", help="do not follow the log")
    add("--again", action="store_true", help="submit a job that has succeeded before once more")
    env = "give the job this variable of mine (no credentials)"
    add("--env", action="append", default=[], metavar="NAME", help=env)
    add = parser.add_argument_group("rows").add_argument
    add("--shards", type=positive, default=1, metavar="N", help="submit N jobs, each with one shard of the output")
    add("--limit", type=positive, metavar="N", help="passed on to the job")
    add("--estimate", type=positive, metavar="N", help="passed on to the job")
    add("--price-per-hour", type=float, metavar="P", help="passed on to the job")
    for flag in PASSED_ON:
        add(flag, action="store_true", help="passed on to the job")
    add = parser.add_argument_group("driver").add_argument
    add("--driver-num-cpus", type=float, metavar="N", help="reserved for the job's driver")
    add("--driver-num-gpus", type=float, metavar="N", help="the same")
    add("--driver-memory-bytes", type=positive, metavar="N", help="the same")
    add("--driver-resource", action="append", default=[], metavar="NAME=N", help="of the cluster's own")
    instead = parser.add_argument_group("submitted jobs").add_mutually_exclusive_group()
    about = "show the log instead: a submission's id; without one, the last submission of --config"
    for flag, action in {
        "--follow": about,
        "--status": "say how it stands instead",
        "--stop": "stop it instead",
    }.items():
        instead.add_argument(flag, nargs="?", const="", metavar="ID", help=action)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; argparse exits with status 2 if it is invalid."""
    known = parser()
    return take_job_file(known, known.parse_intermixed_args(argv), is_required=False)


def run(arguments: argparse.Namespace) -> int:
    """Run the requested action and return the exit status. Raises ConfigError if the command line or the job is
    invalid, or the cluster cannot be reached."""
    address = arguments.address or next((os.environ[name] for name in ADDRESS_VARIABLES if os.environ.get(name)), "")
    if not address:
        raise ConfigError("--address: give the address of the cluster's dashboard, such as http://HEAD:8265")
    asked = next((name for name in ("follow", "status", "stop") if getattr(arguments, name) is not None), "")
    named = getattr(arguments, asked) if asked else ""
    if "=" in named:  # not a submission id, but a value after the option
        arguments.overrides, named = [named, *arguments.overrides], ""
    if arguments.shards > MAX_SHARDS:
        raise ConfigError(f"--shards {arguments.shards}: at most {MAX_SHARDS}")
    if named:
        return _look(Cluster(address), asked, named)
    submissions = [prepare(arguments, Shard(number, arguments.shards)) for number in range(arguments.shards)]
    variables, resources = environment(arguments.env, os.environ), driver_resources(arguments)
    cluster = Cluster(address)
    earlier = [cluster.submissions(submission.stem) for submission in submissions]
    if asked:
        for submission, known in zip(submissions, earlier, strict=True):
            if not known:
                raise ConfigError(
                    f"{cluster.address} has no submission of this job; the first would be {submission.stem}-1"
                )
        return _look_at_all(cluster, asked, [known[-1].submission_id for known in earlier])
    pairs = list(zip(submissions, earlier, strict=True))
    # Of several shards, those that run or have succeeded are not submitted again.
    failed = [pair for pair in pairs if not pair[1] or pair[1][-1].status in ("FAILED", "STOPPED")]
    pending = failed or pairs
    ids = [f"{submission.stem}-{next_number(known, arguments.again)}" for submission, known in pending]
    with tempfile.TemporaryDirectory(prefix="draftfleet-") as folder:
        archive = Path(folder, "checkout.zip")
        job_path = code_archive.pack(archive, submissions[0].job_file, extras=submissions[0].code)
        runtime_env = {"working_dir": str(archive), "env_vars": variables}
        for submission_id, (submission, _) in zip(ids, pending, strict=True):
            cluster.submit(submission_id, submission.entrypoint(job_path), runtime_env, **resources)
            print(f"submitted {submission_id} to {cluster.address}\n  {submission.entrypoint(job_path)}", flush=True)
    return DONE if arguments.detach else _look_at_all(cluster, "follow", ids)


def prepare(arguments: argparse.Namespace, shard: Shard = WHOLE) -> Submission:
    """Check the job as far as possible on this machine, and return its submission, or that of one shard.

    Raises ConfigError if the job file or an override is invalid, or a path does not exist on the cluster.
    """
    if arguments.config is None:
        raise ConfigError("--config: name the job's YAML, or a submission's id behind --follow, --status or --stop")
    is_training = arguments.job == "train_drafter"
    overrides = (*arguments.overrides, f"{'workers' if is_training else 'job'}.ray_address=auto")
    try:
        job: Any = load_job(KINDS[arguments.job], arguments.config, overrides)
    except ConfigError as error:
        other = _fitting(arguments)
        raise ConfigError(f"{error}" + (f"\nit is another kind of job: give --job {other}" if other else "")) from None
    sink, output = ("output.path", job.output.path) if is_training else ("sink.path", job.sink.path)
    refuse_relative([*(("source.path", path) for path in job.source.paths), (sink, output)], ON_A_CLUSTER)
    code_archive.refuse_left_behind(job.model_dump(mode="json"))
    options = []
    for flag in ("--limit", "--estimate", "--price-per-hour"):
        value = getattr(arguments, flag.strip("-").replace("-", "_"))
        if value is not None:
            options += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    options += [flag for flag in PASSED_ON if is_set(arguments, flag)]
    options += ["--shard", f"{shard}"] if shard != WHOLE else []
    if is_training and options:
        raise ConfigError(f"{options[0]}: a training takes no such option")
    code = archived(external_names(job), arguments.config.parent)
    name = arguments.job if is_training else job.job.name or arguments.job
    parts = [job.resolved() if is_training else job.fingerprint({}), output, arguments.limit, arguments.estimate]
    identity = json.dumps([arguments.job, *parts, *(shard if shard != WHOLE else ())], sort_keys=True)
    stem = f"{re.sub(r'[^A-Za-z0-9_.]+', '-', name)[:60]}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    return Submission(arguments.job, stem, arguments.config, (*overrides, *options), code)


def _fitting(arguments: argparse.Namespace) -> str:
    """Return the other kind of job for which the file is valid; empty if there is none."""
    for name, model in KINDS.items():
        if name != arguments.job:
            with contextlib.suppress(ConfigError):
                load_job(model, arguments.config, tuple(arguments.overrides))
                return name
    return ""


def environment(names: Sequence[str], mine: Mapping[str, str]) -> dict[str, str]:
    """Return the job's environment variables: the revision or version of the code, the time limit of a
    stop, and `names` of this process.

    Raises:
        ConfigError: a variable is not set, or may be a credential, which users of the cluster's dashboard could read.
    """
    variables = {STOP_WAIT_VARIABLE: str(CLUSTER_WAIT_S)}
    variables |= {VERSION_VARIABLE: version()} if IS_INSTALLED else {REVISION_VARIABLE: code_revision()}
    for name in names:
        value = mine.get(name)
        if value is None:
            raise ConfigError(f"--env {name}: there is no such variable")
        if access.is_secret_name(name) or _USER_IN_URL.search(value):
            raise ConfigError(
                f"--env {name}: looks like a credential, and a job's variables can be read by everyone who sees the "
                "cluster's jobs; set it where the nodes start (in Kubernetes a Secret), as its driver reads it"
            )
        variables[name] = value
    return variables


def driver_resources(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the resources to reserve for the driver, as keyword arguments of Ray's client. Raises ConfigError if a
    custom resource has no number."""
    custom: dict[str, float] = {}
    for text in arguments.driver_resource:
        name, _, number = text.partition("=")
        try:
            custom[name] = float(number)
        except ValueError:
            raise ConfigError(f"--driver-resource {text}: must look like NAME=NUMBER") from None
    resources = {
        "entrypoint_num_cpus": arguments.driver_num_cpus,
        "entrypoint_num_gpus": arguments.driver_num_gpus,
        "entrypoint_memory": arguments.driver_memory_bytes,
        "entrypoint_resources": custom or None,
    }
    return {name: value for name, value in resources.items() if value is not None}


def next_number(earlier: Sequence[ClusterJob], again: bool) -> int:
    """Return the number of the next submission. Raises ConfigError if the job is running, or has succeeded and
    `--again` is not set."""
    if not earlier:
        return 1
    last = earlier[-1]
    for known in earlier:
        if not known.has_ended:
            raise ConfigError(
                f"this job is {known.status} already as {known.submission_id}; go on with --follow, --status or --stop "
                f"{known.submission_id}"
            )
    if last.status == "SUCCEEDED" and not again:
        raise ConfigError(f"this job has succeeded as {last.submission_id}; to run it once more add --again")
    return last.number + 1


def _look(cluster: Cluster, asked: str, submission_id: str) -> int:
    """Follow, query or stop one submission, and return the exit status."""
    if asked == "follow":
        cluster.ask(submission_id)  # raises ConfigError for an unknown id
        try:
            known = cluster.follow(submission_id, functools.partial(print, end="", flush=True))
        except KeyboardInterrupt:
            print(f"\nthe job continues; --follow {submission_id} shows it again, --stop ends it", file=sys.stderr)
            return FAILED
        print(f"{submission_id}: {known.status}", file=sys.stderr)
        return _exit_status(known)
    known = cluster.stop(submission_id) if asked == "stop" else cluster.ask(submission_id)
    print("\n".join(known.lines()))
    if asked == "stop" and not known.has_ended:
        print(f"{submission_id} has not ended yet", file=sys.stderr)
        return FAILED
    return DONE


def _exit_status(known: ClusterJob) -> int:
    """Return the exit status of the job's command, or 1 if it failed and the cluster does not report a status."""
    return DONE if known.status == "SUCCEEDED" else known.exit_status or FAILED


def _look_at_all(cluster: Cluster, asked: str, submission_ids: Sequence[str]) -> int:
    """Follow, query or stop the submissions of all shards, and return the first exit status that is not `DONE`.

    If there are several, following prints the state of each when it changes, and no logs.
    """
    if asked != "follow" or len(submission_ids) == 1:
        return next(filter(None, [_look(cluster, asked, submission_id) for submission_id in submission_ids]), DONE)
    try:
        known = cluster.wait(submission_ids, lambda job: print(f"{job.submission_id}: {job.status}", flush=True))
    except KeyboardInterrupt:
        print("\nthe jobs continue; --follow shows them again, --stop ends them", file=sys.stderr)
        return FAILED
    return next(filter(None, map(_exit_status, known)), DONE)


if __name__ == "__main__":
    sys.exit(main())
