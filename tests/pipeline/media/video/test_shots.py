"""Cuts of made videos are found at their frames; flashes, fades, still and broken videos give no false ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError

from configs.source import VideoConfig as VideoConfig
from pipeline.media.pixels import MediaError
from pipeline.media.video import probing, shots
from pipeline.media.video.sampling import FrameSampling, Shots, windows
from pipeline.media.video.worker import DecodeLimits, DecoderWorker
from pipeline.rows.schemas import RowError
from pipeline.storage.shard import Shard
from tests.pipeline.attempts import job, rows_in, run
from tests.pipeline.media.video.files import encode_video

FPS, SIZE = 10, (96, 64)
Picture = NDArray[np.uint8]


def scene(seed: int) -> Picture:
    """A picture with coarse blocks of colours."""
    blocks = np.random.default_rng(seed).integers(0, 256, (4, 6, 3))
    return np.kron(blocks, np.ones((16, 16, 1))).astype(np.uint8)


def moving(seed: int, count: int) -> list[Picture]:
    """Frames of one shot, in which the picture moves by a pixel per frame."""
    return [np.roll(scene(seed), number, axis=1) for number in range(count)]


def film(path: Path, frames: Sequence[Picture], ticks: Sequence[int] | None = None, codec: str = "mpeg4") -> Path:
    with av.open(str(path), "w", format="mp4") as output:
        stream: Any = output.add_stream(codec, rate=FPS)
        stream.width, stream.height, stream.pix_fmt = *SIZE, "yuv420p"
        stream.codec_context.thread_count = 1
        stream.bit_rate = 4_000_000
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            frame.pts = number if ticks is None else ticks[number]
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return path


def edges(path: Path, **options: Any) -> list[float]:
    return shots.shot_edges(probing.probe(str(path), 10**8), Shots(**options))


@pytest.mark.parametrize("codec", ["mpeg4", "libx264"])
def test_hard_cuts_are_found_at_their_frames(tmp_path, codec) -> None:
    frames = [*moving(1, 15), *moving(2, 20), *moving(3, 12), *moving(4, 30)]
    edges_s = edges(film(tmp_path / "a.mp4", frames, codec=codec))
    assert edges_s == [0.0, 1.5, 3.5, 4.7]


def test_a_flash_is_no_cut_and_a_cut_after_it_is_one(tmp_path) -> None:
    white = np.full_like(scene(1), 255)
    frames = [*moving(1, 15), white, *moving(1, 31)[16:], *moving(2, 20)]
    assert edges(film(tmp_path / "a.mp4", frames)) == [0.0, 3.1]
    two = [*moving(1, 15), white, white, *moving(1, 37)[17:]]
    assert edges(film(tmp_path / "b.mp4", two)) == [0.0]


def test_a_slow_fade_is_no_cut_and_the_cut_behind_it_is_one(tmp_path) -> None:
    fade = [(scene(1) * (1 - step / 30)).astype(np.uint8) for step in range(31)]
    assert edges(film(tmp_path / "a.mp4", [*[scene(1)] * 10, *fade, *reversed(fade)])) == [0.0]
    assert edges(film(tmp_path / "b.mp4", [*[scene(1)] * 10, *fade, *moving(2, 20)])) == [0.0, 4.1]


def test_times_follow_the_frames_of_a_variable_rate(tmp_path) -> None:
    frames = [*moving(1, 10), *moving(2, 10)]
    ticks = [*range(0, 40, 4), *range(40, 60, 2)]
    assert edges(film(tmp_path / "a.mp4", frames, ticks)) == [0.0, 4.0]


@pytest.mark.parametrize("count", [1, 2, 100])
def test_still_and_tiny_films_are_one_shot(tmp_path, count) -> None:
    assert edges(film(tmp_path / "a.mp4", [scene(1)] * count)) == [0.0]


def test_shots_have_minimum_and_maximum_lengths_and_a_bounded_number(tmp_path) -> None:
    frames = [*moving(1, 20), *moving(2, 5), *moving(3, 20), *moving(4, 4)]
    path = film(tmp_path / "a.mp4", frames)
    assert edges(path, min_s=0.3) == [0.0, 2.0, 2.5, 4.5]
    assert edges(path, min_s=1.0) == [0.0, 2.0]
    assert edges(path, min_s=0.3, max_s=1.0) == [0.0, 1.0, 2.0, 2.5, 3.5, 4.5]
    with pytest.raises(MediaError, match=r"has 4 shots, more than source\.video\.max_shots \(3\)") as error:
        edges(path, min_s=0.3, max_count=3)
    assert error.value.code == "video_too_large"


def test_cuts_between_colours_of_equal_brightness_are_found(tmp_path) -> None:
    red, green = (np.full((64, 96, 3), colour, np.uint8) for colour in ((200, 0, 0), (0, 102, 0)))
    assert edges(film(tmp_path / "a.mp4", [*[red] * 15, *[green] * 15])) == [0.0, 1.5]


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(12, 25), min_size=1, max_size=5), st.sampled_from([None, 2.0, 5.0]))
def test_shots_cover_the_film_once_within_their_lengths(tmp_path, lengths, max_s) -> None:
    frames = [frame for seed, count in enumerate(lengths) for frame in moving(seed, count)]
    path = film(tmp_path / "a.mp4", frames)
    video = probing.probe(str(path), 10**8)
    edges_s = shots.shot_edges(video, Shots(max_s=max_s))
    assert set((np.cumsum([0, *lengths])[:-1] / FPS).round(6).tolist()) <= set(edges_s)
    clips = windows(video.times_s, video.end_s, FrameSampling(num_frames=1000), edges_s)
    assert [index for clip in clips for index in clip.indices] == list(range(len(frames)))
    sizes = [clip.end_s - clip.start_s for clip in clips]
    assert min(sizes) >= 1.0 - 1e-6 or len(sizes) == 1
    assert max_s is None or max(sizes) <= max_s + 1e-6
    if max_s is None:
        assert len(edges_s) == len(lengths)


# --- in the decoding process ----


def decode(path: Path, limits: DecodeLimits = DecodeLimits(), **options: Any) -> list[Any]:  # noqa: B008
    worker = DecoderWorker("auto", FrameSampling(num_frames=2, shots=Shots(**options)), limits)
    try:
        return worker.decode(str(path))
    finally:
        worker.close()


def test_the_decoding_process_returns_a_clip_per_shot(tmp_path) -> None:
    path = film(tmp_path / "a.mp4", [*moving(1, 15), *moving(2, 20)])
    clips = decode(path)
    assert [(clip.clip_index, clip.num_clips, clip.start_s, clip.end_s) for clip in clips] == [
        (0, 2, 0.0, 1.5),
        (1, 2, 1.5, 3.5),
    ]
    assert all(clip.num_frames == 2 for clip in clips)


@pytest.mark.slow
def test_hostile_films_are_row_errors(tmp_path) -> None:
    data = film(tmp_path / "a.mp4", [*moving(1, 15), *moving(2, 20)]).read_bytes()
    (tmp_path / "cut.mp4").write_bytes(data[: len(data) * 2 // 3])
    with pytest.raises(RowError) as error:
        decode(tmp_path / "cut.mp4")
    assert error.value.code in ("broken_video", "not_a_video")
    tail = bytearray(data)
    middle = data.index(b"mdat") + 4 + (data.index(b"moov") - data.index(b"mdat")) * 3 // 4
    tail[middle : middle + 300] = bytes(300)
    (tmp_path / "tail.mp4").write_bytes(tail)
    with pytest.raises(RowError, match=r"the frame at 3\.4 s is damaged"):
        decode(tmp_path / "tail.mp4")
    clips = decode(tmp_path / "tail.mp4", replace(DecodeLimits(), keeps_damaged=True))
    assert clips[0].start_s == 0.0
    assert 1.5 < clips[-1].end_s < 3.5
    with pytest.raises(RowError, match=r"max_shots \(1\)"):
        decode(tmp_path / "a.mp4", max_count=1)
    with pytest.raises(RowError) as error:
        decode(tmp_path / "a.mp4", replace(DecodeLimits(), timeout_s=1e-6))
    assert error.value.code == "decode_timeout"


@pytest.mark.slow
def test_ids_of_shots_are_the_same_after_a_resume_and_in_shards(tmp_path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(4):
        film(tmp_path / f"in/{number}.mp4", [*moving(number, 15), *moving(number + 9, 20)])
    source = {"kind": "videos", "path": str(tmp_path / "in"), "video": {"split": "shots", "num_frames": 1}}

    def ids(output: Path) -> list[str]:
        return sorted(rows_in(output / "data"))

    expected = sorted(f"{number}.mp4#0@{span}" for number in range(4) for span in ("0-1.5", "1.5-3.5"))
    run(job(source, tmp_path / "out"))
    assert ids(tmp_path / "out") == expected
    resumed = job(source, tmp_path / "resumed")
    run(resumed, num_batches=1)
    run(resumed)
    assert ids(tmp_path / "resumed") == expected
    for number in range(2):
        run(job(source, tmp_path / "sharded"), shard=Shard(number, 2))
    assert ids(tmp_path / "sharded") == expected


# --- configuration ----


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"clip_s": 2.0}, "neither with clip_s"),
        ({"timestamps_s": (1.0,)}, "nor with timestamps_s"),
        ({"max_shot_s": 1.5}, "at least 2"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(values, message) -> None:
    with pytest.raises(ValidationError, match=message):
        VideoConfig(split="shots", **values)


def test_jobs_without_shots_keep_their_fingerprint(tmp_path) -> None:
    plain = job({"kind": "videos", "path": "in"}, tmp_path / "out")
    assert not [name for name in plain.content({"target": "t"})["source"]["video"] if "shot" in name or name == "split"]
    cut = job({"kind": "videos", "path": "in", "video": {"split": "shots"}}, tmp_path / "out")
    assert cut.multiplies_rows
    assert cut.content({"target": "t"})["source"]["video"]["min_shot_s"] == 1.0


def test_a_file_of_numbers_without_cuts_has_one_clip(tmp_path) -> None:
    (tmp_path / "a.mp4").write_bytes(encode_video(24))
    assert len(decode(tmp_path / "a.mp4", threshold=60.0)) == 1
