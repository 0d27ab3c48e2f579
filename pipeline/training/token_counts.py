"""Counts the tokens of texts from job outputs, Parquet columns and text files."""

from __future__ import annotations

import io
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from configs.load import ConfigError
from models.loading.vocabulary import TokenCount
from pipeline.storage import access
from pipeline.storage.first_touch import check_stores
from pipeline.storage.listing import is_file, is_folder

TEXTS_AT_ONCE = 512
MAX_LINE_BYTES = 16 * 1024 * 1024
SHARES = (0.9, 0.95, 0.99, 0.999)


@dataclass(frozen=True)
class Counted:
    """Counted tokens, most frequent first, and the number of texts."""

    tokens: tuple[TokenCount, ...]
    num_texts: int

    @property
    def num_tokens(self) -> int:
        return sum(token.count for token in self.tokens)

    def size_for(self, share: float) -> int:
        """Return the smallest number of most frequent tokens that cover this share (0 to 1) of all occurrences."""
        totals = itertools.accumulate(token.count for token in self.tokens)
        return min(len(self.tokens), 1 + sum(1 for count in totals if count < share * self.num_tokens))


def count_tokens(texts: Iterable[str], tokenizer: Any) -> Counted:
    """Count the tokens of texts, without special tokens, by a transformers `tokenizer`; empty texts are skipped."""
    counts: Counter[int] = Counter()
    num_texts = 0
    nonempty = filter(None, texts)
    while some := list(itertools.islice(nonempty, TEXTS_AT_ONCE)):
        num_texts += len(some)
        for ids in tokenizer(some, add_special_tokens=False, verbose=False)["input_ids"]:
            counts.update(ids)
    ordered = sorted(counts, key=lambda number: (-counts[number], number))
    names = tokenizer.convert_ids_to_tokens(ordered)
    tokens = (TokenCount(number, name, counts[number]) for number, name in zip(ordered, names, strict=True))
    return Counted(tuple(tokens), num_texts)


def texts_of(sources: Sequence[str], column: str) -> Iterator[str]:
    """Yield the texts in `column` of job outputs and Parquet files, and the lines of other files; ConfigError if a
    source is missing, lacks the column, or cannot be read."""
    for source in sources:
        location = access.shown(source)
        check_stores("SOURCE", [source])
        try:
            filesystem, path = access.open_url(source, "SOURCE")
            if not is_file(filesystem, path) and not is_folder(filesystem, path):
                raise ConfigError(f"{location}: there is no such file or folder")
            for file in _files_of(filesystem, path, location):
                yield from _texts_in(filesystem, file, column)
        except ConfigError:
            raise
        except Exception as error:  # drivers and pyarrow raise any error
            raise ConfigError(f"{location}: it cannot be read: {access.reason_of(error, source)}") from None


def _files_of(filesystem: Any, path: str, location: str) -> list[str]:
    if not is_folder(filesystem, path):
        return [path]
    for folder in (access.join(path, "data"), path):
        names = filesystem.ls(folder, detail=False) if is_folder(filesystem, folder) else []
        if files := sorted(name for name in names if name.endswith(".parquet")):
            return files
    raise ConfigError(f"{location}: it is no output of a job: it holds no data/*.parquet")


def _texts_in(filesystem: Any, path: str, column: str) -> Iterator[str]:
    with access.open_file(filesystem, path) as file:
        if not path.endswith(".parquet"):
            lines = io.BufferedReader(file) if isinstance(file, io.RawIOBase) else file
            while line := lines.readline(MAX_LINE_BYTES):
                yield line.decode("utf-8", errors="replace").strip()
            return
        parquet = pq.ParquetFile(file)
        schema, name = parquet.schema_arrow, path.rpartition("/")[2]
        if column not in schema.names:
            raise ConfigError(f"{name}: it has no column {column!r}; it has {', '.join(schema.names[:20])}")
        kind = schema.field(column).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise ConfigError(f"{name}: its column {column!r} holds {kind}, and no text")
        for batch in parquet.iter_batches(TEXTS_AT_ONCE, columns=[column]):
            yield from filter(None, batch.column(0).to_pylist())
