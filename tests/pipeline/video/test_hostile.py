"""Damaged and hostile video files: each is one row with clips or with a known code, and nothing else happens."""

from __future__ import annotations

import io
import struct
import zipfile
from functools import reduce
from pathlib import Path

import pytest

from pipeline.rows import RowError
from pipeline.video.sampling import Sampling
from pipeline.video.worker import Limits, VideoWorker
from tests.pipeline.video.files import encode_sound, encode_video, flipped, patched

MP4 = encode_video(24, codec="libx264", options={"preset": "ultrafast"}, muxer={"movflags": "faststart"})
MPEG4 = encode_video(24)
WEBM = encode_video(24, codec="libvpx-vp9", container="webm", options={"cpu-used": "8", "deadline": "realtime"})
AVI = encode_video(24, container="avi")
TS = encode_video(24, codec="libx264", container="mpegts", options={"preset": "ultrafast"})
MEDIA = MP4.index(b"mdat") + 4


def box(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", 8 + len(body)) + name + body


def zipped(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("video.mp4", data)
    return buffer.getvalue()


DAMAGED: dict[str, bytes] = {
    "cut_in_the_header": MP4[:20],
    "cut_in_the_index": MP4[: MP4.index(b"stsz")],
    "cut_before_the_media": MP4[: MEDIA - 8],
    "cut_in_the_media": MP4[: (MEDIA + len(MP4)) // 2],
    "cut_by_one_byte": MP4[:-1],
    "index_behind_is_missing": MPEG4[: MPEG4.index(b"moov") - 4],
    "matroska_cut": WEBM[: len(WEBM) // 2],
    "avi_cut": AVI[: len(AVI) // 3],
    "no_sample_sizes": patched(MP4, b"stsz", 0, bytes(12)),
    "sample_count_huge": patched(MP4, b"stsz", 8, b"\x7f\xff\xff\xff"),
    "no_chunks": patched(MP4, b"stco", 4, bytes(4)),
    "chunks_beyond_the_file": patched(MP4, b"stco", 8, b"\x7f\xff\xff\xff"),
    "box_of_size_zero_inside": patched(MP4, b"trak", -8, bytes(4)),
    "box_larger_than_the_file": patched(MP4, b"moov", -8, b"\x7f\xff\xff\xff"),
    "timescale_zero": patched(MP4, b"mdhd", 12, bytes(4)),
    "timescale_huge": patched(MP4, b"mdhd", 12, b"\xff\xff\xff\xff"),
    "duration_negative": patched(MP4, b"mdhd", 16, b"\xff\xff\xff\xff"),
    "times_all_zero": patched(MP4, b"stts", 12, bytes(4)),
    "times_huge": patched(MP4, b"stts", 12, b"\x7f\xff\xff\xff"),
    "matrix_of_ones": patched(MP4, b"tkhd", 40, b"\xff" * 36),
    "no_codec_settings": patched(MP4, b"avcC", -4, b"free"),
    "codec_settings_garbage": patched(MP4, b"avcC", 0, b"\xff" * 16),
    "unknown_codec": MP4.replace(b"avc1", b"zzzz"),
    "other_codec": MP4.replace(b"avc1", b"hvc1"),
    "frames_65535_wide": patched(MP4, b"avc1", 24, b"\xff\xff\xff\xff"),
    "frames_of_no_size": patched(MPEG4, b"mp4v", 24, bytes(4)),
    "media_all_zero": MP4[:MEDIA] + bytes(len(MP4) - MEDIA),
    "media_all_ones": MP4[:MEDIA] + b"\xff" * (len(MP4) - MEDIA),
    "two_files_in_one": MP4 + MP4,
    "rubbish_behind": MP4 + bytes(1000),
    "rubbish_before": bytes(1000) + MP4,
    "ts_out_of_step": TS[100:],
    "ts_with_holes": TS[:376] + TS[1880:],
    **{f"bits_flipped_{seed}": flipped(MP4, seed, 12) for seed in range(8)},
    **{f"header_flipped_{seed}": flipped(MP4, 100 + seed, 6, 0, MEDIA) for seed in range(12)},
    **{f"media_flipped_{seed}": flipped(MP4, 200 + seed, 40, MEDIA) for seed in range(4)},
    **{f"webm_flipped_{seed}": flipped(WEBM, 300 + seed, 12) for seed in range(6)},
    **{f"avi_flipped_{seed}": flipped(AVI, 400 + seed, 12) for seed in range(4)},
    **{f"ts_flipped_{seed}": flipped(TS, 500 + seed, 12) for seed in range(4)},
}
NONE: dict[str, bytes] = {
    "empty": b"",
    "one_byte": b"\0",
    "zeros": bytes(5000),
    "ones": b"\xff" * 5000,
    "text": b"no video at all\n" * 100,
    "control_characters": bytes(range(32)) * 20,
    "html": b"<!doctype html><title>404</title>",
    "playlist": b"#EXTM3U\n#EXTINF:10,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
    "playlist_of_hosts": b"#EXTM3U\n#EXTINF:10,\nhttp://169.254.169.254/latest/meta-data/\n#EXT-X-ENDLIST\n",
    "concat": b"ffconcat version 1.0\nfile '/dev/zero'\n",
    "session_description": b"v=0\no=- 0 0 IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\n",
    "zip": zipped(MP4),
    "pickle": b"\x80\x04\x95\x10\0\0\0\0\0\0\0\x8c\x02os\x8c\x06system\x93\x94.",
    "subtitles": b"1\n00:00:00,000 --> 00:00:01,000\nhello\n",
}
HEADER_ONLY: dict[str, bytes] = {
    "type_only": box(b"ftyp", b"isom\0\0\2\0isomiso2"),
    "type_and_no_index": box(b"ftyp", b"isom\0\0\2\0isomiso2") + box(b"mdat", bytes(100)),
    "nested_boxes": box(b"ftyp", b"isom\0\0\2\0isom") + box(b"moov", box(b"trak", b"") * 200),
    "deeply_nested": box(b"ftyp", b"isom\0\0\2\0isom") + reduce(lambda inner, _: box(b"moov", inner), range(500), b""),
    "matroska_start": WEBM[:4],
    "riff_start": AVI[:12],
    "sound_only": encode_sound(),
    "sound_only_matroska": encode_sound(container="matroska"),
}
CODES = {"broken_video", "not_a_video", "no_video_stream", "unsupported_video", "video_too_large"}
LIMITS = Limits(max_pixels=4096 * 4096, timeout_s=20.0, worker_max_bytes=512 << 20)


@pytest.fixture(scope="module")
def worker():
    made = VideoWorker("auto", Sampling(num_frames=4), LIMITS)
    yield made
    made.close()


def outcome(worker: VideoWorker, data: bytes, folder: Path) -> str:
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
def test_what_is_no_video_is_told_so(name, worker, tmp_path) -> None:
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
def test_damage_is_told_for_what_it_is(name, code, worker, tmp_path) -> None:
    assert outcome(worker, DAMAGED[name], tmp_path) == code


def test_flat_and_wide_videos_are_shown(worker, tmp_path) -> None:
    wide = encode_video(3, codec="libx264", size=(4096, 16), options={"preset": "ultrafast"})
    assert outcome(worker, wide, tmp_path) == ""


@pytest.mark.parametrize("decoder", ["pyav", "auto"])
def test_a_video_whose_frames_need_more_memory_than_allowed_is_too_large(decoder, tmp_path) -> None:
    data = encode_video(2, codec="libx264", size=(2048, 2048), options={"preset": "ultrafast"})
    assert len(data) < 500_000
    poor = VideoWorker(decoder, Sampling(num_frames=2), Limits(max_side_px=64, worker_max_bytes=8 << 20))
    assert outcome(poor, data, tmp_path) == "video_too_large"
    poor.close()
