"""Figures of single samples, which paired tests need: the sums behind every ratio of `benchmarks.methods`.

A row is one sample of one method in one scenario. Ratios of a metric are Σ numerator / Σ denominator over samples.
pyarrow is imported when a file is read or written, because tables are also made on machines without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.results import FOLDER

SAMPLES = FOLDER / "samples"
KEYS = ("method", "scenario", "sample")
SUMS = (
    *("num_tokens", "num_steps", "num_accepted", "num_drafted", "num_relaxed", "num_target_forwards"),
    *("num_right", "num_stated", "words_shared", "words_total"),
)
"""Columns of counts; `num_right` … `words_total` are null for samples that are not scored."""
FLAG = "equal"
"""Column that holds whether the tokens are those of plain decoding at the same temperature."""
Row = dict[str, Any]


def samples_file(name: str) -> Path:
    return SAMPLES / f"{name}.parquet"


def write_samples(path: Path, rows: Sequence[Row]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [
            *(pa.field(name, pa.dictionary(pa.int16(), pa.string())) for name in KEYS),
            *(pa.field(name, pa.int32()) for name in SUMS),
            pa.field(FLAG, pa.bool_()),
        ]
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), path, compression="zstd")


def read_samples(path: Path) -> list[Row]:
    """Return all rows of a file; none if it does not exist."""
    if not path.exists():
        return []
    import pyarrow.parquet as pq

    rows: list[Row] = pq.read_table(path).to_pylist()
    return rows
