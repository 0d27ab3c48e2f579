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
from pipeline.reports.result_tables import added, list_tables, open_result
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
MAX_PROMPT_CHARS = 600
MAX_REPLICAS = 8
"""Maximum number of images of one prompt in one item; further replicas have an item of their own."""
MAX_BYTES = 3_500_000
"""Maximum number of bytes of texts and thumbnails in the page; rows beyond them are left out."""

ResultRow = Mapping[str, Any]
Images = Sequence[NDArray[np.uint8]]
"""RGB images (height, width, 3)."""
Shown = tuple[str, Images] | tuple[str, Images, str]
"""The id of a sample, its images, and its prompt if it is not a column of the row."""


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
    status: str = ""
    prompt: str = ""
    lines: list[str] = field(default_factory=list)
    """Lines below the images, one each; empty if the images have none."""

    def join(self, other: GalleryItem) -> None:
        """Add another image of the same prompt."""
        if len(self.lines) == 1:
            self.sample_id = self.sample_id.rpartition("#")[0] or self.sample_id
        self.lines += other.lines
        self.histogram = added(self.histogram, other.histogram)
        self.facts = [f"{len(self.lines)} images of the prompt"]

    @property
    def num_bytes(self) -> int:
        """Size in the page, without markup and images."""
        texts = (self.sample_id, self.source, self.error_type, self.prompt, *self.facts, *self.lines)
        texts += tuple(text for _, text in self.texts)
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
    pictures: Callable[[Sequence[ResultRow]], Iterator[Shown]] | None = None,
    max_bytes: int = MAX_BYTES,
) -> Gallery:
    """Return the gallery of rows with `SAMPLE_COLUMNS`, in order; `pictures` yields images by sample id. Adjacent
    images of one prompt are one item."""
    items: list[GalleryItem] = []
    by_id: dict[str, GalleryItem] = {}
    remaining, num_shown, last = max_bytes, 0, ""
    for row in rows:
        item = _item(row)
        remaining -= item.num_bytes
        if remaining < 0:
            break
        num_shown += 1
        prompt_id = "" if row["error_type"] else row.get("prompt_id") or ""
        if prompt_id and prompt_id == last and len(items[-1].lines) < MAX_REPLICAS:
            items[-1].join(item)
        else:
            items.append(item)
        last = prompt_id
        by_id[item.sample_id] = items[-1]
    for sample_id, images, *prompt in pictures(rows[:num_shown]) if pictures is not None else ():
        shown = by_id.get(sample_id)
        if shown is None:
            continue
        if prompt and not shown.prompt:
            shown.prompt = cut_text(str(prompt[0]), MAX_PROMPT_CHARS)
            remaining -= len(escape(shown.prompt).encode("utf-8", "replace"))
        for image in images[:MAX_IMAGES_PER_ROW]:
            uri = thumbnail_uri(image)
            remaining -= len(uri)
            if remaining < 0:
                return Gallery(items, len(rows) - num_shown)
            shown.images.append(uri)
    return Gallery(items, len(rows) - num_shown)


def cut_text(text: str, max_chars: int) -> str:
    """Return a text of at most `max_chars` characters and an ellipsis."""
    return text if len(text) <= max_chars else f"{text[:max_chars]}…"


def _item(row: ResultRow) -> GalleryItem:
    telemetry = row.get("telemetry") or {}
    facts = [f"{row['num_generated_tokens']:,} tokens"]
    histogram: list[int] = []
    if telemetry.get("num_draft_tokens") and (steps := telemetry["num_spec_steps"]):
        facts += [f"{steps:,} steps", f"acceptance length {telemetry['mean_acceptance_length']:.2f}"]
        histogram = list(telemetry["acceptance_histogram"])
    facts += [f"fails {code}" for code in row.get("failed_checks") or ()]
    prompt = row.get("prompt") or (f"class {row['label']}" if row.get("label") is not None else "")
    lines: list[str] = []
    if row["error_type"]:
        texts, facts = [("", row["error_message"])], []
    else:
        text = row.get("generated_text")
        texts = [] if text is None else [("", text.strip())]
        lines = [_line(row)] if row.get("prompt_id") else []
        if (loss := row.get("audit_loss")) is not None:
            texts = [(row["method"], (text or "").strip()), ("plain", row["audit_text"].strip())]
            facts.append(f"loss {loss:.2f}")
    cut = [(label, cut_text(text, MAX_TEXT_CHARS)) for label, text in texts]
    own_id, source = row["sample_id"][:MAX_TEXT_CHARS], row.get("source") or ""
    return GalleryItem(
        *(own_id, source, row["error_type"], cut, facts, histogram),
        status=row["status"],
        prompt=cut_text(prompt, MAX_PROMPT_CHARS),
        lines=lines,
    )


def _line(row: ResultRow) -> str:
    """Return number, seed and guidance of a generated image."""
    parts = [f"#{row.get('replica') or 0}"]
    parts += [f"seed {row['seed']}"] if row.get("seed") is not None else []
    parts += [f"guidance {row['guidance_scale']:g}"] if row.get("guidance_scale") is not None else []
    return " · ".join(parts)


def thumbnail_uri(image: NDArray[np.uint8]) -> str:
    """Return a small JPEG of an RGB image (height, width, 3) as a data URI."""
    picture = Image.fromarray(image)
    picture.thumbnail((SIDE_PX, SIDE_PX))
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=75)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
