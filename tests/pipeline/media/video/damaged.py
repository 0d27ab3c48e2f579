"""Damaged and hostile video files, by name: what is broken, what is no video, and what has no pictures."""

from __future__ import annotations

import io
import struct
import zipfile
from functools import reduce

from tests.pipeline.media.video.files import encode_sound, encode_video, flipped, patched

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
CODES = frozenset({"broken_video", "not_a_video", "no_video_stream", "unsupported_video", "video_too_large"})
"""What a damaged file may end with, if it does not show frames after all."""
