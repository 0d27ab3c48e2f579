"""Generates the reference of outputs: Arrow columns, error codes with the modules that use them, and metrics."""

from __future__ import annotations

import ast
from pathlib import Path

import pyarrow as pa

from actors.metrics import DRIFT_METRICS, METRICS
from docgen.markdown import page, table
from pipeline.rows.columns import CAPTIONS, DIFFERENCES, TELEMETRY, Columns
from pipeline.rows.schemas import ERROR_CODES, STATUS_VALUES
from pipeline.synthesis.rows import IMAGES

SEARCHED = ("pipeline", "actors", "decoding", "models")


def rows_of(columns: Columns) -> list[list[str]]:
    """Return name, type and meaning of every column."""
    rows = []
    for name, kind, meaning in columns:
        type_name = f"list of {kind.value_type}" if pa.types.is_list(kind) else str(kind)
        rows.append([f"`{name}`", "struct" if name == "telemetry" else type_name, meaning])
    return rows


def columns_page() -> str:
    """Render the columns of caption and image outputs, and the telemetry struct of both."""
    head = ("column", "type", "meaning")
    return page(
        "Output columns",
        "The schema of `data/` and `errors/`. String columns hold empty strings, never nulls. Columns named by "
        "`sink.keep_columns` follow at the end with their own types. The schema's version is in the Parquet footer as "
        f"`draftfleet.schema_version`. `status` is one of {', '.join(f'`{value}`' for value in STATUS_VALUES)}; "
        "`blocked` and `skipped` are reserved.",
        "## Captions",
        table(head, rows_of(CAPTIONS)),
        "## Images",
        table(head, rows_of(IMAGES)),
        "## `telemetry`",
        table(head, rows_of(TELEMETRY)),
        "In every row: `num_generated_tokens` = 1 + `num_accepted_draft_tokens` + `num_spec_steps` − (1 if "
        "`ended_inside_path`).",
        "## Differences",
        "The Parquet files that [`jobs.verify`](../guides/verify.md) writes: every verified row that is not equal.",
        table(head, rows_of(DIFFERENCES)),
    )


def error_codes_page(root: Path) -> str:
    """Render the error codes, their meanings, and the modules that raise them."""
    used: dict[str, list[str]] = {code: [] for code in ERROR_CODES}
    for path in (path for package in SEARCHED for path in sorted((root / package).rglob("*.py"))):
        name = path.relative_to(root).as_posix()
        if name not in ("pipeline/rows/schemas.py", "decoding/errors.py"):  # they define the codes
            for code in _codes_in(ast.parse(path.read_text())):
                used[code].append(f"`{name}`")
    rows = [[f"`{code}`", meaning, ", ".join(used[code])] for code, meaning in ERROR_CODES.items()]
    return page(
        "Error codes",
        "The values of the column `error_type`, from `ERROR_CODES` in `pipeline/rows/schemas.py`. Codes may be "
        "added and are never renamed.",
        table(("code", "meaning", "raised in"), rows),
    )


def _codes_in(module: ast.Module) -> set[str]:
    """Return the codes that a module uses, as a string or by a constant such as `ROW_TIMEOUT`."""
    names = {code.upper(): code for code in ERROR_CODES}
    codes = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in names:
            node.value = ast.Constant("")  # the definition of the constant is no use of it
        elif isinstance(node, ast.Constant) and node.value in ERROR_CODES:
            codes.add(str(node.value))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names:
            codes.add(names[node.id])
    return codes


def metrics_page() -> str:
    """Render the Prometheus metrics of the engine actors and of the driver."""
    rows = [
        [f"`{metric.exported(name)}`", metric.kind, f"`{metric.label}`" if metric.label else "", metric.meaning]
        for name, metric in (METRICS | DRIFT_METRICS).items()
    ]
    return page(
        "Metrics",
        "Exported by every node through Ray, from `actors/metrics.py`. All metrics have the labels `job_id` and "
        "`method`; see [monitoring](../guides/monitoring.md).",
        table(("metric", "kind", "label", "meaning"), rows),
    )
