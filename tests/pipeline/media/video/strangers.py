"""Videos of many codecs, containers, frame rates and kinds of damage, and their frames as ffmpeg's program shows them.

Frames show their number (`files.frame_of`). Streams are encoded once, and their packets put into many containers.
"""

from __future__ import annotations

import io
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import av
import imageio_ffmpeg
import numpy as np
from numpy.typing import NDArray

from tests.pipeline.media.video.files import (
    HEIGHT,
    MATRICES,
    WIDTH,
    displayed,
    encode_video,
    flipped,
    number_in,
    remuxed,
)

NUM_FRAMES, GOP = 24, 8
FAST = {"preset": "ultrafast"}
LIVE = {"deadline": "realtime", "cpu-used": "8"}
X264_OPEN = {"x264-params": "open-gop=1:scenecut=0:keyint=8:min-keyint=8"}
X265 = "log-level=none:keyint=8:min-keyint=8:scenecut=0:pools=1:frame-threads=1"
STREAMS: dict[str, dict[str, Any]] = {
    "h264": {"codec": "libx264", "options": FAST},
    "h264_b": {"codec": "libx264", "num_b_frames": 2, "options": {"preset": "veryfast", "x264-params": "scenecut=0"}},
    "h264_open": {"codec": "libx264", "num_b_frames": 3, "options": X264_OPEN},
    "hevc": {"codec": "libx265", "options": {**FAST, "x265-params": f"{X265}:bframes=0"}},
    "hevc_open": {"codec": "libx265", "num_b_frames": 2, "options": {**FAST, "x265-params": f"{X265}:open-gop=1"}},
    "mpeg4": {},
    "mpeg4_b": {"num_b_frames": 2},
    "msmpeg4": {"codec": "msmpeg4"},
    "mpeg2": {"codec": "mpeg2video"},
    "mpeg2_b": {"codec": "mpeg2video", "num_b_frames": 2},
    "mpeg1": {"codec": "mpeg1video"},
    "vp8": {"codec": "libvpx", "options": LIVE},
    "vp9": {"codec": "libvpx-vp9", "options": LIVE},
    "av1": {"codec": "libsvtav1", "options": {"preset": "12", "svtav1-params": "lp=1:pred-struct=1"}},
    "mjpeg": {"codec": "mjpeg", "pixels": "yuvj420p"},
    "ffv1": {"codec": "ffv1", "gop": 1},
    "flv1": {"codec": "flv"},
    "wmv2": {"codec": "wmv2"},
    "prores": {"codec": "prores_ks", "container": "matroska", "pixels": "yuv422p10le"},
}
CONTAINERS: dict[str, tuple[str, ...]] = {
    "mp4": ("h264", "h264_b", "h264_open", "hevc", "hevc_open", "mpeg4", "mpeg4_b", "mpeg2_b", "vp9", "av1"),
    "mov": ("h264_b", "mpeg4", "mjpeg", "prores"),
    "matroska": tuple(name for name in STREAMS if name not in ("wmv2", "flv1")),
    "webm": ("vp8", "vp9", "av1"),
    "avi": ("h264", "h264_b", "mpeg4", "mpeg4_b", "msmpeg4", "mpeg2", "mpeg2_b", "mjpeg", "ffv1"),
    "mpegts": ("h264", "h264_b", "h264_open", "hevc", "hevc_open", "mpeg2", "mpeg2_b", "mpeg1"),
    "mpeg": ("mpeg1", "mpeg2", "mpeg2_b"),
    "flv": ("h264", "h264_b", "flv1"),
    "asf": ("wmv2", "mpeg4", "mpeg4_b", "h264"),
    "ivf": ("vp8", "vp9", "av1"),
    "h264": ("h264", "h264_b"),
    "hevc": ("hevc",),
    "mpeg2video": ("mpeg2", "mpeg2_b"),
}
RATES: dict[str, Fraction] = {"24": Fraction(24), "ntsc": Fraction(30000, 1001), "25": Fraction(25), "50": Fraction(50)}
VARIABLE = (0, 1, 2, 5, 6, 7, 11, 12, 13, 14, 20, 21, 22, 23, 24, 29, 30, 31, 32, 33, 40, 41, 42, 43)
"""Times of the rate `variable` in frames at 24 per second."""
ELEMENTARY = ("h264", "hevc")
"""Containers in which decoders find the codec's settings only before key frames."""
FIXED_RATE = ("avi", "h264", "hevc", "mpeg2video", "mpeg", "ivf")
Change = Callable[[bytes], bytes]


@cache
def encoded(stream: str, fps: Fraction) -> bytes:
    """The stream in a container that takes its codec."""
    return encode_video(NUM_FRAMES, fps=fps, **{"container": "nut", "gop": GOP, **STREAMS[stream]})


def contained(
    stream: str, container: str, rate: str, lost: Sequence[int] = (), muxer: dict[str, str] | None = None
) -> bytes:
    """The stream in this container at this frame rate, without the packets of the indices `lost`."""
    fps = RATES.get(rate, Fraction(24))
    places = VARIABLE if rate == "variable" else range(NUM_FRAMES)
    with (
        av.open(io.BytesIO(encoded(stream, fps))) as source,
        tempfile.NamedTemporaryFile() as file,
        av.open(file.name, "w", format=container, options=muxer or {}) as output,
    ):
        template = source.streams.video[0]
        target: Any = output.add_stream_from_template(template, opaque=True)
        target.time_base = 1 / fps
        packets: list[Any] = [packet for packet in source.demux(template) if packet.size]
        order = sorted(packet.pts for packet in packets)
        ranks = [order.index(packet.pts) for packet in packets]
        delay = max(index - rank for index, rank in enumerate(ranks))
        if container in ELEMENTARY:
            settings = template.codec_context.extradata or b""
            packets = [av.Packet(settings * packet.is_keyframe + bytes(packet)) for packet in packets]
        for index, (packet, rank) in enumerate(zip(packets, ranks, strict=True)):
            packet.time_base, packet.duration = 1 / fps, 1
            packet.pts = places[rank]
            packet.dts = places[index - delay] if index >= delay else places[0] - delay + index
            packet.stream = target
            if index not in lost:
                output.mux(packet)
        output.close()
        return Path(file.name).read_bytes()


def _cut(share: float) -> Change:
    return lambda data: data[: int(share * len(data))]


def _zeroed(data: bytes, num_bytes: int = 64) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes(num_bytes) + data[middle + num_bytes :]


def _holed(data: bytes, num_bytes: int = 188) -> bytes:
    """Leave out one packet of a transport stream, or as many bytes."""
    middle = len(data) // num_bytes // 2 * num_bytes
    return data[:middle] + data[middle + num_bytes :]


def _flipped(seed: int, count: int) -> Change:
    return lambda data: flipped(data, seed, count, len(data) // 4, 3 * len(data) // 4)


LOST: dict[str, tuple[int, ...]] = {
    "lost_packet": (5,),
    "lost_packets": (3, 4, 12),
    "lost_first_key": (0,),
    "starts_inside": (0, 1, 2, 3, 4),
    "lost_second_key": (8,),
}
CHANGED: dict[str, Change] = {
    "cut_30": _cut(0.3),
    "cut_60": _cut(0.6),
    "cut_90": _cut(0.9),
    "cut_by_a_byte": lambda data: data[:-1],
    "zeroed": _zeroed,
    "holed": _holed,
    "one_flipped": _flipped(1, 1),
    "nine_flipped": _flipped(2, 9),
    "flipped_anywhere": lambda data: flipped(data, 3, 4),
}
FLIPPED = ("one_flipped", "nine_flipped", "flipped_anywhere")
DAMAGE = ("whole", *LOST, *CHANGED)


@dataclass(frozen=True)
class Case:
    """One generated video."""

    stream: str
    container: str
    rate: str
    damage: str

    def __str__(self) -> str:
        return f"{self.stream}-{self.container}-{self.rate}-{self.damage}"

    def time_s(self, number: int) -> float:
        """The time of the frame that shows this number."""
        return float((VARIABLE[number] if self.rate == "variable" else number) / RATES.get(self.rate, Fraction(24)))

    @property
    def data(self) -> bytes:
        made = contained(self.stream, self.container, self.rate, LOST.get(self.damage, ()))
        return CHANGED.get(self.damage, bytes)(made)


def cases() -> Iterator[Case]:
    """Every stream in every container that takes it, with every damage; rates alternate."""
    number = 0
    for container, streams in CONTAINERS.items():
        rates = [*RATES] if container in FIXED_RATE else [*RATES, "variable"]
        for stream in streams:
            for damage in DAMAGE:
                number += 1
                if stream == "ffv1" and damage in FLIPPED:
                    continue  # versions of its decoder conceal damage, or leave pictures out
                yield Case(stream, container, rates[number % len(rates)], damage)


def shown_otherwise() -> dict[str, bytes]:
    """Whole videos that are turned, stretched, recorded live, joined, or change their size."""
    videos = {}
    for codec in ("h264", "mpeg4"):
        base = contained(codec, "mp4", "24")
        videos |= {f"{codec}-{name}": displayed(base, matrix) for name, matrix in MATRICES.items()}
    for container in ("mp4", "matroska", "mpegts"):
        for ratio in ("2/1", "1/2", "16/11"):
            change = f"h264_metadata=sample_aspect_ratio={ratio}"
            videos[f"{container}-{ratio}"] = remuxed(contained("h264", "mp4", "24"), container, bitstream_filter=change)
    for stream, container in (("vp8", "webm"), ("vp9", "webm"), ("av1", "matroska"), ("h264_b", "matroska")):
        videos[f"{stream}-{container}-live"] = contained(stream, container, "variable", muxer={"live": "1"})
    for sizes in (((128, 48), (256, 96), (64, 64)), ((128, 48), (128, 48))):
        segments = [
            encode_video(8, codec="libx264", container="mpegts", first=8 * place, size=size, options=FAST)
            for place, size in enumerate(sizes)
        ]
        videos[f"joined-{len(sizes)}"] = b"".join(segments)
    return videos


@dataclass(frozen=True)
class Shown:
    """Frames of one size with their times in seconds."""

    frames: NDArray[np.uint8]
    times_s: list[float]

    @property
    def numbers(self) -> list[int]:
        return [number_in(frame) for frame in self.frames]


_TIME = re.compile(r"Parsed_showinfo.* pts_time:(\S+)")


def by_ffmpeg(path: Path, width: int = WIDTH, height: int = HEIGHT) -> Shown:
    """The frames of the first video stream as ffmpeg shows them, upright, scaled to this size."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-nostdin", "-nostats", "-threads", "1"]
    command += ["-i", str(path), "-map", "0:v:0?", "-fps_mode", "passthrough", "-filter_threads", "1"]
    command += ["-vf", f"showinfo=checksum=0,scale={width}:{height}", "-f", "rawvideo", "-pix_fmt", "rgb24", "pipe:1"]
    result = subprocess.run(command, capture_output=True, timeout=600)
    times = [float(time) for time in _TIME.findall(result.stderr.decode(errors="replace"))]
    pixels = np.frombuffer(result.stdout, np.uint8)[: len(times) * width * height * 3]
    return Shown(pixels.reshape(len(times), height, width, 3), times)
