"""Small sources made on the spot: encoded images, tars and Parquet files."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from configs.schema import Prompt, Source
from pipeline import datasource, manifest, prompts, rows


def encode(
    colour: Any = "red", size: tuple[int, int] = (8, 6), kind: str = "PNG", mode: str = "RGB", **save: Any
) -> bytes:
    """One encoded image of a single colour."""
    buffer = io.BytesIO()
    Image.new(mode, size, colour).save(buffer, kind, **save)
    return buffer.getvalue()


def tar_bytes(members: list[tuple[str, bytes]], mode: str = "w") -> bytes:
    """A tar archive with these members in this order."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode, format=tarfile.PAX_FORMAT) as tar:  # type: ignore[call-overload]
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def write_parquet(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    """A Parquet file with these columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, **options)
    return path


def read_all(source: Source, prompt: str | Prompt = "Describe.", keep: tuple[str, ...] = ()) -> pa.Table:
    """Everything that the read tasks of a source give, checked to be one table of the right schema each."""
    template = Prompt(text=prompt) if isinstance(prompt, str) else prompt
    frozen = manifest.freeze(source, template, keep)
    spans = datasource.SpanDatasource(source, frozen, tuple(prompts.placeholders(template)))
    tables = []
    for task in spans.get_read_tasks(1):
        blocks = list(task())
        assert len(blocks) == 1
        assert blocks[0].schema.equals(rows.read_schema(frozen.keep), check_metadata=True)
        blocks[0].validate(full=True)
        tables.append(blocks[0])
    return pa.concat_tables(tables)


def outcomes(table: pa.Table) -> dict[str, str]:
    """Error code (empty for none) by sample id; two rows of one id are an error."""
    ids = table["sample_id"].to_pylist()
    assert len(set(ids)) == len(ids), ids
    return dict(zip(ids, table["error_type"].to_pylist(), strict=True))
