"""Opens video files; formats that reference other files or URLs (playlists) are excluded. Runs in the decoding
process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
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


INDEXED = frozenset({"mov", "matroska"})


class Opened(NamedTuple):
    """An open container, and time and position in the file of the first packet of its stream."""

    container: Any
    first_tick: int
    first_position: int


@dataclass(frozen=True)
class VideoStream:
    """One video stream: `ticks` are the frame times in ascending order, in units of `tick_s`; the last frame lasts
    `last_ticks`. `keys` are the positions in the file of key frames, at which decoding can start, by tick; None if
    unknown.

    `is_timed` is False if frames are found by their number, because the container has no valid times for them; `ticks`
    are then frame numbers at the stream's rate, if decoding gives no better times. `skipped_ticks` is the time of the
    pictures before the first frame, which cannot be decoded because the file starts inside a group of pictures. `part`
    describes which part of the file the frames are, and why; it is empty if they are all.
    `aspect` is the ratio of width to height of one pixel. `restarts_cleanly` is whether the first packet is a key
    frame, all packets are shown, and frames after a key frame in the file never reference frames before it.
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
    keys: Mapping[int, int | None]
    tick_s: Fraction
    last_ticks: int
    is_timed: bool
    skipped_ticks: int
    restarts_cleanly: bool = False
    part: str = ""
    opened: Opened | None = None
    """The container that was read for this; opening takes as long as decoding several frames."""

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

    def close(self) -> None:
        """Close the container that was read for this, if it is open."""
        if self.opened is not None:
            self.opened.container.close()

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


@contextlib.contextmanager
def rewound(video: VideoStream) -> Iterator[Any]:
    """Provide a container of the video at its first packet: that of `video.opened` if seeking finds this packet, so
    that its position is not used elsewhere meanwhile, or a newly opened one."""
    if (opened := video.opened) is not None and _rewind(opened, video.stream):
        yield opened.container
    else:
        with open_container(video.path) as container:
            yield container


def has_index(formats: str) -> bool:
    """Return whether files of these formats have an index, by which seeking is exact."""
    return not INDEXED.isdisjoint(formats.split(","))


def _rewind(opened: Opened, stream_index: int) -> bool:
    container, stream = opened.container, opened.container.streams[stream_index]
    try:
        container.seek(opened.first_tick, stream=stream, backward=True)
        packet = next(container.demux(stream))
        container.seek(opened.first_tick, stream=stream, backward=True)
    except av.error.FFmpegError:
        return False
    return (packet.pts, packet.pos) == (opened.first_tick, opened.first_position)


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
