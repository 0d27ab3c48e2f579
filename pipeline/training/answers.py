"""Chooses the answers of a job's output on which a run trains, stores them in its folder, and joins them with rows.

The answers are the first `max_rows` by a hash of their row's place in the source, so the choice does not depend on the
order of files. A run stores them before its first step and reads the stored ones ever after, so a running job may write
more. In memory are at most `max_rows` answers, and twice as many while they are chosen, of at most
`training.max_tokens` tokens of 4 bytes each, besides the result files that are read together
(`pipeline.output.files.PARTITION_FILES`).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from configs.load import ConfigError
from configs.schema import CaptionJobConfig
from pipeline.manifest.datasource import SpanDatasource
from pipeline.output.recorded_job import RecordedJob, keys_of
from pipeline.storage import access
from pipeline.storage.output_dir import OutputDir
from pipeline.training.rows import TOKEN_IDS

MAX_ANSWERS = 200_000
"""Maximum number of answers of a run without `training.max_rows`: 80 MB at 100 tokens each."""
MIN_TOKENS = 2
"""Fewest tokens of an answer: the first token of an answer is never drafted."""
ANSWERS = "_job/answers.parquet"
COUNTS_KEY = b"draftfleet.answers"
_COLUMNS = ("sample_id", "source", "row_index", "error_type", TOKEN_IDS)
_ROWS = pa.schema(
    [("sample_id", pa.string()), ("source", pa.string()), ("row_index", pa.int64()), (TOKEN_IDS, pa.list_(pa.int32()))]
)
SCHEMA = pa.schema([("key", pa.uint64()), *_ROWS])
"""`key` is the hash of `source` and `row_index`, in ascending order and without repeats."""


@dataclass(frozen=True)
class Answers:
    """Answers (`SCHEMA`), the SHA-256 of their file, and how many results were read and left out, by reason."""

    table: pa.Table
    sha256: str
    counts: dict[str, int]

    def describe(self) -> dict[str, Any]:
        """Return the identity of the answers for the run's record."""
        return {"num_rows": self.table.num_rows, "sha256": self.sha256, **self.counts}

    def joined(self, rows: pa.Table) -> pa.Table:
        """Return the answered rows of a READ table, with the column `token_ids`. Raise ConfigError for another id."""
        keys, known = keys_of(rows), self.table["key"].to_numpy()
        indices = np.minimum(np.searchsorted(known, keys), len(known) - 1)
        answered = np.flatnonzero(known[indices] == keys)
        rows, answers = rows.take(pa.array(answered)), self.table.take(pa.array(indices[answered]))
        for name in ("source", "row_index", "sample_id"):
            # A row that cannot be read has no id, and passes with its error.
            differs = pc.and_(pc.not_equal(rows[name], answers[name]), pc.equal(rows["error_type"], ""))
            for index in np.flatnonzero(differs.to_numpy()).tolist():
                here, there = ({key: table[key][index].as_py() for key in _ROWS.names[:3]} for table in (rows, answers))
                raise ConfigError(f"source: the row {here} is not the row {there} that the job has answered")
        return rows.append_column(_ROWS.field(TOKEN_IDS), answers[TOKEN_IDS])


@dataclass(frozen=True)
class AnsweredSpans:
    """Spans of the answered rows of a source; other rows are read only in files whose number of rows is unknown."""

    datasource: SpanDatasource
    answers: Answers

    @property
    def num_spans(self) -> int:
        return self.datasource.num_spans

    def read(self, span: int) -> pa.Table:
        return self.answers.joined(self.datasource.read(span, note=False))


def collect(job: RecordedJob[CaptionJobConfig], max_rows: int, max_tokens: int) -> Answers:
    """Choose the answers among all published results. Raise ConfigError if there are none, or a file is damaged."""
    counts = Counter[str]()
    chosen = SCHEMA.empty_table()
    waiting: list[pa.Table] = []
    for table in job.results(_COLUMNS, "source.path"):
        waiting.append(_answers_in(table, max_tokens, counts))
        if sum(table.num_rows for table in waiting) >= max_rows:
            chosen, waiting = _first([chosen, *waiting], max_rows), []
    chosen = job.inside(_first([chosen, *waiting], max_rows))
    if not chosen.num_rows:
        raise ConfigError(
            f"source.path: {job.output.shown()} holds no answers to learn from ({json.dumps(counts)}); start the "
            "training when the job has published results"
        )
    return _parse(_serialise(chosen, counts))


def _answers_in(table: pa.Table, max_tokens: int, counts: Counter[str]) -> pa.Table:
    """Return the usable answers of a table of results, with their keys."""
    if not table.num_rows:
        return SCHEMA.empty_table()
    lengths = pc.fill_null(pc.list_value_length(table[TOKEN_IDS]), 0)
    is_result = pc.equal(table["error_type"], "")
    is_short, is_long = pc.less(lengths, MIN_TOKENS), pc.greater(lengths, max_tokens)
    counts["num_results"] += pc.sum(is_result).as_py()
    counts["num_too_short"] += pc.sum(pc.and_(is_result, is_short)).as_py()
    counts["num_too_long"] += pc.sum(pc.and_(is_result, is_long)).as_py()
    table = table.filter(pc.and_(is_result, pc.invert(pc.or_(is_short, is_long)))).select(_ROWS.names).cast(_ROWS)
    return table.add_column(0, SCHEMA.field("key"), pa.array(keys_of(table)))


def _first(tables: list[pa.Table], max_rows: int) -> pa.Table:
    """Return the first answers by key; of several answers with one key, the first."""
    table = pa.concat_tables(tables).combine_chunks()
    table = table.take(pa.array(np.argsort(table["key"].to_numpy(), kind="stable")))
    keys = table["key"].to_numpy()
    is_new = np.ones(len(keys), bool)
    is_new[1:] = keys[1:] != keys[:-1]
    return table.take(pa.array(np.flatnonzero(is_new)[:max_rows])).combine_chunks()


def _serialise(table: pa.Table, counts: Counter[str]) -> bytes:
    sink = pa.BufferOutputStream()
    metadata = {COUNTS_KEY: json.dumps(counts, sort_keys=True).encode()}
    pq.write_table(table.replace_schema_metadata(metadata), sink, compression="zstd")
    return bytes(sink.getvalue())


def _parse(data: bytes) -> Answers:
    table = pq.read_table(pa.BufferReader(data))
    counts = json.loads(table.schema.metadata[COUNTS_KEY])
    table = table.replace_schema_metadata(None).cast(SCHEMA).combine_chunks()
    return Answers(table, hashlib.sha256(data).hexdigest(), counts)


def store(answers: Answers, output: OutputDir) -> Answers:
    """Write the answers to the run's folder, and return them as they are read there."""
    output.write_bytes(ANSWERS, _serialise(answers.table, Counter(answers.counts)))
    return load(output)


def load(output: OutputDir) -> Answers:
    """Read the answers of a run that has begun; raise ConfigError if they are missing or damaged."""
    try:
        return _parse(output.read_bytes(ANSWERS))
    except Exception as error:  # a torn file raises any error
        raise ConfigError(
            f"output.path: {output.shown(ANSWERS)} cannot be read ({access.reason_of(error)}); remove the folder to "
            "begin anew"
        ) from None
