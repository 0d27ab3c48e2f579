"""Draws sheets of generated images: the replicas of each prompt in a row, or two outputs side by side, with seeds.

PNG sheets have at most `MAX_PIXELS` pixels, HTML sheets about `MAX_HTML_BYTES`; prompts beyond that are left out.
"""

from __future__ import annotations

import base64
import heapq
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup
from PIL import Image, ImageDraw, ImageFont

from configs.load import ConfigError
from pipeline.media.image_decoding import decode_image
from pipeline.output.files import list_published, read_found
from pipeline.output.recorded_job import RecordedJob
from pipeline.reports.report import FOLDER, page_policy, template
from pipeline.rows.schemas import RowError
from pipeline.sheets.contact_sheet import INK, MARGIN_PX, PAPER, fit
from pipeline.storage import access
from pipeline.storage.output_dir import DATA

MAX_PIXELS = 64_000_000
MAX_HTML_BYTES = 20_000_000
MAX_ROWS = 1000
MAX_IMAGE_PIXELS = 64_000_000
THUMBNAIL_QUALITY = 88
_PLACE = ("sample_id", "source", "row_index", "prompt_id", "replica")
_SHOWN = (*_PLACE, "prompt", "label", "seed", "guidance_scale", "method", "image", "codes")


@dataclass(frozen=True)
class SheetCell:
    """One image with the line under it; None in place of the image if the output has none with this id."""

    image: Image.Image | None
    line: str


@dataclass
class SheetRow:
    """A prompt and its images; of two outputs, those of one replica are adjacent."""

    title: str
    cells: list[SheetCell] = field(default_factory=list)


@dataclass
class SheetPage:
    """Content of a sheet; `columns` names the columns of two outputs that are compared."""

    title: str
    rows: list[SheetRow]
    columns: tuple[str, ...] = ()
    note: str = ""


def make_sheet(jobs: Sequence[RecordedJob[Any]], dotted: Sequence[str], num_rows: int, side_px: int) -> SheetPage:
    """Read the images of the first `num_rows` prompts, in the order of the source, of one or two outputs.

    Raises:
        ConfigError: an output makes no images, has none yet, is damaged, or both have no prompt in common.
    """
    for job, name in zip(jobs, dotted, strict=True):
        _check(job, name)
    placed = [_places(job, name) for job, name in zip(jobs, dotted, strict=True)]
    common = set(placed[0]).intersection(*placed[1:])
    if not common:
        shown = " and ".join(job.output.shown() for job in jobs)
        what = "no image is published yet" if len(jobs) == 1 or not all(placed) else "they have no prompt in common"
        raise ConfigError(f"{' and '.join(dotted)}: {shown}: {what}")
    chosen = heapq.nsmallest(min(num_rows, MAX_ROWS), common, key=lambda prompt: placed[0][prompt])
    read = [_rows_of(job, name, set(chosen)) for job, name in zip(jobs, dotted, strict=True)]
    rows = [_sheet_row(prompt, [images.get(prompt, {}) for images in read], side_px) for prompt in chosen]
    note = f"{len(rows):,} of {len(common):,} prompts" if len(rows) < len(common) else f"{len(rows):,} prompts"
    labels = tuple(_label(job) for job in jobs)
    return SheetPage(" beside ".join(labels), rows, labels if len(jobs) > 1 else (), note)


def _check(job: RecordedJob[Any], dotted: str) -> None:
    if not job.makes_images:
        raise ConfigError(
            f"{dotted}: {job.output.shown()} holds captions, and sheets show images of synthesis jobs; "
            "_job/report.html shows captions with their images"
        )
    if not job.config.sink.images:
        raise ConfigError(f"{dotted}: {job.output.shown()} was made with sink.images: false, so it holds no images")


def _label(job: RecordedJob[Any]) -> str:
    return f"{job.config.method.label} · {job.output.shown().rstrip('/').rpartition('/')[2]}"


def _files(job: RecordedJob[Any], columns: Sequence[str], dotted: str) -> Iterable[Any]:
    for view in job.views:
        for name in list_published(view, DATA):
            table = job.checked(read_found(view, name, columns), dotted)
            if table.num_rows:
                yield view, name, table


def _places(job: RecordedJob[Any], dotted: str) -> dict[str, tuple[str, int]]:
    """Return file and row of every prompt with an image."""
    places: dict[str, tuple[str, int]] = {}
    for _, _, table in _files(job, ("prompt_id", "source", "row_index"), dotted):
        names = (table[name].to_pylist() for name in ("prompt_id", "source", "row_index"))
        places |= {prompt: (source, row) for prompt, source, row in zip(*names, strict=True)}
    return places


def _rows_of(job: RecordedJob[Any], dotted: str, chosen: set[str]) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the rows of the chosen prompts by prompt and replica."""
    rows: dict[str, dict[int, dict[str, Any]]] = {}
    for view, name, light in _files(job, ("prompt_id",), dotted):
        is_chosen = [prompt in chosen for prompt in light["prompt_id"].to_pylist()]
        if not any(is_chosen):
            continue
        table = job.checked(read_found(view, name, _SHOWN), dotted).filter(is_chosen)
        for row in table.to_pylist():
            rows.setdefault(row["prompt_id"], {})[row["replica"]] = row
    return rows


def _sheet_row(prompt: str, outputs: Sequence[dict[int, dict[str, Any]]], side_px: int) -> SheetRow:
    first = next(row for rows in outputs for row in rows.values())
    label = "" if first["label"] is None else f"class {first['label']}"
    result = SheetRow(f"{first['prompt'] or label or prompt}")
    for replica in sorted({replica for rows in outputs for replica in rows}):
        cells = [rows.get(replica) for rows in outputs]
        for number, row in enumerate(cells):
            line = f"#{replica}" if row is None else _line(row)
            if number and row and cells[0] and (equal := _equal_codes(cells[0], row)):
                line += f" · {equal}"
            result.cells.append(SheetCell(None if row is None else _picture(row, side_px), line))
    return result


def _line(row: dict[str, Any]) -> str:
    guidance = "" if row["guidance_scale"] is None else f" · guidance {row['guidance_scale']:g}"
    return f"#{row['replica']} · seed {row['seed']}{guidance}"


def _equal_codes(row: dict[str, Any], other: dict[str, Any]) -> str:
    """Return the share of equal codes of two images; empty if an output has no codes."""
    pairs = list(zip(row.get("codes") or (), other.get("codes") or ()))
    if not pairs:
        return ""
    share = sum(left == right for left, right in pairs) / max(len(row["codes"]), len(other["codes"]))
    return "equal codes" if share == 1.0 else f"{math.floor(100 * share)} % of codes equal"


def _picture(row: dict[str, Any], side_px: int) -> Image.Image | None:
    """Return the image of a row, scaled; None for a row without one, or one that cannot be decoded."""
    data = (row["image"] or {}).get("bytes")
    try:
        return None if not data else fit(decode_image(data, max_pixels=MAX_IMAGE_PIXELS), side_px)
    except RowError:
        return None


def render_png(sheet: SheetPage, side_px: int) -> bytes:
    """Draw a sheet as PNG; ConfigError if not even one prompt fits into `MAX_PIXELS`."""
    font = ImageFont.load_default(size=max(11, side_px // 14))
    line_px = math.ceil(font.getbbox("Ågjpqy")[3] * 1.2)
    columns = max(len(row.cells) for row in sheet.rows)
    width = columns * (side_px + MARGIN_PX) + MARGIN_PX
    row_px = side_px + 2 * line_px + 2 * MARGIN_PX
    head_px = (2 if sheet.columns else 1) * line_px + 2 * MARGIN_PX
    most = (MAX_PIXELS // width - head_px) // row_px
    if most < 1:
        raise ConfigError(f"--side: a row of {columns} images of {side_px} px has more than {MAX_PIXELS:,} pixels")
    rows = sheet.rows[:most]
    page = Image.new("RGB", (width, head_px + row_px * len(rows)), PAPER)
    draw = ImageDraw.Draw(page)

    def write(text: str, left: int, top: int, space_px: int) -> None:
        text = " ".join(text.split())
        while text and font.getlength(text) > space_px:
            text = text[:-2].rstrip() + "…" if len(text) > 1 else ""
        draw.text((left, top), text, INK, font)

    note = "" if len(rows) == len(sheet.rows) else f", {len(sheet.rows) - len(rows):,} more do not fit"
    write(f"{sheet.title} · {sheet.note}{note}", MARGIN_PX, MARGIN_PX, width - 2 * MARGIN_PX)
    for number, label in enumerate(sheet.columns):
        write(label, MARGIN_PX + number * (side_px + MARGIN_PX), MARGIN_PX + line_px, side_px)
    for index, row in enumerate(rows):
        top = head_px + index * row_px
        write(row.title, MARGIN_PX, top, width - 2 * MARGIN_PX)
        for number, cell in enumerate(row.cells):
            left, at = MARGIN_PX + number * (side_px + MARGIN_PX), top + line_px
            if cell.image is not None:
                offset = ((side_px - cell.image.width) // 2, (side_px - cell.image.height) // 2)
                page.paste(cell.image, (left + offset[0], at + offset[1]))
            else:
                draw.rectangle((left, at, left + side_px - 1, at + side_px - 1), outline=INK)
                write("no image", left + MARGIN_PX, at + MARGIN_PX, side_px)
            write(cell.line, left, at + side_px + 2, side_px)
    buffer = io.BytesIO()
    page.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def render_html(sheet: SheetPage) -> bytes:
    """Return a sheet as one HTML page that loads nothing; images are JPEG data URIs."""
    num_bytes = 0
    rows: list[tuple[str, list[tuple[str, str]]]] = []
    for row in sheet.rows:
        cells = [(_data_uri(cell.image), cell.line) for cell in row.cells]
        num_bytes += sum(len(uri) for uri, _ in cells)
        if num_bytes > MAX_HTML_BYTES and rows:
            break
        rows.append((row.title, cells))
    left_out = len(sheet.rows) - len(rows)
    note = sheet.note + (f", {left_out:,} more do not fit into this page" if left_out else "")
    style = (FOLDER / "sheet.css").read_text(encoding="utf-8")
    page = template("sheet.html.j2").render(
        sheet=sheet, rows=rows, note=note, style=Markup(style), policy=page_policy(style)
    )
    return page.encode("utf-8", "replace")


def _data_uri(image: Image.Image | None) -> str:
    if image is None:
        return ""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="JPEG", quality=THUMBNAIL_QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def write_sheet(sheet: SheetPage, path: str, side_px: int) -> int:
    """Write a sheet as PNG or HTML, by the suffix of `path`; return its size. ConfigError if it cannot be written."""
    data = render_png(sheet, side_px) if path.lower().endswith(".png") else render_html(sheet)
    try:
        filesystem, where = access.open_url(path, "--to")
        with filesystem.open(where, "wb") as file:
            file.write(data)
    except OSError as error:
        raise ConfigError(f"--to: {access.shown(path)} cannot be written: {access.reason_of(error)}") from None
    return len(data)
