"""Reads Parquet files of outputs and exports with one error for all kinds of damage.

For damaged files pyarrow raises ArrowInvalid, ArrowNotImplementedError, OSError without a number, UnicodeDecodeError,
KeyError, MemoryError and others; errors of the store look similar, and are raised as they are.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.storage import access

MAX_ROWS_PER_BYTE = 1000
"""A footer with more rows than this per byte of the file counts as damaged."""


class DamagedParquet(ValueError):
    """Raised for a file that is no Parquet file, or is damaged; the message is the reason."""


@contextlib.contextmanager
def open_parquet(filesystem: Any, path: str) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file for reading in the context, with page checksums verified.

    Raises:
        DamagedParquet: for any error of the file's content, at its opening or in the context.
        OSError: the file is missing, or the store fails.
    """
    with access.open_file(filesystem, path) as file:
        noted = _Noted(file)
        with _damage(noted):
            yield _opened(pa.PythonFile(noted, mode="r"), access.size_of(file))


def read_parquet(data: Any, columns: list[str] | None = None) -> pa.Table:
    """Read a Parquet file in memory; raise DamagedParquet as `open_parquet` does."""
    with _damage(None):
        return _opened(pa.BufferReader(data), memoryview(data).nbytes).read(columns)


def num_rows_of(data: Any) -> int:
    """Return the number of rows in the footer of a file in memory; raise DamagedParquet as `open_parquet` does."""
    with _damage(None):
        return int(_opened(pa.BufferReader(data), memoryview(data).nbytes).metadata.num_rows)


def _opened(source: Any, num_bytes: int) -> pq.ParquetFile:
    parquet = pq.ParquetFile(source, page_checksum_verification=True)
    metadata = parquet.metadata
    rows = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
    if min(rows, default=0) < 0 or sum(rows) != metadata.num_rows:
        raise DamagedParquet(f"its footer promises {metadata.num_rows:,} rows, and its row groups {sum(rows):,}")
    if metadata.num_rows > MAX_ROWS_PER_BYTE * num_bytes:
        raise DamagedParquet(f"its footer promises {metadata.num_rows:,} rows in {num_bytes:,} bytes")
    return parquet


@contextlib.contextmanager
def _damage(noted: _Noted | None) -> Iterator[None]:
    """Convert errors of pyarrow to DamagedParquet, unless they are those of reading the file."""
    try:
        yield
    except DamagedParquet:
        raise
    except Exception as error:
        if noted is not None and noted.error is not None:
            raise noted.error from None
        raise DamagedParquet(access.reason_of(error)) from None


class _Noted(io.RawIOBase):
    """A file for reading that keeps the last error of the store."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file = file
        self.error: Exception | None = None

    def _do(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._file, name)(*arguments)
        except Exception as error:
            self.error = error
            raise

    def read(self, num_bytes: int | None = -1) -> bytes:
        data: bytes = self._do("read", -1 if num_bytes is None else num_bytes)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position: int = self._do("seek", offset, whence)
        return position

    def tell(self) -> int:
        position: int = self._do("tell")
        return position

    def readable(self) -> bool:
        return True

    seekable = readable
