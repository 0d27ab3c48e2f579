"""Chooses rows of an output for the report's gallery, and makes their thumbnails, with bounds on rows and bytes."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from markupsafe import escape
from numpy.typing import NDArray
from PIL import Image

from pipeline.reports.live import SAMPLE_COLUMNS, audited_places
from pipeline.reports.result_tables import list_tables, open_result
from pipeline.storage.output_dir import DATA, ERRORS, OutputDir

MAX_ROWS, MAX_ROWS_LIMITED = 48, 500
"""Maximum number of rows of the gallery of a job, and of a job with `--limit`."""
MAX_FILES, MAX_ERROR_FILES = 8, 4
MAX_ERRORS = 12
"""Maximum number of error rows of the gallery without `--limit`."""
ORDER = ("row_index", "clip_index", "prompt_index", "replica")
BATCH_ROWS = 64
MAX_SCANNED_ROWS = 2_048
"""Maximum number of rows of a file among which audited rows are searched."""
MAX_IMAGES_PER_ROW = 4
SIDE_PX = 320
"""Longer side of the thumbnails, twice their displayed size."""
MAX_TEXT_CHARS = 4_000
MAX_BYTES = 3_500_000
"""Maximum number of bytes of texts and thumbnails in the page; rows beyond them are left out."""

ResultRow = Mapping[str, Any]
Images = Sequence[NDArray[np.uint8]]
"""RGB images (height, width, 3)."""


@dataclass
class GalleryItem:
    """One row of the gallery. `texts` are (label, text); a lone text has no label."""

    sample_id: str
    source: str
    error_type: str
    texts: list[tuple[str, str]]
    facts: list[str]
    histogram: list[int]
    images: list[str] = field(default_factory=list)
    """Data URIs."""

    @property
    def num_bytes(self) -> int:
        """Size in the page, without markup and images."""
        texts = (self.sample_id, self.source, self.error_type, *self.facts, *(text for _, text in self.texts))
        return sum(len(escape(text).encode("utf-8", "replace")) for text in texts)


@dataclass
class Gallery:
    items: list[GalleryItem]
    num_left_out: int = 0


def choose_rows(output: OutputDir, max_rows: int, max_errors: int, pictures: Sequence[str] = ()) -> list[ResultRow]:
    """Read the first rows of evenly spaced files of an output, `BATCH_ROWS` at a time, in the order of the source.

    At most `max_errors` rows are error rows. `pictures` are further columns.
    """
    columns = (*SAMPLE_COLUMNS, *ORDER, *pictures)
    errors = _rows(output, ERRORS, max_errors, columns)
    rows = [*_rows(output, DATA, max_rows - min(len(errors), max_rows // 4), columns), *errors]
    return sorted(rows[:max_rows], key=lambda row: (row["source"], *(row.get(name) or 0 for name in ORDER)))


def _rows(output: OutputDir, folder: str, max_rows: int, columns: Sequence[str]) -> list[ResultRow]:
    names = list_tables(output, (folder,))
    count = min(len(names), MAX_FILES if folder == DATA else MAX_ERROR_FILES)
    chosen = [names[index * len(names) // count] for index in range(count)]
    rows: list[ResultRow] = []
    for index, name in enumerate(chosen):
        wanted = -(-(max_rows - len(rows)) // (count - index))
        with open_result(output, name, columns) as (parquet, there):
            rows += _first(parquet.iter_batches(BATCH_ROWS, columns=there), max(1, wanted))
    return rows


def _first(batches: Iterator[pa.RecordBatch], wanted: int) -> list[ResultRow]:
    """Return the first rows, half of them audited if so many are found within `MAX_SCANNED_ROWS`."""
    audited: list[ResultRow] = []
    others: list[ResultRow] = []
    num_rows = 0
    for batch in batches:
        num_rows += batch.num_rows
        indices = audited_places(batch)[: -(-wanted // 2) - len(audited)]
        audited += batch.take(pa.array(indices, pa.int64())).to_pylist()
        rest = sorted(set(range(batch.num_rows)) - set(indices))[: wanted - len(others)]
        others += batch.take(pa.array(rest, pa.int64())).to_pylist()
        is_searched = "audit_loss" not in batch.schema.names or 2 * len(audited) >= wanted
        if len(others) >= wanted and (is_searched or num_rows >= MAX_SCANNED_ROWS):
            break
    return [*audited, *others][:wanted]


def make_gallery(
    rows: Sequence[ResultRow],
    pictures: Callable[[Sequence[ResultRow]], Iterator[tuple[str, Images]]] | None = None,
    max_bytes: int = MAX_BYTES,
) -> Gallery:
    """Return the gallery of rows with `SAMPLE_COLUMNS`, in order; `pictures` yields images by sample id."""
    items: list[GalleryItem] = []
    remaining = max_bytes
    for row in rows:
        item = _item(row)
        remaining -= item.num_bytes
        if remaining < 0:
            break
        items.append(item)
    by_id = {item.sample_id: item for item in items}
    for sample_id, images in pictures(rows[: len(items)]) if pictures is not None else ():
        for image in images[:MAX_IMAGES_PER_ROW] if sample_id in by_id else ():
            uri = thumbnail_uri(image)
            remaining -= len(uri)
            if remaining < 0:
                return Gallery(items, len(rows) - len(items))
            by_id[sample_id].images.append(uri)
    return Gallery(items, len(rows) - len(items))


def _item(row: ResultRow) -> GalleryItem:
    telemetry = row.get("telemetry") or {}
    facts = [row["status"], f"{row['num_generated_tokens']:,} tokens"]
    histogram: list[int] = []
    if telemetry.get("num_draft_tokens") and (steps := telemetry["num_spec_steps"]):
        facts += [f"{steps:,} steps", f"acceptance length {telemetry['mean_acceptance_length']:.2f}"]
        histogram = list(telemetry["acceptance_histogram"])
    facts += [f"fails {code}" for code in row.get("failed_checks") or ()]
    if row["error_type"]:
        texts, facts = [("", row["error_message"])], []
    else:
        text = row.get("generated_text")
        prompt = row.get("prompt") or (f"class {row['label']}" if row.get("label") is not None else "")
        texts = [("", prompt if text is None else text.strip())]
        if (loss := row.get("audit_loss")) is not None:
            texts = [(row["method"], texts[0][1]), ("plain", row["audit_text"].strip())]
            facts.append(f"loss {loss:.2f}")
    cut = [(label, text if len(text) <= MAX_TEXT_CHARS else f"{text[:MAX_TEXT_CHARS]}…") for label, text in texts]
    return GalleryItem(
        row["sample_id"][:MAX_TEXT_CHARS], row.get("source") or "", row["error_type"], cut, facts, histogram
    )


def thumbnail_uri(image: NDArray[np.uint8]) -> str:
    """Return a small JPEG of an RGB image (height, width, 3) as a data URI."""
    picture = Image.fromarray(image)
    picture.thumbnail((SIDE_PX, SIDE_PX))
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=75)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
