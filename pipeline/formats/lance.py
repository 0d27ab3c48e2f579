"""Reads the source kind `lance`, with the package `pylance`: a folder `*.lance` at the version that was listed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from configs.load import ConfigError
from pipeline.formats.arrow import check_batch
from pipeline.formats.kind import Chunk, FilePiece, Index, Needs, ReadSpec, Sample, SourceKind, Survey, survey_of
from pipeline.formats.limits import max_rows
from pipeline.formats.tables import DistinctSchemas, chunks_of, columns_to_read
from pipeline.storage import access
from pipeline.storage.listing import Listed, hidden_reason, is_folder
from pipeline.storage.retries import retried

SUFFIX = ".lance"
BATCH_ROWS = 128
BATCH_BYTES, BUFFER_BYTES, READ_AHEAD = 64 * 1024 * 1024, 256 * 1024 * 1024, 1
"""Bytes of a batch and of what is read before it is decoded, and batches and fragments that are read ahead."""


def library(dotted: str = "source.kind") -> Any:
    """Return the module `lance`; ConfigError with the dotted path of a field if it is not installed."""
    try:
        import lance
    except ImportError:
        raise ConfigError(f"{dotted}: 'lance' needs the library of that name: pip install pylance") from None
    return lance


def _dataset(filesystem: Any, root: str, name: str, version: str | None = None) -> Any:
    url = access.unstripped(filesystem, access.join(root, name))
    return library().dataset(url, version=None if version is None else int(version))


def list_datasets(filesystem: Any, paths: Sequence[str]) -> tuple[str, Iterator[Listed]]:
    """Return the folder of the datasets and an iterator over them; `paths` is one dataset or one folder of datasets.

    Raises ConfigError if `pylance` is missing or there are several paths, and OSError if the path cannot be listed. The
    iterator raises ConfigError for a dataset that cannot be opened."""
    library()
    if len(paths) != 1:
        raise ConfigError("source.path: give one dataset, or one folder of datasets, for source.kind 'lance'")
    root = paths[0].rstrip("/")
    if root.endswith(SUFFIX):
        root, _, name = root.rpartition("/")
        names = [name]
    else:
        if not is_folder(filesystem, root):
            raise FileNotFoundError(2, "it does not exist", root)
        entries = retried(lambda: filesystem.ls(root, detail=False))
        folder_names = (str(entry).rstrip("/").rpartition("/")[2] for entry in entries)
        names = sorted(name for name in folder_names if name.endswith(SUFFIX) and not hidden_reason(name))

    def iterate() -> Iterator[Listed]:
        for name in names:
            try:
                dataset = _dataset(filesystem, root, name)
                size = sum(map(_num_bytes, dataset.get_fragments()))
            except Exception as error:
                raise ConfigError(f"source.path: {name} cannot be opened: {access.reason_of(error)}") from None
            yield Listed(name, size, str(dataset.version))

    return root, iterate()


def _num_bytes(fragment: Any) -> int:
    return sum(file.file_size_bytes or 0 for file in fragment.data_files())


def survey(filesystem: Any, root: str, files: pa.Table, needs: Needs) -> Survey:
    """Count rows and bytes of every fragment, and read the schemas."""
    distinct = DistinctSchemas()
    indices: list[Index | None] = []
    for path, version in zip(files["path"].to_pylist(), files["token"].to_pylist(), strict=True):
        dataset = _dataset(filesystem, root, path, version)
        distinct.add(dataset.schema, path)
        index = Index()
        for fragment in dataset.get_fragments():
            index.add(fragment.count_rows(), _num_bytes(fragment), 0)
        is_possible = sum(index.rows) <= max_rows(sum(index.num_bytes))
        indices.append(index if is_possible else None)  # the read task reports the error
    return survey_of(indices, distinct.schemas)


def read(filesystem: Any, spec: ReadSpec, piece: FilePiece) -> Iterator[Chunk]:
    """Read the rows of a piece from the listed version of the dataset."""
    dataset = _dataset(filesystem, spec.root, piece.path, piece.token)
    num_rows = dataset.count_rows()
    if num_rows > max_rows(piece.size_bytes):
        raise ValueError(f"the dataset promises {num_rows} rows in {piece.size_bytes} bytes")
    stop = num_rows if piece.stop is None else piece.stop
    names = columns_to_read(spec, dataset.schema.names)
    if not names:
        yield Chunk([Sample(index) for index in range(piece.start, stop)], [])
        return
    options = {"offset": piece.start, "limit": stop - piece.start, "scan_in_order": True}
    options |= {"batch_size": BATCH_ROWS, "batch_size_bytes": BATCH_BYTES, "io_buffer_size": BUFFER_BYTES}
    options |= {"batch_readahead": READ_AHEAD, "fragment_readahead": READ_AHEAD}
    first = piece.start
    for batch in dataset.scanner(columns=names, **options).to_batches():
        check_batch(batch)
        yield from chunks_of(spec, piece.path, batch, first)
        first += batch.num_rows
    if first != stop:
        raise ValueError(f"the dataset ends at row {first}, and had {stop} when the job began")


KIND = SourceKind("lance", (SUFFIX,), survey, read, list_datasets)
