"""Attempts of a job without Ray and without models: real sources and outputs, and results that are easy to predict."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from actors.events import Events
from actors.serving.engine_thread import Waits
from configs.schema import CaptionJobConfig
from pipeline.cluster.partitions import IN_PROCESS
from pipeline.manifest.freezing import needs_of
from pipeline.manifest.manifest_parts import reopen
from pipeline.media.image_decoding import decode_table
from pipeline.output.inventory import Inventory
from pipeline.output.publishing import Publisher
from pipeline.output.writer import MAX_TASKS, Writer
from pipeline.reports.summary import Summary
from pipeline.rows.schemas import result_schema
from pipeline.run.execution import AttemptResult, close, opening_record
from pipeline.run.finalize import finalize
from pipeline.run.job_plan import DEFAULT_RESUME, ResumeOptions
from pipeline.run.plan import Plan, checked
from pipeline.run.reporting import ReportWriter
from pipeline.run.resume import AttemptState, begin, fingerprints_of
from pipeline.storage.output_dir import OutputDir
from pipeline.storage.shard import WHOLE, Shard


class _FrontEnd:
    special_tokens = ("<image>",)
    useful_side_px = None


class PairInfo:
    """What is known of a pair that does not exist."""

    target_id, drafter_id = "fake", ""
    front_end = _FrontEnd()

    def __init__(self, revision: str = "t0") -> None:
        self.revisions = {"target": revision}


def job(source: dict[str, Any], output: Path | str, **sections: Any) -> CaptionJobConfig:
    """A caption job of a fake pair."""
    data = {
        "source": source,
        "prompt": {"text": "What?"},
        "model": {"target": {"path": "fake"}},
        "pool": {"slots": 4, "batch_rows": 4},
        **sections,
        "sink": {"path": str(output), "rows_per_file": 10, "max_unsaved_seconds": 0.0, **sections.get("sink", {})},
    }
    return CaptionJobConfig.model_validate_json(json.dumps(data))


def plan_of(
    config: CaptionJobConfig,
    resume: ResumeOptions = DEFAULT_RESUME,
    limit: int | None = None,
    revision: str = "t0",
    shard: Shard = WHOLE,
) -> Plan:
    """The plan, checked against what the output holds."""
    info: Any = PairInfo(revision)
    output = OutputDir(config.sink.path, shard)
    needs = needs_of(config.source, Plan(config, info, None, output).prompt_options, config.sink.keep_columns)  # type: ignore[arg-type]
    reopened = reopen(needs, output, resume.accept_touched)
    plan = Plan(config, info, reopened.manifest, output, limit, resume)
    return checked(plan, reopened.gone, IN_PROCESS, probe_output=False)


def answered(table: pa.Table, attempt: int, fails: Callable[[str], bool], partial: bool = False) -> pa.Table:
    """Result rows of decoded ones: the text names the row, and those that `fails` names are errors of the engine."""
    schema = result_schema(partial=partial)
    columns: list[Any] = []
    ids = table["sample_id"].to_pylist()
    codes = [code or ("engine_died" if fails(own) else "") for own, code in zip(ids, table["error_type"].to_pylist())]
    own = {
        "attempt": [attempt] * len(ids),
        "status": ["error" if code else "success" for code in codes],
        "error_type": codes,
        "error_message": [f"about {code}" if code else "" for code in codes],
        "generated_text": ["" if code else f"text of {own}" for own, code in zip(ids, codes)],
        "telemetry": [{"num_spec_steps": 1, "num_draft_tokens": 0, "num_accepted_draft_tokens": 0}] * len(ids),
    }
    for field in schema:
        if field.name in own:
            columns.append(pa.array(own[field.name], field.type))
        elif field.name in table.column_names:
            columns.append(table[field.name].combine_chunks())
        else:
            columns.append(pa.array(["x" if field.type == pa.string() else 0] * len(ids), field.type))
    return pa.table(columns, schema=schema)


def start(plan: Plan) -> tuple[Plan, AttemptState]:
    """Take the attempt."""
    return begin(plan, opening_record(plan))


def make_rows(plan: Plan, attempt: int, fails: Callable[[str], bool] = lambda own: False) -> list[pa.Table]:
    """What the graph would make of what is left to do, in batches."""
    batches: list[pa.Table] = []
    for span in range(plan.datasource.num_spans):
        decoded = decode_table(plan.datasource.read(span), plan.decode_options, plan.present_ids)
        table = answered(decoded, attempt, fails, plan.config.reports_partial)
        batches += [table.slice(first, 4) for first in range(0, table.num_rows, 4)]
    return batches


def save(plan: Plan, begun: AttemptState, batches: list[pa.Table], max_tasks: int = MAX_TASKS) -> None:
    """Save and publish these and what waits."""
    waiting = plan.prior.inventory.spooled if plan.prior else []
    with Writer(begun.publisher, plan.config.sink, waiting, begun.next_numbers, max_tasks=max_tasks) as writer:
        for batch in batches:
            writer.add([batch], batch.num_rows, batch.nbytes)


def end(plan: Plan, begun: AttemptState) -> Inventory:
    """Bring the output to rest."""
    return finalize(plan, begun.publisher, fingerprints_of(plan.output), begun.next_numbers)


def write_summary(plan: Plan, done: Summary, publisher: Publisher) -> None:
    """Write the summary and the report of an attempt that has computed no rows."""
    report = ReportWriter(plan, publisher, {}, Events(plan.identity.stamp(publisher.attempt), False))
    close(plan, done, AttemptResult(1.0, Waits(), publisher, report, None))


def run(
    config: CaptionJobConfig,
    resume: ResumeOptions = DEFAULT_RESUME,
    fails: Callable[[str], bool] = lambda own: False,
    num_batches: int | None = None,
    **options: Any,
) -> Plan:
    """A whole attempt; one that is killed after `num_batches` spooled batches publishes nothing and resolves
    no repeated ids."""
    plan, begun = start(plan_of(config, resume, **options))
    batches = make_rows(plan, begun.publisher.attempt, fails)
    if num_batches is not None:
        for number, batch in enumerate(batches[:num_batches]):
            begun.publisher.spool(number, [batch])
        return plan
    save(plan, begun, batches)
    end(plan, begun)
    return plan


def rows_in(folder: Path) -> dict[str, dict[str, Any]]:
    """All rows of `data/` or `errors/` by id, each there once."""
    rows_by_id: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*")):
        for row in pq.read_table(path).to_pylist():
            assert row["sample_id"] not in rows_by_id, f"{row['sample_id']} is twice in {folder}"
            rows_by_id[row["sample_id"]] = row
    return rows_by_id


def at_rest(output: Path) -> tuple[set[str], set[str]]:
    """Ids in `data/` and in `errors/`, after checking that none is in both and that nothing waits."""
    good, bad = rows_in(output / "data"), rows_in(output / "errors")
    assert not good.keys() & bad.keys()
    assert all(not row["error_type"] for row in good.values())
    assert all(row["error_type"] for row in bad.values())
    spools = [output / "_job/spool", *output.glob("_job/shards/*/spool")]
    assert [path for spool in spools for path in spool.rglob("*") if path.is_file()] == []
    return set(good), set(bad)
