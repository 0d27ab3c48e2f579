"""Damaged and hostile video files: each is one row with clips or with a known code, and nothing else happens."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.media.video.sampling import FrameSampling
from pipeline.media.video.worker import DecodeLimits, DecoderWorker
from pipeline.rows.schemas import RowError
from tests.pipeline.media.video.damaged import CODES, DAMAGED, HEADER_ONLY, MP4, NONE
from tests.pipeline.media.video.files import encode_video

LIMITS = DecodeLimits(max_pixels=4096 * 4096, timeout_s=20.0, worker_max_bytes=512 << 20)


@pytest.fixture(scope="module")
def worker():
    made = DecoderWorker("auto", FrameSampling(num_frames=4), LIMITS)
    yield made
    made.close()


def outcome(worker: DecoderWorker, data: bytes, folder: Path) -> str:
    path = folder / "video"
    path.write_bytes(data)
    refusal = None
    try:
        [clip] = worker.decode(str(path))
    except RowError as error:
        refusal = error
    if refusal is not None:
        assert len(refusal.message) < 400
        return refusal.code
    assert len(clip.rgb) == clip.num_frames * clip.height * clip.width * 3
    assert clip.timestamps_s == sorted(clip.timestamps_s)
    assert all(time >= 0 for time in clip.timestamps_s)
    assert clip.fps > 0
    return ""


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_gives_clips_or_a_known_code(name, worker, tmp_path) -> None:
    assert outcome(worker, DAMAGED[name], tmp_path) in CODES | {""}


@pytest.mark.parametrize("name", NONE)
def test_a_file_that_is_no_video_has_its_own_error(name, worker, tmp_path) -> None:
    assert outcome(worker, NONE[name], tmp_path) == "not_a_video"


@pytest.mark.parametrize("name", HEADER_ONLY)
def test_a_file_without_pictures_has_a_code(name, worker, tmp_path) -> None:
    assert outcome(worker, HEADER_ONLY[name], tmp_path) in {"broken_video", "no_video_stream"}


def test_the_corpus_is_large_and_its_process_outlived_it(worker, tmp_path) -> None:
    assert len(DAMAGED) + len(NONE) + len(HEADER_ONLY) >= 90
    assert outcome(worker, MP4, tmp_path) == ""
    assert worker.num_started == 1


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("cut_in_the_media", "broken_video"),
        ("cut_by_one_byte", "broken_video"),
        ("index_behind_is_missing", "broken_video"),
        ("unknown_codec", "unsupported_video"),
        ("media_all_zero", "broken_video"),
        ("rubbish_behind", ""),
    ],
)
def test_each_kind_of_damage_has_its_error_code(name, code, worker, tmp_path) -> None:
    assert outcome(worker, DAMAGED[name], tmp_path) == code


def test_flat_and_wide_videos_are_shown(worker, tmp_path) -> None:
    wide = encode_video(3, codec="libx264", size=(4096, 16), options={"preset": "ultrafast"})
    assert outcome(worker, wide, tmp_path) == ""


@pytest.mark.parametrize("decoder", ["pyav", "auto"])
def test_a_video_whose_frames_need_more_memory_than_allowed_is_too_large(decoder, tmp_path) -> None:
    data = encode_video(2, codec="libx264", size=(2048, 2048), options={"preset": "ultrafast"})
    assert len(data) < 500_000
    poor = DecoderWorker(decoder, FrameSampling(num_frames=2), DecodeLimits(max_side_px=64, worker_max_bytes=8 << 20))
    assert outcome(poor, data, tmp_path) == "video_too_large"
    poor.close()
