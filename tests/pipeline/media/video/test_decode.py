from __future__ import annotations

import importlib.util
from fractions import Fraction
from pathlib import Path

import pytest

from pipeline.media.pixels import MediaError, fitting
from pipeline.media.video.container import VideoStream
from pipeline.media.video.decode import read_frames
from pipeline.media.video.decord_frames import nal_kinds
from pipeline.media.video.probing import probe
from tests.pipeline.media.video import files
from tests.pipeline.media.video.files import encode_video, number_in

has_decord = importlib.util.find_spec("decord") is not None
FAST = {"preset": "ultrafast"}
X264 = {"preset": "ultrafast", "tune": "fastdecode"}
CLEAN = {
    "h264": {"codec": "libx264", "options": X264},
    "h264_b_frames": {"codec": "libx264", "num_b_frames": 3},
    "h264_fragmented": {"codec": "libx264", "options": X264, "muxer": {"movflags": "frag_keyframe+empty_moov"}},
    "h264_matroska": {"codec": "libx264", "container": "matroska", "num_b_frames": 2},
    "hevc_closed": {"codec": "libx265", "options": {"x265-params": "log-level=none:open-gop=0:bframes=0"}},
    "vp8": {"codec": "libvpx", "container": "webm", "options": {"cpu-used": "8", "lag-in-frames": "8"}},
    "vp9": {"codec": "libvpx-vp9", "container": "webm", "options": {"cpu-used": "8", "deadline": "realtime"}},
    "mpeg4": {},
}
"""Videos whose groups of pictures are closed."""
LEANING = {
    "h264_open": {"codec": "libx264", "num_b_frames": 3, "options": {"x264-params": "open-gop=1:scenecut=0"}},
    "h264_refreshed": {"codec": "libx264", "options": {"x264-params": "intra-refresh=1:keyint=12:bframes=0"}},
    "hevc_open": {"codec": "libx265", "num_b_frames": 3, "options": {"x265-params": "log-level=none"}},
    "mpeg4_b_frames": {"num_b_frames": 2},
    "mpeg2_matroska": {"codec": "mpeg2video", "container": "matroska", "num_b_frames": 2},
}
"""Videos in which frames after a key frame depend on frames before it."""
LOOSE = {
    "h264_transport": {"codec": "libx264", "container": "mpegts", "options": X264},
    "h264_avi": {"codec": "libx264", "container": "avi", "options": X264},
    "h264_flash": {"codec": "libx264", "container": "flv", "options": X264},
    "mpeg2_program": {"codec": "mpeg2video", "container": "mpeg", "num_b_frames": 2},
    "mpeg4_avi": {"container": "avi"},
    "mpeg2_elementary": {"codec": "mpeg2video", "container": "mpeg2video"},
    "animation": {"codec": "gif", "container": "gif", "pixels": "rgb8"},
}
"""Videos in containers without an index to trust."""
ALL = CLEAN | LEANING | LOOSE
NUM_FRAMES = 60
WANTED = [(0, 59), (7, 8, 30, 31), (23, 24, 25), (46,), (11, 13, 35, 37, 47, 49), (59,)]


@pytest.fixture(scope="module")
def video_of(tmp_path_factory):
    """The probed video of a name, written once."""
    folder = tmp_path_factory.mktemp("videos")
    made: dict[str, VideoStream] = {}

    def get(name: str) -> VideoStream:
        if name not in made:
            options = dict(ALL[name])
            path = folder / name
            path.write_bytes(encode_video(NUM_FRAMES, **options))
            made[name] = probe(str(path), 10**6)
        return made[name]

    return get


@pytest.mark.parametrize("name", ALL)
def test_every_frame_is_found_wherever_reading_begins(name, video_of) -> None:
    video = video_of(name)
    assert len(video.ticks) == NUM_FRAMES
    for wanted in WANTED:
        assert [number_in(frame) for frame in read_frames(video, wanted, None)] == list(wanted)


@pytest.mark.skipif(not has_decord, reason="decord has no wheel here")
@pytest.mark.parametrize("name", ALL)
def test_decord_returns_the_frames_of_pyav_or_refuses_the_video(name, video_of) -> None:
    video = video_of(name)
    for wanted in WANTED:
        frames = read_frames(video, wanted, None, "decord")
        if name in CLEAN:
            assert [number_in(frame) for frame in frames] == list(wanted)
        else:
            with pytest.raises(MediaError, match=r"^decord .*; source.video.decoder: auto takes PyAV") as refused:
                next(frames)
            assert refused.value.code == "unsupported_video"


def test_units_of_h264_are_found_behind_lengths_and_behind_start_codes() -> None:
    lengths = b"\x01\x64\x00\x1f\xff"
    assert nal_kinds(b"\0\0\0\x02\x67\x00\0\0\0\x02\x65\x00", lengths) == {7, 5}
    assert nal_kinds(b"\0\0\0\x01\x09\x10\0\0\x01\x61\x00", b"") == {9, 1}
    assert nal_kinds(b"", b"") == set()
    assert nal_kinds(b"\xff\xff\xff\xff\x65", lengths) == {5}


@pytest.mark.parametrize("width", [2, 16, 48, 50, 72])
def test_narrow_frames_have_three_channels(width, tmp_path) -> None:
    video = probed(encode_video(3, codec="libx264", size=(width, 34), options=FAST), tmp_path)
    for decoder in ("pyav", "decord") if has_decord else ("pyav",):
        assert [frame.shape for frame in read_frames(video, [0, 1, 2], None, decoder)] == [(34, width, 3)] * 3


# --- times ---


def probed(data: bytes, folder: Path, name: str = "video") -> VideoStream:
    (folder / name).write_bytes(data)
    return probe(str(folder / name), 10**6)


def test_times_are_those_of_the_frames_and_begin_at_zero(tmp_path) -> None:
    video = probed(encode_video(5, fps=Fraction(30000, 1001)), tmp_path)
    assert video.times_s == pytest.approx([number * 1001 / 30000 for number in range(5)], abs=1e-12)
    assert video.end_s == pytest.approx(5 * 1001 / 30000, abs=1e-12)
    late = probed(encode_video(3, codec="libx264", ticks=[48, 49, 50], options=X264), tmp_path)
    assert late.times_s == [0.0, pytest.approx(1 / 24), pytest.approx(2 / 24)]


def test_a_variable_rate_keeps_its_own_times(tmp_path) -> None:
    ticks = [0, 1, 2, 30, 31, 90]
    video = probed(encode_video(6, codec="libx264", ticks=ticks, options=X264), tmp_path)
    assert video.times_s == [tick / 24 for tick in ticks]
    shown = [number_in(frame) for frame in read_frames(video, range(6), None)]
    assert shown == list(range(6))


@pytest.mark.parametrize("num_b_frames", [0, 2])
def test_a_video_that_was_trimmed_without_encoding_shows_what_is_left(num_b_frames, tmp_path) -> None:
    path = tmp_path / "trimmed.mp4"
    ticks = [number - 5 for number in range(24)]
    path.write_bytes(encode_video(24, codec="libx264", ticks=ticks, num_b_frames=num_b_frames, options=FAST))
    video = probe(str(path), 10**6)
    assert len(video.ticks) == 19
    assert video.times_s[:3] == [0.0, 1 / 24, 2 / 24]
    assert [number_in(frame) for frame in read_frames(video, [0, 1, 9, 18], None)] == [5, 6, 14, 23]


@pytest.mark.parametrize("fps", [24, 25, Fraction(30000, 1001)])
def test_frames_without_times_are_counted_at_the_streams_rate(fps, tmp_path) -> None:
    video = probed(encode_video(12, codec="libx264", container="h264", fps=fps, options=X264), tmp_path)
    assert not video.is_timed
    assert video.times_s == [pytest.approx(number / fps) for number in range(12)]
    assert [number_in(frame) for frame in read_frames(video, (0, 5, 11), None)] == [0, 5, 11]


# --- small ---


def test_the_longer_side_is_shrunk_and_nothing_grows() -> None:
    assert fitting(640, 480, 320) == (320, 240)
    assert fitting(480, 640, 320) == (240, 320)
    assert fitting(1000, 1, 16) == (16, 1)
    assert fitting(100, 50, 100) == (100, 50)
    assert fitting(100, 50, None) == (100, 50)


# --- what is refused before anything is decoded ---


def code_of(data: bytes, folder: Path, max_pixels: int = 10**6) -> str:
    (folder / "video").write_bytes(data)
    with pytest.raises(MediaError) as caught:
        probe(str(folder / "video"), max_pixels)
    return caught.value.code


def test_frames_above_the_limit_are_refused_and_the_limit_is_exact(tmp_path) -> None:
    data = encode_video(2)
    pixels = files.WIDTH * files.HEIGHT
    assert code_of(data, tmp_path, pixels - 1) == "video_too_large"
    assert probe(str(tmp_path / "video"), pixels).width == files.WIDTH


@pytest.mark.parametrize(
    "text",
    [
        "#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nhttp://127.0.0.1:9/x.ts\n#EXT-X-ENDLIST\n",
        "ffconcat version 1.0\nfile '/etc/passwd'\n",
        '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><BaseURL>http://127.0.0.1:9/</BaseURL></MPD>',
        "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n",
    ],
)
def test_files_that_name_other_files_or_hosts_are_no_videos(text, tmp_path) -> None:
    assert code_of(text.encode(), tmp_path) == "not_a_video"


def test_a_truncated_file_is_broken_wherever_its_index_is(tmp_path) -> None:
    behind = encode_video(24)
    before = encode_video(24, muxer={"movflags": "faststart"})
    assert behind.index(b"moov") > behind.index(b"mdat")
    assert before.index(b"moov") < before.index(b"mdat")
    assert code_of(behind[: len(behind) // 2], tmp_path) == "broken_video"
    assert code_of(before[: len(before) * 3 // 4], tmp_path) == "broken_video"
    assert code_of(before[: before.index(b"mdat") + 4], tmp_path) == "broken_video"


def test_a_file_without_video_is_refused_with_its_content(tmp_path) -> None:
    (tmp_path / "sound").write_bytes(files.encode_sound())
    with pytest.raises(MediaError, match="the file holds audio, and no moving picture") as caught:
        probe(str(tmp_path / "sound"), 10**6)
    assert caught.value.code == "no_video_stream"


def test_an_audio_track_does_not_change_the_frames(tmp_path) -> None:
    video = probed(encode_video(6, audio=True), tmp_path)
    assert [number_in(frame) for frame in read_frames(video, (0, 5), None)] == [0, 5]


def test_a_frame_that_is_never_decoded_is_named_by_its_time(tmp_path) -> None:
    video = probed(encode_video(24), tmp_path)
    ticks = list(video.ticks)
    ticks[10] += 1  # a packet's time that no frame has
    broken = VideoStream(**{**vars(video), "ticks": tuple(ticks)})
    with pytest.raises(MediaError, match=r"the frame at 0\.41\d* s cannot be decoded") as caught:
        list(read_frames(broken, (10,), None))
    assert caught.value.code == "broken_video"
