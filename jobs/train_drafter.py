"""`python -m jobs.train_drafter`: train an EAGLE or Medusa head, or a layer-cut drafter, for a target on rows.

Runs in one process, or on several workers under Ray Train; a killed run resumes if the same command is run again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.training.learner import check_target
from configs.load import ConfigError, load_job
from configs.training import TrainDrafterJobConfig
from files.installation import command
from jobs.terminal.arguments import add_job_file, new_parser, take_job_file
from jobs.terminal.exit_status import DONE, FAILED, NO_RESULT, REFUSED, TRAINING, in_help
from jobs.terminal.refusals import print_failure, refuse
from pipeline.cluster import signals
from pipeline.resources.resolve import Resources, resolve
from pipeline.run.external_parts import external_names, install_external
from pipeline.storage import access, checkpoints, retries
from pipeline.storage.checkpoints import CheckpointRevisions
from pipeline.training.feed import sole_cache
from pipeline.training.inputs import Inputs, open_inputs
from pipeline.training.output import DONE as RESULT
from pipeline.training.output import check_folder, claim_output, sole_run
from pipeline.training.run import NoUsableRows, TrainingRun, Worker
from pipeline.training.workers import on_device, ray_job, train_on_workers

__all__ = ["DONE", "FAILED", "REFUSED", "describe", "main", "run"]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    example = "train_zoo_medusa source.path=SCENES output.path=out/medusa"
    parser = new_parser("train-drafter", f"{__doc__}\n{in_help(TRAINING)}", example)
    add_job_file(parser)
    add = parser.add_argument_group("before a run").add_argument
    add("--dry-run", action="store_true", help="check everything, print the plan, start nothing and write nothing")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one job from the command line and return the exit status."""
    known = parser()
    arguments = take_job_file(known, known.parse_intermixed_args(argv))
    again = [*command("train-drafter"), "--config", str(arguments.config), *arguments.overrides]
    go_on = f"resume from its last checkpoint with: {shlex.join(again)}"
    try:
        with signals.catch_signals() as stop:
            job = load_job(TrainDrafterJobConfig, arguments.config, tuple(arguments.overrides))
            install_external(external_names(job), arguments.config.parent)
            if arguments.dry_run:
                print(*describe(*_checked(job)), sep="\n")
                return DONE
            measured = run(job)
    except ConfigError as error:
        return refuse(error, arguments.config, arguments.overrides)
    except NoUsableRows as error:
        print_failure(f"the training failed: {error}")
        return NO_RESULT
    except KeyboardInterrupt:
        if stop.number is None:
            raise
        print(f"the job was stopped by {stop.name}; {go_on}", file=sys.stderr)
        return stop.status
    except Exception:  # a bad row does not end a job, so the full traceback is printed
        traceback.print_exc()
        print(f"the job failed; {go_on}", file=sys.stderr)
        return FAILED
    print(json.dumps(measured, indent=1))
    kind = "model" if job.head.kind == "layer_cut" else job.head.kind
    place = "target" if kind == "mtp" else "drafter"
    print(f"drafter       {job.output.path} (as model.{place}.path, with method.drafter.kind={kind})")
    return DONE


def _checked(job: TrainDrafterJobConfig) -> tuple[TrainDrafterJobConfig, Inputs, str, Resources]:
    """Return the job with its revisions pinned, its rows, the revision of its target and its resources. Writes nothing.

    Raises:
        ConfigError: the target, the source or the output folder cannot be used.
    """
    with retries.planning():
        resources = resolve(job, ray_job(job) if job.workers.count > 1 else None, "workers.ray_address")
        job = resources.apply(on_device(job))
        inputs = open_inputs(job)
        job, checked = checkpoints.check(
            job, lambda local_job: CheckpointRevisions({"target": check_target(local_job)}), job.workers.count == 1
        )
        revision = checked.revisions["target"]
        inputs.check_target(job, revision)
        check_folder(job, inputs, revision)
    return job, inputs, revision, resources


def describe(job: TrainDrafterJobConfig, inputs: Inputs, revision: str, resources: Resources) -> list[str]:
    """Return the plan of a training as lines of text."""
    manifest, training = inputs.manifest, job.training
    files = f"{manifest.num_files:,} file{'' if manifest.num_files == 1 else 's'}, {manifest.num_bytes / 1e6:,.1f} MB"
    lines = {
        "source": f"{job.source.kind} {access.shown(manifest.root)}: {files}",
        "target": f"{job.target.path}@{revision}",
        "drafter": f"{job.head.kind}, {training.num_steps:,} steps of {training.batch_rows:,} rows",
        **({"gpus": line} if (line := resources.line()) else {}),
        "output": job.output.path,
    }
    return [f"{label:<8} {value}" for label, value in lines.items()]


def run(job: TrainDrafterJobConfig) -> dict[str, Any]:
    """Train, measure on held-out rows, write the head and `training.json`, and return the measurements.

    Raises:
        ConfigError: the output belongs to another run, or the target or the source is invalid.
        NoUsableRows: no row can be learned from.
    """
    with retries.planning():
        job, inputs, revision, resources = _checked(job)
        output = claim_output(job, inputs, revision)
    if line := resources.line():
        print(f"gpus: {line}", file=sys.stderr, flush=True)
    with sole_run(output), sole_cache(job, output):
        if job.workers.count > 1:
            train_on_workers(job, output)
        else:
            alone = TrainingRun(job, output, Worker())
            alone.train()
            alone.finish()
    measured: dict[str, Any] = json.loads(Path(output.path(RESULT)).read_text(encoding="utf-8"))["measured"]
    return measured


if __name__ == "__main__":
    sys.exit(main())
