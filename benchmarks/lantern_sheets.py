"""Pictures for the documents: the same prompts and seeds by plain decoding and by LANTERN, on a sheet each.

Knows which images are shown and where the sheets lie; how sheets are laid out is `pipeline.reports.contact_sheet`'s.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.lantern_rows import PLAIN, Row, row_named
from benchmarks.lantern_world import World, codes_of
from pipeline.reports.contact_sheet import contact_sheet

DOCS = Path("docs/results")
SHOWN = {PLAIN: "plain", "lantern_coupled_0.1": "lantern"}
"""Rows at temperature 1 → the last part of their sheet's name."""
NUM_SHOWN = 16
COLUMNS = 8
SIDE_PX = 96


def draw_sheets(world: World, seed: int, folder: Path = DOCS) -> list[Path]:
    """Write `images_<kind>_<row>.png` for every row shown; returns the files."""
    return [
        draw_sheet(world, row_named(name), seed, folder / f"images_{world.kind}_{last}.png")
        for name, last in SHOWN.items()
    ]


def draw_sheet(world: World, row: Row, seed: int, path: Path) -> Path:
    """One row's first images: they are those of the whole row, because noise belongs to the image."""
    done = world.decode(world.build(row.method(world.share)), world.requests(1.0, seed, NUM_SHOWN))
    title = row.label.replace("δ", "delta")  # the font has no Greek
    captions = [asked.prompt for asked in world.asked[:NUM_SHOWN]]
    path.write_bytes(contact_sheet(world.paint(codes_of(done)), captions, COLUMNS, SIDE_PX, title))
    return path
