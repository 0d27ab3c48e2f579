"""Result tables of a synthetic job, and its report as a running job makes it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from configs.pool import AcceptanceDropConfig
from pipeline.reports.drift import DriftWatch
from pipeline.reports.gallery import Gallery, ResultRow, make_gallery
from pipeline.reports.live import BatchDigest, Live
from pipeline.reports.report import JobReport
from pipeline.reports.summary import Summary
from pipeline.rows.schemas import ERROR_CODES, result_schema

DEPTH = 5
WORDS = [
    "a",
    "red",
    "small",
    "circle",
    "left",
    "of",
    "the",
    "large",
    "blue",
    "square",
    "under",
    "three",
    "green",
    "stars",
]
CODES = ("broken_image", "not_an_image", "row_timeout")


def result_row(number: int, chance: float, rng: random.Random, source: str, error: str = "") -> dict[str, Any]:
    """One row of the result schema; each draft is accepted with probability `chance`."""
    histogram = [0] * (DEPTH + 1)
    for _ in range(0 if error else rng.randint(12, 40)):
        depth = next((depth for depth in range(DEPTH) if rng.random() > chance), DEPTH)
        histogram[depth] += 1
    steps, accepted = sum(histogram), sum(depth * count for depth, count in enumerate(histogram))
    telemetry = dict.fromkeys(field.name for field in result_schema().field("telemetry").type) | {
        "num_spec_steps": steps,
        "num_draft_tokens": DEPTH * steps,
        "num_accepted_draft_tokens": accepted,
        "mean_acceptance_length": 1 + accepted / max(1, steps),
        "acceptance_histogram": histogram,
        "prefill_ms": 14.0 * (not error),
        "draft_ms": 0.9 * steps,
        "verify_ms": 3.1 * steps,
        "degraded": False,
        "extras": "{}",
    }
    filler = {pa.string(): "", pa.int64(): 0, pa.int32(): 0, pa.float64(): 0.0}
    row = {field.name: filler.get(field.type) for field in result_schema()}
    return row | {
        "sample_id": f"{source}#{number}",
        "source": source,
        "row_index": number,
        "method": "eagle+chain+exact",
        "status": "error" if error else "success",
        "error_type": error,
        "error_message": f"{ERROR_CODES[error]}: byte {rng.randint(0, 9999)}" if error in ERROR_CODES else error,
        "generated_text": "" if error else " ".join(rng.choices(WORDS, k=rng.randint(18, 60))).capitalize() + ".",
        "num_generated_tokens": accepted + steps + (not error),
        "telemetry": telemetry,
    }


def tables(num_rows: int, seed: int = 0, falls_at: float = 0.6) -> Iterator[pa.Table]:
    """Batches of 50 rows of three folders in turn; after the share `falls_at` of rows, drafts for `scans` get worse."""
    rng = random.Random(seed)
    for first in range(0, num_rows, 50):
        folder = ("photos", "scans", "charts")[first // 50 % 3]
        chance = 0.3 if folder == "scans" and first > falls_at * num_rows else 0.72
        rows = [
            result_row(first + index, chance, rng, f"{folder}/part-{first // 1000:03}.parquet", error_of(rng))
            for index in range(50)
        ]
        yield pa.Table.from_pylist(rows, schema=result_schema())


def error_of(rng: random.Random) -> str:
    return rng.choice(CODES) if rng.random() < 0.012 else ""


def live_job(
    batches: Iterator[pa.Table] | Sequence[pa.Table], bound: AcceptanceDropConfig | None = None, batch_s: float = 1.7
) -> Live:
    """The state of a job whose batches arrive every `batch_s` seconds."""
    empty = Summary("caption-0123456789abcdef", "eagle+chain+exact", "lossless", 1e-9)
    live = Live(deepcopy(empty), DriftWatch(bound))
    for number, table in enumerate(batches):
        live.add(BatchDigest.of(table, empty), 25 + batch_s * number)
        live.summary.wall_s = 25 + batch_s * (number + 1)
    return live


def picture(seed: int, side_px: int = 320) -> NDArray[np.uint8]:
    """A photograph as hard to compress as real ones: smooth colours and noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:side_px, 0:side_px] / side_px
    waves = [np.sin(rng.uniform(2, 9) * x + rng.uniform(2, 9) * y + phase) for phase in rng.uniform(0, 6, 3)]
    return (128 + 90 * np.stack(waves, -1) + rng.normal(0, 12, (side_px, side_px, 3))).clip(0, 255).astype(np.uint8)


def pictures(rows: Sequence[ResultRow]) -> Iterator[tuple[str, list[NDArray[np.uint8]]]]:
    """One image per row, four frames for every fifth."""
    for number, row in enumerate(rows):
        if not row["error_type"]:
            yield row["sample_id"], [picture(7 * number + frame) for frame in range(1 if number % 5 else 4)]


def report_of(live: Live, gallery: Gallery | None = None, state: str = "done", **values: Any) -> JobReport:
    return JobReport(
        title=live.summary.job_id,
        output="s3://bucket/captions",
        state=state,
        updated_at="2026-01-31 12:00:00 UTC",
        summary=live.summary,
        total_rows=10_000,
        live=live,
        gallery=gallery or make_gallery(live.samples, pictures),
        gallery_note="The first rows of files spread over the output.",
        **values,
    )
