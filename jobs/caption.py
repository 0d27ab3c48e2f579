"""`python -m jobs.caption`: one YAML is one job; caption what its source holds and write it beside its telemetry.

Exit status: 0 done, 1 the job failed, 2 refused (one clear message, nothing was started).
"""

from __future__ import annotations

import argparse
import functools
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from configs.load import ConfigError, load_job
from configs.schema import CaptionJob
from pipeline import preview, progress, ray_session, summary
from pipeline.datasink import ParquetSink
from pipeline.graph import caption_dataset
from pipeline.layout import DATA, ERRORS
from pipeline.media import decode_table, pixels
from pipeline.plan import Plan, describe, first_prompt, make_plan
from pipeline.provenance import code_revision, versions

DONE, FAILED, REFUSED = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one job from the command line and return the exit status."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    try:
        config = load_job(CaptionJob, arguments.config, tuple(arguments.overrides))
        return dry_run(config, arguments.limit) if arguments.dry_run else run_and_show(config, arguments)
    except ConfigError as error:
        print(f"refused: {error}", file=sys.stderr)
        return REFUSED


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line as a namespace; argparse itself exits with 2 where it does not fit."""
    parser = argparse.ArgumentParser(prog="python -m jobs.caption", description=__doc__)
    parser.add_argument("--config", required=True, type=Path, help="the job's YAML")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="values that replace the YAML's")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, start nothing")
    parser.add_argument("--limit", type=_positive, metavar="N", help="only the first N samples, with a preview page")
    return parser.parse_intermixed_args(argv)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def dry_run(config: CaptionJob, limit: int | None) -> int:
    """Print the plan and the first rendered prompt; write nothing and start nothing."""
    plan = make_plan(config, limit, probe_output=False)
    print(describe(plan))
    print(first_prompt(plan))
    return DONE


def run_and_show(config: CaptionJob, arguments: argparse.Namespace) -> int:
    """Run the job; print its summary, where the output is, and how to run it again."""
    plan = make_plan(config, arguments.limit)
    print(f"captioning {plan.manifest.num_files:,} files into {plan.output.shown()}", flush=True)
    try:
        done = run(plan)
    except Exception:  # whatever ends a job is shown whole; a bad row never does
        traceback.print_exc()
        print(f"the job failed; what it wrote until then is in {plan.output.shown()}", file=sys.stderr)
        return FAILED
    print(summary.show(done))
    print(f"output        {plan.output.shown()}")
    if arguments.limit is not None:
        print(f"preview       {plan.output.shown('_job/preview.html')}")
    print(f"run it again  {run_again(arguments)}")
    return DONE


def run_again(arguments: argparse.Namespace) -> str:
    """The command that repeats this run into another folder."""
    overrides = [text for text in arguments.overrides if not text.startswith("sink.path=")]
    limit = ["--limit", str(arguments.limit)] if arguments.limit is not None else []
    command = ["python", "-m", "jobs.caption", "--config", str(arguments.config), *overrides, *limit]
    return shlex.join([*command, "sink.path=NEW"])


def run(plan: Plan) -> summary.Summary:
    """Run a plan under Ray, write `_job/`, and return the summary of what was written.

    Raises:
        ConfigError: another job has taken the output meanwhile.
        RuntimeError: rows are missing from the output.
    """
    config = plan.config
    attempt = plan.output.take_attempt(opening_record(plan))
    plan.manifest.write(plan.output)
    write_provenance(plan)
    sink = ParquetSink(plan.output, config.sink, plan.job_id, attempt, plan.manifest.keep)
    with (
        ray_session.session(config.job),
        progress.shown(plan.datasource.num_samples, config.job.progress) as tally,
    ):
        dataset = caption_dataset(
            config,
            plan.datasource,
            plan.datasource.num_spans,
            functools.partial(decode_table, options=plan.decode_options),
            plan.schema,
            plan.stamp(attempt),
            tally=tally,
        )
        began_s = time.monotonic()
        dataset.write_datasink(sink)
        wall_s = time.monotonic() - began_s
    done = summary.summarise(plan.output, plan.job_id, config.method.label, config.method.verify_mode, wall_s)
    check_accounted(plan, done.num_samples)
    plan.output.write_json("_job/summary.json", done.to_json())
    if plan.limit is not None:
        plan.output.write_bytes("_job/preview.html", preview_page(plan).encode())
    return done


def opening_record(plan: Plan) -> dict[str, Any]:
    """What `_job/attempts/` keeps of a run that begins."""
    return {
        "job_id": plan.job_id,
        "config_fingerprint": plan.fingerprint,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "code_revision": code_revision(),
        "limit": plan.limit,
    }


def write_provenance(plan: Plan) -> None:
    """Write the resolved configuration and the versions into `_job/`."""
    text = yaml.safe_dump(plan.config.resolved(), sort_keys=False, allow_unicode=True)
    plan.output.write_bytes("_job/config.yaml", text.encode())
    record = {**versions(), "code_revision": code_revision(), "model_revisions": plan.pair.revisions}
    plan.output.write_json("_job/versions.json", record)


def check_accounted(plan: Plan, num_written: int) -> None:
    """Refuse to call a job done whose output does not hold every sample that was planned."""
    expected = plan.datasource.num_samples
    if expected is not None and num_written != expected:
        raise RuntimeError(f"{expected} samples were read and {num_written} rows are in {plan.output.shown()}")


def preview_page(plan: Plan) -> str:
    """The page over the samples of a limited run, in the order of the source."""
    decoded = plan.decode_first(min(plan.limit or preview.MAX_ROWS, preview.MAX_ROWS))
    ids = decoded.column("sample_id").to_pylist()
    images = {sample_id: pixels(cell) for sample_id, cell in zip(ids, decoded.column("images").to_pylist())}
    place = {sample_id: index for index, sample_id in enumerate(ids)}
    columns = [name for name in plan.schema.names if name not in plan.manifest.keep.names]
    rows = [row for table in summary.read_tables(plan.output, (DATA, ERRORS), columns) for row in table.to_pylist()]
    rows.sort(key=lambda row: place.get(row["sample_id"], len(place)))
    note = f"{len(rows)} samples · {plan.config.method.label} · target {plan.pair.target_id}"
    return preview.render_page(plan.job_id, note, rows, images)


if __name__ == "__main__":
    sys.exit(main())
