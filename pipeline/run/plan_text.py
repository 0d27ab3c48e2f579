"""Describes a plan as text, for dry runs and the start of a job."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from actors.auto.trial import block_rows
from actors.generate import render_prompt
from actors.results import RowRefused
from configs.drafters import NoDrafterConfig
from configs.load import ConfigError
from configs.method import AutoMethodConfig, MethodConfig
from configs.pool import ActorPoolConfig, EnginePoolConfig
from files.plurals import counted
from pipeline.rows.schemas import ERROR_ADVICE
from pipeline.run.job_plan import JobPlan
from pipeline.run.plan import Plan
from pipeline.storage import access
from pipeline.storage.first_touch import bounded
from pipeline.storage.listing import describe_skipped
from pipeline.storage.shard import WHOLE

MAX_PROBLEMS = 2
"""Refused rows that a message quotes."""
NUM_ROWS_LOOKED_AT = 20
FIRST_ROWS_S = 6.0
"""Longest time to read and decode them."""


def describe(plan: Plan) -> str:
    """Return the plan as lines of text."""
    sampling, pool, output = plan.config.sampling, plan.config.pool, plan.config.output
    how = f"temperature {sampling.temperature:g}" if sampling.temperature else "greedy"
    lines = {
        "sampling": f"{how}, at most {sampling.max_new_tokens} new tokens",
        **_native_line(plan.pair.has_mtp, plan.pair.target_id),
        **plan.pair.generation.lines(),
        **({} if output is None else {"texts": f"follow output.{next(iter(output.content()))}"}),
        "actors": f"{engines(pool)}, contexts up to {pool.max_context_tokens:,} tokens",
    }
    return show_plan(plan, lines)


def _native_line(has_mtp: bool | None, target_id: str) -> dict[str, str]:
    """Return a line about the MTP layer that a method asks for; nothing if it is not known yet."""
    if has_mtp is None:
        return {}
    return {"mtp": f"a layer of {target_id}" if has_mtp else f"{target_id} has no layer: left out of the candidates"}


def show_plan(plan: JobPlan, lines: dict[str, str]) -> str:
    """Return the plan as text with one label and value per line; `lines` are specific to the kind of job."""
    method, keep = plan.config.method, plan.config.sink.keep_columns
    parts = _method(method) if method.auto is None else _trial(method.auto, plan.config.pool.slots)
    lines = {
        **source_lines(plan),
        "target": plan.pair.target_id,
        "drafter": plan.pair.drafter_id or "none",
        "method": f"{method.label} ({method.verify_mode}): {parts}",
        **({f"  {entry.label}": _method(entry) for entry in method.methods} if method.auto is not None else {}),
        **lines,
        **({"code": ", ".join(plan.external.values())} if plan.external else {}),
        **({"gpus": text} if (text := plan.resources.line()) else {}),
        **({"warning": plan.warning} if plan.warning else {}),
        "output": f"{plan.output.shown()} (data/, errors/, _job/)",
        **({"kept": ", ".join(keep)} if keep else {}),
    }
    return "\n".join(f"{label:<8} {value}" for label, value in lines.items())


def source_lines(plan: JobPlan) -> dict[str, str]:
    """Return the lines (label → value) about the job and its source."""
    config, manifest = plan.config, plan.manifest
    num_samples = plan.datasource.num_samples
    rows = "an unknown number of rows" if num_samples is None else counted(num_samples, "row")
    if plan.prior is not None:
        rows += " left to do"
    if plan.limit is not None:
        rows += f" (--limit {plan.limit})"
    return {
        "job": f"{plan.identity.job_id}, seed {config.job.seed}",
        **({} if plan.output.shard == WHOLE else {"shard": f"{plan.output.shard}"}),
        "source": f"{config.source.kind} {access.shown(manifest.root)}: {counted(manifest.num_files, 'file')}, "
        f"{manifest.num_bytes / 1e6:,.1f} MB, {rows}, {counted(plan.datasource.num_spans, 'span')}",
        **({"skipped": describe_skipped(manifest.skipped, config.source.kind)} if manifest.skipped else {}),
    }


def actors_of(pool: ActorPoolConfig) -> tuple[str, str]:
    """Return the number of actors, and the device of each, as text."""
    number = f"{pool.min_size}" if pool.min_size == pool.max_size else f"{pool.min_size} to {pool.max_size}"
    return number, f"{pool.gpus:g} GPU" if pool.gpus else "CPU"


def engines(pool: EnginePoolConfig) -> str:
    """Describe a pool of engines as text."""
    number, device = actors_of(pool)
    slots = "as many slots as memory holds" if pool.slots == "auto" else f"{pool.slots} slots"
    batches = f"{pool.max_batches_in_flight} batches of {pool.rows_per_batch} rows in flight each"
    return f"{number} × {slots} on {device}, {batches}"


def _trial(auto: AutoMethodConfig, slots: int | Literal["auto"]) -> str:
    most = auto.max_rounds * len(auto.methods)
    blocks = f"{most} blocks of rows"
    if slots != "auto":
        rows = block_rows(slots)
        blocks = f"{most} blocks of {rows} rows or more ({most * rows:,})"
    return (
        f"each engine tries {len(auto.methods)} methods on its first rows and keeps the one that takes least time for "
        f"a sample, after {blocks} or sooner; all rows are results"
    )


def _method(method: MethodConfig) -> str:
    if isinstance(method.drafter, NoDrafterConfig):
        return "one token per step"
    parts = [f"drafter {method.drafter.kind}"]
    for name, part in (("tree", method.tree), ("acceptance", method.acceptance)):
        options = {key: value for key, value in part.model_dump().items() if key != "kind" and value}
        parts.append(" ".join([name, part.kind, *(f"{key}={value}" for key, value in options.items())]))
    return ", ".join(parts)


def first_prompt(plan: Plan) -> str:
    """Return the first rendered prompt with its sample's id. Raises ConfigError if none of the first rows can be
    used."""
    columns = ["sample_id", "messages", "error_type", "error_message"]

    def read() -> Iterator[dict[str, Any]]:
        for table in plan.decode_first(num_shown(plan)):
            yield from table.select(columns).to_pylist()

    return first_usable(read, lambda row: render_prompt(plan.pair.render, json.loads(row["messages"])))


def num_shown(plan: JobPlan) -> int:
    """Return how many rows a dry run reads to find one without an error."""
    return NUM_ROWS_LOOKED_AT if plan.limit is None else min(plan.limit, NUM_ROWS_LOOKED_AT)


def first_usable(read: Callable[[], Iterable[dict[str, Any]]], show: Callable[[dict[str, Any]], str]) -> str:
    """Return the first row without an error, formatted by `show`. Hosts of images may not answer, so it takes at most
    `FIRST_ROWS_S`. Raises ConfigError if all of the first rows have an error."""
    try:
        return bounded(lambda: _first_usable(read(), show), FIRST_ROWS_S)
    except TimeoutError:
        return f"the first rows were not read and decoded in {FIRST_ROWS_S:g} s"


def _first_usable(rows: Iterable[dict[str, Any]], show: Callable[[dict[str, Any]], str]) -> str:
    problems, codes = [], []
    for row in rows:
        code, message = row["error_type"], row["error_message"]
        if not code:
            try:
                return f"first prompt ({row['sample_id']}):\n{show(row)}"
            except RowRefused as error:
                code, message = error.code, str(error)
        problems.append(f"{row['sample_id']}: {code}: {message}")
        codes.append(code)
    if not problems:
        return "no row was read"
    advice = dict.fromkeys(ERROR_ADVICE[code] for code in codes if code in ERROR_ADVICE)
    which = "the only row cannot" if len(problems) == 1 else f"none of the first {len(problems)} rows can"
    reasons = "; ".join([*problems[:MAX_PROBLEMS], *advice])
    raise ConfigError(f"source.path: {which} be used: {reasons}")
