"""Writes result lines of OpenAI's batch format: a file for each file of the source, when all of its samples have rows.

    {"id": …, "custom_id": …, "response": {"status_code": 200, "body": {"object": "chat.completion", …}}, "error": null}
    {"id": …, "custom_id": …, "response": null, "error": {"code": "broken_image", "message": …}}

`custom_id` is the row's id. Lines are in the order of the source's rows, and a function of the results alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actors.results import UNFINISHED
from configs.load import ConfigError
from configs.output import CAPTION_COLUMN, OpenAIBatchExportConfig
from pipeline.exports.ledger import ExportLedger, ExportPart, PartOutcome, state_of
from pipeline.exports.own_folder import OwnFolder, target_tree
from pipeline.exports.rows import json_bytes, parts_of_sources, read_rows, rows_of
from pipeline.output.recorded_job import RecordedJob
from pipeline.storage import access
from pipeline.storage.output_dir import OutputDir
from pipeline.storage.tree import Tree

SUFFIX = ".results.jsonl"
BYTE_S = 2e-8
ROWS_AT_ONCE = 50_000
"""Rows of a file that are in memory at the same time."""
COLUMNS = ("error_type", "error_message", "finish_reason", CAPTION_COLUMN, "num_input_tokens", "num_generated_tokens")


@dataclass(frozen=True)
class OpenAIBatch(OwnFolder):
    """The export of result lines; `created` is the time of the job's first attempt, in seconds since 1970."""

    output: OutputDir
    tree: Tree
    model: str
    fingerprint: str
    created: int

    @classmethod
    def of(cls, job: RecordedJob[Any], config: OpenAIBatchExportConfig, dotted: str) -> OpenAIBatch:
        """Check the job; ConfigError for several rows per sample, and for files that are one sample each."""
        if job.config.source.kind in ("images", "videos"):
            raise ConfigError(
                f"{dotted}: a file of results is written for each file of requests, and source.kind is "
                f"{job.config.source.kind!r}; exports of kind dataset take all sources"
            )
        if job.multiplies_rows:
            raise ConfigError(f"{dotted}: a sample of the job has several rows, and a request has one result")
        tree, model = target_tree(job, config.path, f"{dotted}.path"), access.shown(job.config.model.target.path)
        return cls(job.output, tree, model, job.fingerprint, _created(job.views))

    def parts(self) -> list[ExportPart]:
        """Return a part for each file of the source whose samples all have rows."""
        return parts_of_sources(self.output, BYTE_S)

    def export(self, item: tuple[str, Sequence[str]]) -> PartOutcome:
        """Write the results of the source's file of this path; the second value names the published files with them."""
        path, names = item
        num_rows = 0
        with self.tree.writing(path + SUFFIX) as file:
            for row in self._rows(path, names):
                file.write(json_bytes(self._line(row)) + b"\n")
                num_rows += 1
        return PartOutcome(num_rows)

    def finish(self, ledger: ExportLedger) -> None:
        """Files of lines have no common file."""

    def _rows(self, path: str, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield the row of each sample of a file in order; a result comes before an error row of the same sample."""
        indices = {name: self._of(path, name)["row_index"].to_numpy() for name in names}
        ordered = np.unique(np.concatenate(list(indices.values())))
        for first in range(0, len(ordered), ROWS_AT_ONCE):
            low, high = ordered[first], ordered[min(first + ROWS_AT_ONCE, len(ordered)) - 1]
            tables = []
            for name in names:
                if ((low <= indices[name]) & (indices[name] <= high)).any():
                    table = self._of(path, name, COLUMNS)
                    is_inside = pc.and_(
                        pc.greater_equal(table["row_index"], int(low)), pc.less_equal(table["row_index"], int(high))
                    )
                    tables.append(table.filter(is_inside))
            rows: dict[int, dict[str, Any]] = {}
            for row in rows_of(pa.concat_tables(tables)):
                if not row["error_type"] or row["row_index"] not in rows:
                    rows[row["row_index"]] = row
            yield from (rows[index] for index in sorted(rows))

    def _of(self, path: str, name: str, columns: Sequence[str] = ()) -> pa.Table:
        table = read_rows(self.output, name, columns)
        return table.filter(pc.equal(table["source"], path))

    def _line(self, row: dict[str, Any]) -> dict[str, Any]:
        own_id = state_of([self.fingerprint, row["source"], str(row["row_index"])])
        line = {"id": f"batch_req_{own_id}", "custom_id": row["sample_id"], "response": None, "error": None}
        if row["error_type"]:
            return line | {"error": {"code": row["error_type"], "message": row["error_message"]}}
        num_input, num_generated = row["num_input_tokens"] or 0, row["num_generated_tokens"] or 0
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": row[CAPTION_COLUMN]},
            "logprobs": None,
            "finish_reason": "length" if row["finish_reason"] in UNFINISHED else "stop",
        }
        body = {
            "id": f"chatcmpl-{own_id}",
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice],
            "usage": {
                "prompt_tokens": num_input,
                "completion_tokens": num_generated,
                "total_tokens": num_input + num_generated,
            },
        }
        return line | {"response": {"status_code": 200, "request_id": own_id, "body": body}}


def _created(views: Sequence[OutputDir]) -> int:
    """Return the time of the earliest attempt; 0 if no record has it."""
    times = []
    for view in views:
        for attempt in view.list_attempts()[:1]:
            with contextlib.suppress(KeyError, TypeError, ValueError):
                times.append(int(datetime.fromisoformat(view.read_attempt(attempt)["started_at"]).timestamp()))
    return min(times, default=0)
