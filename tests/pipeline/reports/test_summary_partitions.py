"""Tests that a summary that is counted in partitions of files, in any process, equals one counted from all rows."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.serving.engine_thread import Waits
from pipeline.cluster.partitions import Partition, Workers
from pipeline.output import files as result_files
from pipeline.output.files import Format
from pipeline.output.publishing import Publisher
from pipeline.reports import summary
from pipeline.reports.summary import Summary
from pipeline.rows.schemas import TELEMETRY
from pipeline.storage.output_dir import OutputDir
from pipeline.synthesis.summary import ImageSummary

WAITS = Waits(1.0, 2.0, 3.0)
SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("sample_id", "source", "method", "status", "error_type")),
        *(
            (name, pa.int64())
            for name in ("row_index", "attempt", "num_generated_tokens", "clip_index", "prompt_index")
        ),
        ("telemetry", TELEMETRY),
    ]
)
EXTRAS = json.dumps(
    {
        "controller": {
            "num_off_steps": 1,
            "num_measuring_steps": 2,
            "by_batch_size": {
                "4": {"levels": {"0": 3, "2": 5}, "num_promised_steps": 2, "tokens_per_s": 8, "plain_tokens_per_s": 4}
            },
        }
    }
)
"""Telemetry of a controller; all sums over rows are exact in floating point."""
TELEMETRY_VALUES = st.fixed_dictionaries(
    {
        "num_spec_steps": st.integers(0, 50),
        "num_draft_tokens": st.integers(0, 50),
        "num_accepted_draft_tokens": st.integers(0, 50),
        "degraded": st.booleans(),
        "acceptance_histogram": st.lists(st.integers(0, 9), max_size=4),
        **{name: st.integers(0, 1000).map(float) for name in ("prefill_ms", "draft_ms", "verify_ms")},
        "extras": st.sampled_from(["", EXTRAS]),
        "target_forwards": st.integers(0, 9),
    }
)
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "method": st.sampled_from(["chain", "plain"]),
            "status": st.sampled_from(["success", "error", "truncated"]),
            "error_type": st.sampled_from(["", "", "engine_died", "broken_image"]),
            "attempt": st.integers(1, 2),
            "num_generated_tokens": st.integers(0, 99),
            "clip_index": st.sampled_from([None, 0, 1]),
            "prompt_index": st.sampled_from([None, 0, 1]),
            "telemetry": TELEMETRY_VALUES,
        }
    ),
    max_size=12,
)


class Elsewhere(Workers):
    """Runs every partition as another process would: on copies."""

    def map(
        self,
        function: Callable[[Any], Any],
        partitions: Sequence[Partition[Any]],
        work_s: float,
        what: str,
        dotted: str = "",
    ) -> Iterator[Any]:
        for partition in partitions:
            copied = pickle.loads(pickle.dumps((function, partition.item)))
            yield pickle.loads(pickle.dumps(copied[0](copied[1])))


def table_of(rows: list[dict[str, Any]]) -> pa.Table:
    located_rows = (
        {"sample_id": f"f#{row}", "source": "f", "row_index": row, **fields} for row, fields in enumerate(rows)
    )
    return pa.Table.from_pylist(list(located_rows), SCHEMA)


@pytest.mark.parametrize("kind", [Summary, ImageSummary])
@pytest.mark.parametrize("workers", [Workers(), Elsewhere()], ids=["here", "elsewhere"])
@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.lists(ROWS, max_size=6), per_partition=st.integers(1, 4))
def test_the_sum_of_partitions_is_the_count_of_all_rows(
    tmp_path_factory, monkeypatch, kind: type[Summary], workers: Workers, files: list[Any], per_partition: int
) -> None:
    monkeypatch.setattr(result_files, "PARTITION_FILES", per_partition)
    output = OutputDir(str(tmp_path_factory.mktemp("out")))
    for attempt in (1, 2):
        output.take_attempt({}, attempt)
    publisher = Publisher(output, Format(SCHEMA), 2, "f")
    for number, rows in enumerate(files):
        publisher.publish_rows(("data", "errors")[number % 2], number // 2, table_of(rows))
    whole = kind("job", "chain", "exact", 2.0, WAITS, attempt=2)
    whole.add_rows(pa.concat_tables([SCHEMA.empty_table(), *map(table_of, files)]))
    totals = summary.count(output, kind("job", "chain", "exact", 2.0, WAITS), workers)
    assert asdict(totals) == asdict(whole)
    assert totals.to_json() == whole.to_json()
