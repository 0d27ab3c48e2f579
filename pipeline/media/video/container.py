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
IDR = 5


@dataclass(frozen=True)
class VideoStream:
    """One video stream: `ticks` are the frame times in ascending order, in units of `tick_s`; the last frame lasts
    `last_ticks`. `keys` are the ticks of key frames, at which decoding can start, in file order.

    `is_timed` is False if the container has no valid frame times: `ticks` are then frame numbers at the stream's rate.
    `restarts_cleanly` is True if frames after a key frame in the file never reference frames before it.
    """

    path: str
    stream: int
    format: str
    codec: str
    width: int
    height: int
    ticks: tuple[int, ...]
    keys: tuple[int, ...]
    tick_s: Fraction
    last_ticks: int
    is_timed: bool
    restarts_cleanly: bool

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
    is_clean: bool


def probe(path: str, max_pixels: int) -> VideoStream:
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
        extradata, is_h264 = bytes(context.extradata or b""), context.name == "h264"
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
                    is_key = bool(packet.is_keyframe)
                    is_clean = not (is_key and is_h264) or IDR in nal_kinds(bytes(packet), extradata)
                    packets.append(_Packet(packet.pts, packet.duration or 0, is_key, is_clean))
        except av.error.FFmpegError:
            reads_to_end = False
        num_packets, num_promised = len(packets) + num_hidden, stream.frames
        if num_packets and (not reads_to_end or num_packets < num_promised):
            count = f"{num_packets} of {num_promised} frames" if num_promised else f"only {num_packets} frames"
            raise MediaError("broken_video", f"the file is damaged or cut short: it contains {count}")
        if not packets:
            raise MediaError("broken_video", "the video has no frames")
        return _described(path, container, stream, packets, num_hidden)


def _described(path: str, container: Any, stream: Any, packets: list[_Packet], num_hidden: int) -> VideoStream:
    tick_s = Fraction(stream.time_base or Fraction(1, 25))
    shown_ticks = [packet.tick for packet in packets if packet.tick is not None]
    is_timed = len(set(shown_ticks)) == len(packets)
    if is_timed:
        keys = [tick for tick, packet in zip(shown_ticks, packets, strict=True) if packet.is_key]
        is_clean = all(packet.is_clean for packet in packets) and not _has_leading_frames(shown_ticks, packets)
        restarts_cleanly = is_clean and not num_hidden  # the first shown frames reference the hidden frames
        ordered = sorted(shown_ticks)
        last = max(packet.duration for packet in packets if packet.tick == ordered[-1])
    else:
        tick_s = 1 / Fraction(stream.average_rate or stream.guessed_rate or Fraction(25))
        keys, restarts_cleanly, ordered, last = [], False, list(range(len(packets))), 1
    gaps = sorted(later - earlier for earlier, later in pairwise(ordered))
    return VideoStream(
        path=path,
        stream=stream.index,
        format=container.format.name,
        codec=stream.codec_context.name,
        width=stream.codec_context.width,
        height=stream.codec_context.height,
        ticks=tuple(ordered),
        keys=tuple(keys),
        tick_s=tick_s,
        last_ticks=last or (gaps[len(gaps) // 2] if gaps else 1),
        is_timed=is_timed,
        restarts_cleanly=restarts_cleanly,
    )


def _has_leading_frames(ticks: list[int], packets: list[_Packet]) -> bool:
    """Return whether a frame follows a key frame in the file and is shown before it (open GOP)."""
    key = None
    for tick, packet in zip(ticks, packets, strict=True):
        if packet.is_key:
            key = tick
        elif key is not None and tick < key:
            return True
    return False


def nal_kinds(data: bytes, extradata: bytes) -> set[int]:
    """Return the NAL unit types in one H.264 packet with length prefixes (avcC) or start codes."""
    kinds: set[int] = set()
    if len(extradata) > 4 and extradata[0] == 1:
        width = (extradata[4] & 3) + 1
        offset = 0
        while offset + width < len(data):
            kinds.add(data[offset + width] & 31)
            offset += width + int.from_bytes(data[offset : offset + width], "big")
        return kinds
    offset = data.find(b"\0\0\1")
    while offset >= 0 and offset + 3 < len(data):
        kinds.add(data[offset + 3] & 31)
        offset = data.find(b"\0\0\1", offset + 3)
    return kinds
