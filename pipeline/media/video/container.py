"""Probes a video file by demultiplexing before frames are read: formats that reference other files or URLs (playlists)
are excluded, and frame times come from packets. Runs in the decoding process."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import av

from pipeline.media.pixels import MediaError
from pipeline.media.video.completeness import has_all_of_riff, has_all_of_segment
from pipeline.media.video.packets import PacketReader, decoded_frames

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
MAX_ASPECT = 16
"""Maximum ratio of the sides of one pixel; others are taken for damage, and pixels for squares."""
VOP = b"\0\0\1\xb6"
"""Start code of a picture of MPEG-4 part 2; a packet with several is a packed bitstream."""


@dataclass(frozen=True)
class VideoStream:
    """One video stream: `ticks` are the frame times in ascending order, in units of `tick_s`; the last frame lasts
    `last_ticks`. `keys` are the ticks of key frames, at which decoding can start, in file order.

    `is_timed` is False if frames are found by their number, because the container has no valid times for them; `ticks`
    are then frame numbers at the stream's rate, if decoding gives no better times. `skipped_ticks` is the time of the
    pictures before the first frame, which cannot be decoded because the file starts inside a group of pictures.
    `aspect` is the ratio of width to height of one pixel.
    """

    path: str
    stream: int
    format: str
    codec: str
    width: int
    height: int
    aspect: Fraction
    max_pixels: int
    ticks: tuple[int, ...]
    keys: tuple[int, ...]
    tick_s: Fraction
    last_ticks: int
    is_timed: bool
    skipped_ticks: int

    @property
    def times_s(self) -> list[float]:
        """Presentation time of each frame in seconds after the first frame."""
        return [float((tick - self.ticks[0]) * self.tick_s) for tick in self.ticks]

    @property
    def end_s(self) -> float:
        """End of the last frame in seconds after the first frame."""
        return float((self.ticks[-1] - self.ticks[0] + self.last_ticks) * self.tick_s)

    @property
    def skipped_s(self) -> float:
        """Seconds of the file before its first frame."""
        return float(self.skipped_ticks * self.tick_s)

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """Return the size of a stored frame in square pixels; the shorter side of other pixels grows. MediaError
        `video_too_large`."""
        if self.aspect >= 1:
            width = round(width * self.aspect)
        else:
            height = round(height / self.aspect)
        if width * height > self.max_pixels:
            limit = f"source.max_image_pixels ({self.max_pixels})"
            raise MediaError("video_too_large", f"frames of {width} x {height} are more than {limit}")
        return width, height


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
    """Return the container's default video stream, or else its first one; cover art and thumbnails are none. MediaError
    `no_video_stream`, or `broken_video`."""
    kinds = av.stream.Disposition
    streams = [s for s in container.streams.video if not s.disposition & (kinds.attached_pic | kinds.timed_thumbnails)]
    if streams:
        return next((stream for stream in streams if stream.disposition & kinds.default), streams[0])
    if not container.streams:
        raise MediaError("broken_video", "no stream is found in the file: it is damaged or cut short")
    types = ", ".join(sorted({stream.type for stream in container.streams}))
    raise MediaError("no_video_stream", f"the file holds {types}, and no moving picture")


def probe(path: str, max_pixels: int, square_pixels: bool = True) -> VideoStream:
    """Read every packet of the video stream; they are decoded only if they do not give the times of frames.

    Without `square_pixels`, the shape of pixels is ignored. MediaError `not_a_video`, `no_video_stream`,
    `video_too_large`, `unsupported_video`, or `broken_video` for a file that is damaged or cut short.
    """
    with open_container(path) as container:
        stream = video_stream(container)
        context = stream.codec_context
        if context is None:
            raise MediaError("unsupported_video", "its codec is not known")
        if context.width < 1 or context.height < 1:
            raise MediaError("broken_video", "the video's frames have no size")
        video = VideoStream(
            path=path,
            stream=stream.index,
            format=container.format.name,
            codec=context.name,
            width=context.width,
            height=context.height,
            aspect=_aspect(stream) if square_pixels else Fraction(1),
            max_pixels=max_pixels,
            ticks=(),
            keys=(),
            tick_s=Fraction(stream.time_base or Fraction(1, 25)),
            last_ticks=1,
            is_timed=True,
            skipped_ticks=0,
        )
        video.size_of(video.width, video.height)
        listing = _listed(path, container, stream)
        frame_s = 1 / Fraction(stream.average_rate or stream.guessed_rate or Fraction(25))
    return _timed(video, listing) if listing.gives_times else _counted(video, frame_s)


def _aspect(stream: Any) -> Fraction:
    aspect = Fraction(stream.sample_aspect_ratio or 1)
    return aspect if Fraction(1, MAX_ASPECT) <= aspect <= MAX_ASPECT else Fraction(1)


class _Packet(NamedTuple):
    tick: int | None
    duration: int
    is_key: bool
    is_hidden: bool


@dataclass(frozen=True)
class _Listing:
    """The packets of a stream in file order; with `is_counted`, their times are not those of frames."""

    packets: list[_Packet]
    num_joins: int
    is_counted: bool

    @property
    def shown(self) -> list[_Packet]:
        """The packets that no edit list hides, as one does after trimming without re-encoding."""
        return [packet for packet in self.packets if not packet.is_hidden]

    @property
    def gives_times(self) -> bool:
        """Whether every frame is one packet with a time of its own."""
        ticks = {packet.tick for packet in self.shown}
        return not self.is_counted and None not in ticks and len(ticks) == len(self.shown)


def _listed(path: str, container: Any, stream: Any) -> _Listing:
    is_avi, is_broadcast, is_matroska = (
        name in container.format.name.split(",") for name in ("avi", "mpegts", "matroska")
    )
    context = stream.codec_context
    packets: list[_Packet] = []
    reader, is_packed, reads_to_end = PacketReader(container, stream), False, True
    is_mpeg4 = context.name == "mpeg4"
    try:
        for packet in filter(attrgetter("size"), reader):
            reads_to_end = not packet.is_corrupt
            if packet.is_corrupt and not is_broadcast:  # players show a broadcast that lost some of its packets
                break
            is_packed = is_packed or (is_mpeg4 and bytes(packet).count(VOP) > 1)
            hidden = bool(packet.is_discard)
            packets.append(_Packet(packet.pts, packet.duration or 0, bool(packet.is_keyframe), hidden))
    except av.error.FFmpegError:
        reads_to_end = False
    num_packets, num_promised = len(packets), stream.frames
    # AVI counts dropped frames, which are chunks of no bytes.
    is_short = num_packets < num_promised and not (is_avi and has_all_of_riff(path))
    if is_matroska and num_packets and container.duration and not has_all_of_segment(path):
        tick_s = Fraction(stream.time_base or 1)
        last_s = max((packet.tick or 0) + 2 * packet.duration for packet in packets) * tick_s
        is_short = last_s < Fraction(container.duration, av.time_base)
    if num_packets and (not reads_to_end or is_short):
        count = f"{num_packets} of {num_promised} frames" if num_promised else f"only {num_packets} frames"
        raise MediaError("broken_video", f"the file is damaged or cut short: it contains {count}")
    is_reordered = is_avi and context.name in ("h264", "hevc") and context.has_b_frames  # AVI has no presentation times
    listing = _Listing(packets, reader.num_joins, is_packed or is_reordered)
    if not listing.shown:
        raise MediaError("broken_video", "the video has no frames")
    return listing


def _timed(video: VideoStream, listing: _Listing) -> VideoStream:
    """Complete a video with the times of its packets."""
    first, shown = listing.packets[0], listing.shown
    ticks = sorted(packet.tick for packet in shown if packet.tick is not None)
    keys = [packet.tick for packet in shown if packet.is_key and packet.tick is not None]
    start = ticks[0]
    if not first.is_key or (first.tick is not None and start < first.tick):
        # The file starts inside a group of pictures, or with an open one.
        start = _first_decodable(video, keys[0] if keys and not first.is_key else start)
    kept = ticks[bisect_left(ticks, start) :]
    if not kept:
        raise MediaError("broken_video", "not one frame can be decoded")
    last = max(packet.duration for packet in shown if packet.tick == kept[-1])
    return replace(
        video,
        ticks=tuple(kept),
        keys=() if listing.num_joins else tuple(keys),
        last_ticks=last or _usual_gap(kept),
        skipped_ticks=kept[0] - ticks[0],
    )


def _usual_gap(ticks: Sequence[int]) -> int:
    gaps = sorted(later - earlier for earlier, later in pairwise(ticks))
    return gaps[len(gaps) // 2] if gaps else 1


def _first_decodable(video: VideoStream, start: int) -> int:
    """Return the time of the first frame that can be decoded, at `start` or later."""
    with open_container(video.path) as container:
        for frame in decoded_frames(container, container.streams[video.stream]):
            if frame.pts is not None and frame.pts >= start:
                return int(frame.pts)
    raise MediaError("broken_video", "not one frame can be decoded")


def _counted(video: VideoStream, frame_s: Fraction) -> VideoStream:
    """Complete a video whose packets do not give the times of its frames: decode it, count its frames, and use their
    times if each has one of its own, in order of presentation, or else numbers at the stream's rate."""
    damage: list[int] = []
    with open_container(video.path) as container:
        frames = decoded_frames(container, container.streams[video.stream], damage)
        times = [frame.pts for frame in frames]
    if not times or any(damage):
        what = f"{len(damage)} of its packets are no frames" if times else "not one frame can be decoded"
        raise MediaError("broken_video", f"the file is damaged: {what}")
    if None not in times and len(set(times)) == len(times):
        ticks = tuple(sorted(times))
        return replace(video, is_timed=False, ticks=ticks, last_ticks=_usual_gap(ticks))
    return replace(video, is_timed=False, ticks=tuple(range(len(times))), tick_s=frame_s)
