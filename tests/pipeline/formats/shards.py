"""Small sources made on the spot: encoded images, tars and Parquet files."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from configs.schema import PromptConfig
from configs.source import SourceConfig
from pipeline.formats.uris import Fetcher
from pipeline.manifest import datasource, freezing
from pipeline.prompts.row_options import PromptOptions
from pipeline.rows import schemas
from pipeline.rows.schemas import RowError


def encode(
    colour: Any = "red", size: tuple[int, int] = (8, 6), kind: str = "PNG", mode: str = "RGB", **save: Any
) -> bytes:
    """One encoded image of a single colour."""
    buffer = io.BytesIO()
    Image.new(mode, size, colour).save(buffer, kind, **save)
    return buffer.getvalue()


def tar_bytes(members: list[tuple[str, bytes]], mode: str = "w", **options: Any) -> bytes:
    """A tar archive with these members in this order."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode, format=tarfile.PAX_FORMAT, **options) as tar:  # type: ignore[call-overload]
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


def read_all(
    source: SourceConfig, prompt: str | PromptConfig | PromptOptions = "Describe.", keep: tuple[str, ...] = ()
) -> pa.Table:
    """Everything that the read tasks of a source give, checked to be one table of the right schema each."""
    template = PromptConfig(text=prompt) if isinstance(prompt, str) else prompt
    prompt_options = PromptOptions(template) if isinstance(template, PromptConfig) else template
    frozen = freezing.freeze(source, prompt_options, keep)
    spans = datasource.SpanDatasource(source, frozen, tuple(prompt_options.fields()))
    tables = []
    for task in spans.get_read_tasks(1):
        blocks = list(task())
        assert len(blocks) == 1
        assert blocks[0].schema.equals(schemas.read_schema(frozen.keep), check_metadata=True)
        blocks[0].validate(full=True)
        tables.append(blocks[0])
    return pa.concat_tables(tables)


def images_of(table: pa.Table) -> list[list[bytes | str]]:
    """The images of every row as bytes or URIs."""
    return [
        [image["uri"] if image["bytes"] is None else image["bytes"] for image in cell]
        for cell in table["images"].to_pylist()
    ]


def fetched(table: pa.Table, source: SourceConfig) -> pa.Table:
    """The table with every image that a URI names fetched, as the decoding stage does it."""
    fetcher = Fetcher(source, freezing.freeze(source, PromptOptions(PromptConfig(text="x"))).root)
    cells, codes, messages = [], [], []
    for row in table.to_pylist():
        cell, code, message = [], row["error_type"], row["error_message"]
        contents = fetcher.fetch(image["uri"] for image in row["images"] if image["uri"] is not None)
        for image in row["images"]:
            data = image["bytes"] if image["uri"] is None else contents[image["uri"]]
            if isinstance(data, RowError):
                code, message, cell = data.code, data.message, []
                break
            cell.append({"bytes": data})
        cells.append(cell)
        codes.append(code)
        messages.append(message)
    for name, values in (("images", cells), ("error_type", codes), ("error_message", messages)):
        index = table.schema.get_field_index(name)
        table = table.set_column(index, table.schema.field(index), pa.array(values, table.schema.field(index).type))
    return table


def outcomes(table: pa.Table) -> dict[str, str]:
    """Error code (empty for none) by sample id; two rows of one id are an error."""
    ids = table["sample_id"].to_pylist()
    assert len(set(ids)) == len(ids), ids
    return dict(zip(ids, table["error_type"].to_pylist(), strict=True))
