"""A sheet shows the replicas of each prompt with seeds, two outputs side by side, and stays within its bounds."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from jobs import sheet as command
from jobs.cli import main as cli
from pipeline.output.recorded_job import read_any_job
from pipeline.sheets import sheet as sheets
from pipeline.sheets.contact_sheet import MARGIN_PX
from pipeline.sheets.sheet import make_sheet, render_html, render_png
from tests.pipeline.exports.small_jobs import image_job
from tests.pipeline.image_jobs import image_synthesis, picture, run_images

PROMPTS = ["a red cat", "<script>alert(1)</script> & co", "snow"]
SIDE_PX = 64


@pytest.fixture
def made(tmp_path: Path) -> Path:
    run_images(image_synthesis(tmp_path, PROMPTS), fails=lambda own: own == "p.txt#1#1")
    return tmp_path


def sheet_of(*outputs: Path, rows: int = 10) -> sheets.SheetPage:
    names = ["OUT", "OTHER"][: len(outputs)]
    return make_sheet([read_any_job(str(out), name) for out, name in zip(outputs, names)], names, rows, SIDE_PX)


def test_replicas_are_beside_each_other_below_their_prompt(made: Path) -> None:
    sheet = sheet_of(made / "out")
    assert [row.title for row in sheet.rows] == PROMPTS
    assert [[cell.line for cell in row.cells] for row in sheet.rows] == [
        ["#0 · seed 7 · guidance 3", "#1 · seed 7 · guidance 3"],
        ["#0 · seed 7 · guidance 3"],
        ["#0 · seed 7 · guidance 3", "#1 · seed 7 · guidance 3"],
    ]
    page = np.asarray(Image.open(io.BytesIO(render_png(sheet, SIDE_PX))).convert("RGB"))
    for number, row in enumerate(sheet.rows):
        colours = [picture(2 * number + replica)[0, 0] for replica in range(len(row.cells))]
        for colour in colours:
            assert (page == colour).all(axis=-1).sum() == SIDE_PX * SIDE_PX
    assert page.shape[1] == 2 * (SIDE_PX + MARGIN_PX) + MARGIN_PX


def test_two_outputs_are_side_by_side_with_their_share_of_equal_codes(made: Path) -> None:
    run_images(image_synthesis(made, PROMPTS, "other", sampling={"num_images_per_prompt": 2, "guidance_scale": 4.0}))
    [path, *_] = sorted((made / "other/data").glob("*.parquet"))
    table = pq.read_table(path)
    codes = [[0] * 4 + row[4:] for row in table["codes"].to_pylist()]
    index = table.schema.get_field_index("codes")
    changed = table.set_column(index, table.schema.field(index), pa.array(codes, table.schema.field(index).type))
    pq.write_table(changed.replace_schema_metadata(table.schema.metadata), path)
    sheet = sheet_of(made / "out", made / "other")
    assert len(sheet.columns) == 2
    assert sheet.title == "plain · out beside plain · other"
    lines = [cell.line for cell in sheet.rows[0].cells]
    assert lines[1].endswith("equal codes")  # its codes are 0
    assert lines[3].endswith("75 % of codes equal")
    missing = sheet.rows[1].cells
    assert (missing[2].image, missing[3].image is None) == (None, False)


def test_rows_beyond_the_option_or_the_bounds_are_left_out_and_counted(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sheet = sheet_of(made / "out", rows=2)
    assert ([row.title for row in sheet.rows], sheet.note) == (PROMPTS[:2], "2 of 3 prompts")
    whole = sheet_of(made / "out")
    height = Image.open(io.BytesIO(render_png(whole, SIDE_PX))).height
    monkeypatch.setattr(sheets, "MAX_PIXELS", 152 * (height - 10))
    cut = Image.open(io.BytesIO(render_png(whole, SIDE_PX)))
    assert cut.height < height
    assert cut.height * cut.width <= sheets.MAX_PIXELS
    monkeypatch.setattr(sheets, "MAX_HTML_BYTES", 1)
    assert "2 more do not fit into this page" in render_html(whole).decode()


def test_html_escapes_prompts_and_may_load_nothing(made: Path) -> None:
    page = render_html(sheet_of(made / "out")).decode()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; co" in page
    assert "default-src &#39;none&#39;; img-src data:" in page
    assert not re.findall(r"(?:src|href)=\"(?!data:)", page)


def test_the_command_writes_png_and_html(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("sheet.png", "sheet.html"):
        assert cli(["sheet", str(made / "out"), "--to", str(made / name), "--rows", "2"]) == 0
        assert "2 of 3 prompts" in capsys.readouterr().out
    assert (made / "sheet.png").read_bytes().startswith(b"\x89PNG")
    assert (made / "sheet.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["out", "--to", "a.gif"], "--to: a.gif ends neither in .png nor in .html"),
        (["nothing", "--to", "a.png"], "OUT: .* is no output of a job"),
        (["captions/out", "--to", "a.png"], "OUT: .* holds captions"),
        (["out", "captions/out", "--to", "a.png"], "OTHER: .* holds captions"),
        (["codes", "--to", "a.png"], "OUT: .* sink.images: false"),
        (["out", "strange/out", "--to", "a.png"], "OUT and OTHER: .* no prompt in common"),
        (["out", "--to", "none/a.png"], "--to: .* cannot be written"),
    ],
)
def test_sheets_that_cannot_be_drawn_are_refused(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    monkeypatch.chdir(made)
    image_job(made / "captions", ["a.png"])
    run_images(image_synthesis(made, PROMPTS, "codes", sink={"images": False}))
    strange = image_synthesis(made / "strange", ["x", "y"])
    (made / "strange/prompts/p.txt").rename(made / "strange/prompts/q.txt")
    run_images(strange)
    assert command.main(arguments) == command.REFUSED
    assert re.search(reason, capsys.readouterr().err)
