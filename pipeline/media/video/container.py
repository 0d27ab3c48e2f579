"""Probes a video file by demultiplexing, without decoding, before a decoder reads it: formats that reference other
files or URLs (playlists) are excluded, and frame times come from packets. Runs in the decoding process."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

import av

from pipeline.media.pixels import MediaError

FORMATS = (
    *("mov", "mp4", "m4a", "3gp", "3g2", "mj2"),
    *("matroska", "webm", "avi", "mpegts", "mpeg", "flv", "asf", "ogg", "ivf", "gif"),
    *("mpegvideo", "m4v", "h264", "hevc"),
)
"""FFmpeg's names of self-contained formats. Playlists (hls, dash, concat) and image patterns are excluded, because they
can open any file or URL."""
KNOWN_STARTS = {
    4: (b"ftyp", b"moov", b"mdat", b"wide", b"free"),
    0: (b"\x1aE\xdf\xa3", b"RIFF", b"FLV", b"OggS", b"GIF8"),
}


@dataclass(frozen=True)
class Video:
    """One video stream: `ticks` are the frame times in ascending order, in units of `tick_s`; the last frame lasts
    `last_ticks`. `keys` are the ticks of key frames, at which decoding can start, in file order.

    `is_timed` is False if the container has no valid frame times: `ticks` are then frame numbers at the stream's rate.
    """

    path: str
    stream: int
    width: int
    height: int
    ticks: tuple[int, ...]
    keys: tuple[int, ...]
    tick_s: Fraction
    last_ticks: int
    is_timed: bool

    @property
    def times_s(self) -> list[float]:
        """Presentation time of each frame in seconds after the first frame."""
        return [float((tick - self.ticks[0]) * self.tick_s) for tick in self.ticks]

    @property
    def end_s(self) -> float:
        """End of the last frame in seconds after the first frame."""
        return float((self.ticks[-1] - self.ticks[0] + self.last_ticks) * self.tick_s)


def open_container(path: str) -> Any:
    """Open a local file of a format in `FORMATS` as a PyAV container; MediaError `not_a_video` or `broken_video`."""
    options = {"format_whitelist": ",".join(FORMATS), "protocol_whitelist": "file", "enable_drefs": "0"}
    try:
        return av.open(path, options=options, metadata_errors="replace")
    except av.error.FFmpegError as error:
        with open(path, "rb") as file:
            head = file.read(16)
        is_video = any(head.startswith(starts, offset) for offset, starts in KNOWN_STARTS.items())
        if is_video and not isinstance(error, av.error.ArgumentError):
            reason = error.strerror or error or type(error).__name__
            raise MediaError("broken_video", f"the video's header cannot be read: {reason}") from None
        raise MediaError("not_a_video", "the bytes are no video of a known format") from None


def video_stream(container: Any) -> Any:
    """Return the first video stream that is not cover art; MediaError `no_video_stream`, or `broken_video`."""
    for stream in container.streams.video:
        if not stream.disposition & av.stream.Disposition.attached_pic:
            return stream
    if not container.streams:
        raise MediaError("broken_video", "no stream is found in the file: it is damaged or cut short")
    kinds = ", ".join(sorted({stream.type for stream in container.streams}))
    raise MediaError("no_video_stream", f"the file holds {kinds}, and no moving picture")


class _Packet(NamedTuple):
    tick: int | None
    duration: int
    is_key: bool


def probe(path: str, max_pixels: int) -> Video:
    """Read every packet of the video stream without decoding it; MediaError `not_a_video`, `no_video_stream`,
    `video_too_large`, `unsupported_video`, or `broken_video` for a file that is damaged or cut short."""
    with open_container(path) as container:
        stream = video_stream(container)
        context = stream.codec_context
        if context is None:
            raise MediaError("unsupported_video", "its codec is not known")
        if context.width < 1 or context.height < 1:
            raise MediaError("broken_video", "the video's frames have no size")
        if context.width * context.height > max_pixels:
            limit = f"source.max_image_pixels ({max_pixels})"
            raise MediaError("video_too_large", f"frames of {context.width} x {context.height} are more than {limit}")
        packets: list[_Packet] = []
        num_hidden, reads_to_end = 0, True
        try:
            for packet in container.demux(stream):
                if packet.is_corrupt and packet.size:
                    reads_to_end = False
                    break
                if packet.size and packet.is_discard:  # hidden by an edit list, as after trimming without re-encoding
                    num_hidden += 1
                elif packet.size:
                    packets.append(_Packet(packet.pts, packet.duration or 0, bool(packet.is_keyframe)))
        except av.error.FFmpegError:
            reads_to_end = False
        num_packets, num_promised = len(packets) + num_hidden, stream.frames
        if num_packets and (not reads_to_end or num_packets < num_promised):
            count = f"{num_packets} of {num_promised} frames" if num_promised else f"only {num_packets} frames"
            raise MediaError("broken_video", f"the file is damaged or cut short: it contains {count}")
        if not packets:
            raise MediaError("broken_video", "the video has no frames")
        return _described(path, stream, packets)


def _described(path: str, stream: Any, packets: list[_Packet]) -> Video:
    tick_s = Fraction(stream.time_base or Fraction(1, 25))
    ticks = sorted(packet.tick for packet in packets if packet.tick is not None)
    keys: list[int] = []
    last = 1
    is_timed = len(set(ticks)) == len(packets)
    if is_timed:
        keys = [packet.tick for packet in packets if packet.is_key and packet.tick is not None]
        last = max(packet.duration for packet in packets if packet.tick == ticks[-1])
    else:
        tick_s = 1 / Fraction(stream.average_rate or stream.guessed_rate or Fraction(25))
        ticks = list(range(len(packets)))
    gaps = sorted(later - earlier for earlier, later in pairwise(ticks))
    return Video(
        path=path,
        stream=stream.index,
        width=stream.codec_context.width,
        height=stream.codec_context.height,
        ticks=tuple(ticks),
        keys=tuple(keys),
        tick_s=tick_s,
        last_ticks=last or (gaps[len(gaps) // 2] if gaps else 1),
        is_timed=is_timed,
    )
