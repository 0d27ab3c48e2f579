"""Chooses rows of an output by a hash of seed and place in the source, and reads their results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.output.recorded_job import PLACE, RecordedJob, keys_of
from pipeline.rows.columns import CAPTIONS

OUTPUT = "OUTPUT"
"""How messages name the path of the output."""
ROUND_SAMPLES = 50_000
"""Samples that are verified together; their results are in memory."""
_NAMES = (
    *("sample_id", *PLACE, "clip_index", "prompt_index"),
    *("finish_reason", "retry_index", "generated_text", "token_ids"),
)
RECORDED = pa.schema([(name, kind) for name, kind, _ in CAPTIONS if name in _NAMES])
"""Columns of a result that are compared; `token_ids` is null if the job did not keep its tokens, and `retry_index`
without retries. Of an image, `token_ids` are its codes, and the text is empty."""
CODES = "codes"


@dataclass(frozen=True)
class SampleShare:
    """A random share of the samples: those whose hash of `seed`, source file and row index is below `share`.

    Every sample is chosen independently of the others, of the order of files, and of results that a running job adds.
    """

    share: float
    seed: int = 0

    def chosen(self, rows: pa.Table, part: int = 0, num_parts: int = 1) -> pa.Table:
        """Return the chosen results in one of `num_parts` equal ranges of hashes."""
        limit = min(self.share, 1.0) * 2.0**64
        keys = keys_of(rows, f"{self.seed}").astype(np.float64)
        low, high = (limit * number / num_parts for number in (part, part + 1))
        is_last = part + 1 == num_parts and self.share >= 1.0  # rounding may make a hash 2⁶⁴
        return rows.filter(pa.array((keys >= low) & ((keys < high) | is_last)))


def count_chosen(job: RecordedJob[Any], choice: SampleShare) -> tuple[int, int]:
    """Return the number of results, and of chosen results."""
    num_rows = num_chosen = 0
    for table in job.results(PLACE, OUTPUT):
        num_rows += table.num_rows
        num_chosen += choice.chosen(table).num_rows if table.num_rows else 0
    return num_rows, num_chosen


def rounds(job: RecordedJob[Any], choice: SampleShare, num_chosen: int) -> Iterator[pa.Table]:
    """Yield the chosen results (`RECORDED`), about `ROUND_SAMPLES` at a time; every round reads the whole output. All
    results of one sample are in one round."""
    num_parts = max(1, -(-num_chosen // ROUND_SAMPLES))
    for part in range(num_parts):
        tables = [RECORDED.empty_table()]
        names = [*RECORDED.names, CODES] if job.makes_images else RECORDED.names
        for table in job.results(names, OUTPUT):
            if table.num_rows:
                tables.append(recorded_columns(choice.chosen(table, part, num_parts)))
        yield job.inside(pa.concat_tables(tables).combine_chunks())


def recorded_columns(table: pa.Table) -> pa.Table:
    """Return the columns `RECORDED` of results, which are captions or images; null if they do not have them."""
    if CODES in table.column_names:
        table = table.rename_columns(["token_ids" if name == CODES else name for name in table.column_names])
        texts = pa.array([""] * table.num_rows, RECORDED.field("generated_text").type)
        table = table.append_column("generated_text", texts)
    columns = [
        table[field.name].cast(field.type) if field.name in table.column_names else pa.nulls(table.num_rows, field.type)
        for field in RECORDED
    ]
    return pa.table(columns, schema=RECORDED)


def has_tokens(rows: pa.Table) -> bool:
    """Return whether results have stored tokens."""
    return bool(rows.num_rows) and pc.any(pc.is_valid(rows["token_ids"])).as_py()
