"""Frames at their own times: files that start inside a group of pictures, were joined, or lost pictures."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import av
import numpy as np
import pytest

from pipeline.media.video.sampling import FrameSampling
from pipeline.media.video.worker import DecodedClip, DecodeLimits, DecoderWorker
from pipeline.rows.schemas import RowError
from tests.pipeline.media.video.files import encode_video, number_in, remuxed

FAST = {"preset": "ultrafast"}
CLOSED = encode_video(36, codec="libx264", options=FAST)
OPEN = {
    "h264": encode_video(
        36, codec="libx264", num_b_frames=3, options={"x264-params": "open-gop=1:scenecut=0:keyint=12:min-keyint=12"}
    ),
    "hevc": encode_video(
        36,
        codec="libx265",
        num_b_frames=3,
        options={"x265-params": "log-level=none:keyint=12:min-keyint=12:open-gop=1:scenecut=0"},
    ),
    "mpeg2": encode_video(36, codec="mpeg2video", container="mpegts", num_b_frames=2),
}
ALL = FrameSampling(num_frames=200)
Decode = Callable[..., DecodedClip]


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decode]:
    """The only clip of a file."""
    workers: dict[FrameSampling, DecoderWorker] = {}
    path = tmp_path_factory.mktemp("videos") / "video"

    def clip(data: bytes, sampling: FrameSampling = ALL) -> DecodedClip:
        path.write_bytes(data)
        [decoded] = workers.setdefault(sampling, DecoderWorker("auto", sampling, DecodeLimits())).decode(str(path))
        return decoded

    yield clip
    for worker in workers.values():
        worker.close()


def numbers(clip: DecodedClip) -> list[int]:
    frames = np.frombuffer(clip.rgb, np.uint8).reshape(clip.num_frames, clip.height, clip.width, 3)
    return [number_in(frame) for frame in frames]


def ticks(clip: DecodedClip, fps: int = 24) -> list[int]:
    """The frames' times in the file, in frames."""
    return [round((clip.start_s + time_s) * fps) for time_s in clip.timestamps_s]


def from_packet(first: int) -> Callable[[list[Any]], list[Any]]:
    return lambda packets: packets[first:]


@pytest.mark.parametrize("container", ["mp4", "matroska", "mpegts", "avi", "flv"])
def test_a_file_that_starts_inside_a_group_of_pictures_begins_at_its_first_key_frame(
    container: str, decode: Decode
) -> None:
    clip = decode(remuxed(encode_video(36) if container == "avi" else CLOSED, container, from_packet(7)))
    start = 12 if container == "avi" else 5  # AVI begins with empty chunks
    assert numbers(clip) == list(range(12, 36))
    assert ticks(clip) == list(range(start, start + 24))
    assert clip.start_s == pytest.approx(start / 24, abs=0.002)
    assert clip.end_s == pytest.approx((start + 24) / 24, abs=0.05)


@pytest.mark.parametrize(
    ("codec", "container"),
    [
        *((codec, container) for codec in OPEN for container in ("mp4", "matroska")),
        ("hevc", "mpegts"),
        ("mpeg2", "mpegts"),
    ],
)
def test_pictures_before_an_open_group_that_need_lost_ones_are_left_out(
    codec: str, container: str, decode: Decode
) -> None:
    def from_second_key(packets: list[Any]) -> list[Any]:
        keys = [index for index, packet in enumerate(packets) if packet.is_keyframe]
        assert any(packet.pts < packets[keys[1]].pts for packet in packets[keys[1] + 1 :])  # the group is open
        return packets[keys[1] :]

    shown = numbers(decode(remuxed(OPEN[codec], container, from_second_key)))
    assert shown == list(range(shown[0], 36))
    assert shown[0] in (11, 12)  # groups of MPEG-2 begin with their leading pictures


@pytest.mark.parametrize("container", ["mp4", "matroska"])
@pytest.mark.parametrize("index", [1, 5, 16])
def test_a_packet_of_noise_is_an_error_at_its_time_and_moves_no_other_frame(
    index: int, container: str, decode: Decode
) -> None:
    def damage(packets: list[Any]) -> list[Any]:
        noise = np.random.default_rng(7).integers(4, 256, packets[index].size, np.uint8).tobytes()
        made = av.Packet(noise)
        made.pts, made.dts, made.duration = packets[index].pts, packets[index].dts, packets[index].duration
        made.time_base = packets[index].time_base
        return [*packets[:index], made, *packets[index + 1 :]]

    data = remuxed(encode_video(36), container, damage)
    with pytest.raises(RowError, match=r"the frame at .* s cannot be decoded") as caught:
        decode(data)
    assert caught.value.code == "broken_video"
    assert float(caught.value.message.split()[3]) == pytest.approx(index / 24, abs=0.001)
    later = FrameSampling(timestamps_s=tuple(number / 24 + 0.01 for number in (24, 30, 35)))
    assert numbers(decode(data, later)) == [24, 30, 35]


@pytest.mark.parametrize("fills", [True, False], ids=["dropped_inside", "dropped_at_the_end"])
def test_dropped_frames_of_avi_leave_gaps(fills: bool, decode: Decode) -> None:
    shown = [0, 1, 2, 5, 6, 9] if fills else list(range(7))
    data = encode_video(len(shown), container="avi", ticks=shown)
    if not fills:  # the header counts two dropped frames that no chunk has
        at = data.index(b"strh") + 8 + 32
        data = data[:at] + (9).to_bytes(4, "little") + data[at + 4 :]
    clip = decode(data)
    assert numbers(clip) == list(range(len(shown)))
    assert ticks(clip) == shown


def test_an_avi_file_that_is_cut_short_is_an_error_with_the_number_of_its_frames(decode: Decode) -> None:
    data = encode_video(24, container="avi")
    with pytest.raises(RowError, match=r"cut short: it contains \d+ of 24 frames") as caught:
        decode(data[: data.index(b"movi") + (data.index(b"idx1") - data.index(b"movi")) // 2])
    assert caught.value.code == "broken_video"


@pytest.mark.parametrize("container", ["matroska", "webm"])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_a_matroska_file_that_is_cut_short_is_an_error_unless_all_frames_are_there(
    share: float, container: str, decode: Decode
) -> None:
    data = encode_video(24, codec="libvpx", container=container, options={"cpu-used": "8", "deadline": "realtime"})
    with pytest.raises(RowError, match=r"cut short: it contains only \d+ frames") as caught:
        decode(data[: int(share * len(data))])
    assert caught.value.code == "broken_video"
    assert numbers(decode(data[:-1])) == list(range(24))  # the index at the end is incomplete


@pytest.mark.parametrize("num_b_frames", [0, 2])
def test_frames_of_h264_in_avi_have_their_times_in_any_order_of_packets(num_b_frames: int, decode: Decode) -> None:
    clip = decode(encode_video(24, codec="libx264", container="avi", num_b_frames=num_b_frames))
    assert numbers(clip) == list(range(24))
    assert ticks(clip) == list(range(24))


def packed(data: bytes) -> bytes:
    """The AVI file of an MPEG-4 stream, each B-picture in the chunk of the picture before it, and a chunk of its own
    that holds none."""

    def pack(packets: list[Any]) -> list[Any]:
        chunks: list[bytes] = []
        for packet in packets:
            payload = bytes(packet)
            vop = payload.index(b"\0\0\1\xb6") + 4
            if payload[vop] >> 6 == 2:  # a B-picture
                chunks[-1] += payload
                chunks.append(b"\x7f")
            else:
                chunks.append(payload)
        chunks[0] = b"\0\0\1\xb2DivX503b1393p" + chunks[0]  # how encoders mark such streams
        return [_chunk(number, chunk, packets[0].time_base) for number, chunk in enumerate(chunks)]

    return remuxed(data, "avi", pack)


def _chunk(number: int, payload: bytes, time_base: Any) -> Any:
    packet = av.Packet(payload)
    packet.time_base = time_base
    packet.pts = packet.dts = round(number / 24 / time_base)
    packet.is_keyframe = number == 0
    return packet


def test_packed_b_frames_of_avi_are_frames_of_their_own(decode: Decode) -> None:
    data = packed(encode_video(15, container="matroska", gop=50, num_b_frames=1))
    assert b"\x7f" in data
    clip = decode(data)
    assert numbers(clip) == list(range(15))
    assert ticks(clip) == list(range(15))


@pytest.mark.parametrize("codec", ["libx264", "mpeg2video"])
@pytest.mark.parametrize("num_b_frames", [0, 2])
def test_joined_segments_are_shown_one_after_the_other(num_b_frames: int, codec: str, decode: Decode) -> None:
    options = {"options": FAST} if codec == "libx264" and not num_b_frames else {}
    segments = [
        encode_video(12, codec=codec, container="mpegts", first=first, num_b_frames=num_b_frames, **options)
        for first in (20, 80, 140)
    ]
    clip = decode(b"".join(segments))
    assert numbers(clip) == [*range(20, 32), *range(80, 92), *range(140, 152)]
    assert ticks(clip) == list(range(36))


def test_a_jump_of_a_broadcasts_clock_is_no_pause(decode: Decode) -> None:
    moved = [*range(12), *range(2000, 2012)]
    data = encode_video(24, codec="libx264", container="mpegts", ticks=moved, options=FAST)
    assert ticks(decode(data)) == list(range(24))
    kept = encode_video(24, codec="libx264", ticks=moved, options=FAST)
    assert ticks(decode(kept)) == moved


def test_frames_of_a_stream_whose_size_changes_have_the_first_frames_size(decode: Decode) -> None:
    sizes = ((128, 48), (256, 96), (64, 64))
    segments = [
        encode_video(4, codec="libx264", container="mpegts", first=4 * place, size=size, options=FAST)
        for place, size in enumerate(sizes)
    ]
    clip = decode(b"".join(segments))
    assert (clip.width, clip.height) == (128, 48)
    assert numbers(clip) == list(range(12))


@pytest.mark.parametrize(("container", "codec"), [("webm", "libvpx"), ("webm", "libvpx-vp9"), ("matroska", "libx264")])
def test_a_recording_without_a_duration_has_the_times_of_its_frames(container: str, codec: str, decode: Decode) -> None:
    options = FAST if codec == "libx264" else {"cpu-used": "8", "deadline": "realtime"}
    data = encode_video(12, codec=codec, container=container, options=options, muxer={"live": "1"})
    with av.open(io.BytesIO(data)) as recorded:
        assert recorded.duration is None
    clip = decode(data)
    assert numbers(clip) == list(range(12))
    assert ticks(clip) == list(range(12))


def test_a_transport_stream_that_lost_a_packet_keeps_the_times_of_the_others(decode: Decode) -> None:
    data = encode_video(36, codec="libx264", container="mpegts", options=FAST)
    payloads = [at for at in range(0, len(data), 188) if data[at + 1] & 0x5F == 0x41]  # of the pictures' stream
    lost = payloads[18]
    clip = decode(data[:lost] + data[lost + 188 :])
    shown = ticks(clip)
    assert shown == sorted(set(shown))
    assert set(range(36)) - set(shown) <= {17, 18}
    assert [number for number in shown if number >= 24] == list(range(24, 36))
    assert numbers(clip)[-12:] == list(range(24, 36))
