"""Whole jobs on real mp4 files with the shipped video pair: rows, clips cut from videos, damage, texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from configs.presets import preset
from jobs import caption
from zoo import demo
from zoo.world.motion import Motion, states

ROOT = Path(__file__).resolve().parents[2]
NUM_VIDEOS = 5
BROKEN = "motion-99.mp4"
pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.slow]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Motion]]:
    """Five of the demo's motions as files, and one file that is cut in the middle."""
    folder = tmp_path_factory.mktemp("source") / "videos"
    motions = demo.write_videos(folder, NUM_VIDEOS, demo.VIDEO_SEED)
    whole = (folder / next(iter(motions))).read_bytes()
    (folder / BROKEN).write_bytes(whole[: len(whole) // 2])
    return folder, motions


def run_job(method: str, folder: Path, output: Path, *more: str) -> tuple[dict[str, dict[str, Any]], ...]:
    """Rows of data/ and errors/ by sample id."""
    drafter = () if method == "plain" else (f"model.drafter.path={ROOT}/zoo/checkpoints/video_drafter",)
    overrides = (
        f"source.path={folder}",
        f"sink.path={output}",
        f"model.target.path={ROOT}/zoo/checkpoints/video_target",
        "pool.slots=4",
        "job.progress=false",
        *drafter,
        *more,
    )
    path, own = preset(f"zoo_video_{method}")
    assert caption.main(["--config", str(path), *own, *overrides]) == 0
    parts = []
    for part in ("data", "errors"):
        rows = [row for path in (output / part).glob("*.parquet") for row in pq.read_table(path).to_pylist()]
        assert len({row["sample_id"] for row in rows}) == len(rows)
        parts.append({row["sample_id"]: row for row in rows})
    return tuple(parts)


def test_every_video_file_gets_the_same_caption_with_and_without_drafts(
    source: tuple[Path, dict[str, Motion]], tmp_path: Path
) -> None:
    folder, motions = source
    plain, errors = run_job("plain", folder, tmp_path / "plain")
    assert set(plain) == {f"{name}#0" for name in motions}
    assert {key: row["error_type"] for key, row in errors.items()} == {f"{BROKEN}#0": "broken_video"}
    right = [states(motion, "describe", plain[f"{name}#0"]["generated_text"]) for name, motion in motions.items()]
    assert sum(right) >= 3, [row["generated_text"] for row in plain.values()]
    for row in plain.values():
        assert row["num_visual_tokens"] == 36
        assert (row["clip_index"], row["num_clips"]) == (0, 1)
        assert row["finish_reason"] == "stop"
    for method in ("sd", "sage"):
        drafted, _ = run_job(method, folder, tmp_path / method)
        assert {key: row["generated_text"] for key, row in drafted.items()} == {
            key: row["generated_text"] for key, row in plain.items()
        }
        assert {row["verify_mode"] for row in drafted.values()} == {"lossless"}
        assert sum(row["telemetry"]["num_accepted_draft_tokens"] for row in drafted.values()) > 0


def test_a_long_video_has_a_row_per_window_and_lvspec_is_reported_as_lossy(
    source: tuple[Path, dict[str, Motion]], tmp_path: Path
) -> None:
    folder, motions = source
    rows, errors = run_job("lvspec", folder, tmp_path / "out", "source.video.clip_s=1.5")
    assert set(errors) == {f"{BROKEN}#0"}
    assert set(rows) == {f"{name}#0@{span}" for name in motions for span in ("0-1.5", "1.5-3")}
    for key, row in rows.items():
        first = key.endswith("@0-1.5")
        assert (row["clip_index"], row["num_clips"]) == (0 if first else 1, 2)
        assert (row["clip_start_s"], row["clip_end_s"]) == ((0.0, 1.5) if first else (1.5, 3.0))
        assert row["verify_mode"] == "lossy"
        assert row["num_visual_tokens"] == 36
        assert row["generated_text"]
