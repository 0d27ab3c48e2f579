"""Probes a video file by demultiplexing before frames are read: frame times come from packets, or from decoding if
packets do not give them. Finds files that are cut short or damaged, and their good part. Runs in the decoding
process."""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise, takewhile
from operator import attrgetter
from typing import Any, NamedTuple

import av

from pipeline.media.pixels import MediaError
from pipeline.media.video import parts
from pipeline.media.video.completeness import promised_s, riff_damage
from pipeline.media.video.container import Opened, VideoStream, has_index, open_container, video_stream
from pipeline.media.video.packets import FrameReader, PacketReader, shows_damage

MAX_ASPECT = 16
"""Maximum ratio of the sides of one pixel; others are taken for damage, and pixels for squares."""
MAX_VIDEO_S = 10_000_000
"""Maximum length of a video in seconds (115 days); a frame behind it has a damaged time."""
VOP = b"\0\0\1\xb6"
"""Start code of a picture of MPEG-4 part 2; a packet with several is a packed bitstream."""


def probe(path: str, max_pixels: int, square_pixels: bool = True, damage: str = "") -> VideoStream:
    """Read every packet of the video stream; they are decoded only if they do not give the times of frames.

    Without `square_pixels`, the shape of pixels is ignored. With `damage`, the reason why an earlier call or its frames
    failed, all packets are decoded, and the video ends before the first damaged frame. MediaError `not_a_video`,
    `no_video_stream`, `video_too_large`, `unsupported_video`, or `broken_video` for a file that is damaged or cut
    short. The caller closes the video.
    """
    with contextlib.ExitStack() as stack:
        container = stack.enter_context(open_container(path))
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
            keys={},
            tick_s=Fraction(stream.time_base or Fraction(1, 25)),
            last_ticks=1,
            is_timed=True,
            skipped_ticks=0,
        )
        video.size_of(video.width, video.height)
        listing = _listed(path, container, stream, bool(damage))
        frame_s = 1 / Fraction(stream.guessed_rate or stream.average_rate or Fraction(25))
        if not listing.gives_times:
            return _counted(video, listing, frame_s, damage)
        video = _timed(video, listing, damage)
        if damage:
            return _good_part(video, listing.bad_tick, damage)
        first = listing.packets[0]
        if first.is_key and first.tick is not None and first.position is not None and has_index(video.format):
            video = replace(video, opened=Opened(container, first.tick, first.position))
            stack.pop_all()
    return video


def _aspect(stream: Any) -> Fraction:
    aspect = Fraction(stream.sample_aspect_ratio or 1)
    return aspect if Fraction(1, MAX_ASPECT) <= aspect <= MAX_ASPECT else Fraction(1)


class _Packet(NamedTuple):
    tick: int | None
    duration: int
    is_key: bool
    is_hidden: bool
    position: int | None
    dts: int | None


@dataclass(frozen=True)
class _Listing:
    """The packets of a stream in file order; with `is_counted`, their times are not those of frames. Frames from
    `bad_tick` on are missing or behind missing ones in a file that is cut short; it is infinite for whole files."""

    packets: list[_Packet]
    num_joins: int
    is_counted: bool
    bad_tick: float = math.inf

    @property
    def shown(self) -> list[_Packet]:
        """The packets that no edit list hides, as one does after trimming without re-encoding."""
        return [packet for packet in self.packets if not packet.is_hidden]

    @property
    def gives_times(self) -> bool:
        """Whether every frame is one packet with a time of its own."""
        ticks = {packet.tick for packet in self.shown}
        return not self.is_counted and None not in ticks and len(ticks) == len(self.shown)


def _listed(path: str, container: Any, stream: Any, tolerates_damage: bool) -> _Listing:
    formats = container.format.name.split(",")
    is_avi = "avi" in formats
    context = stream.codec_context
    packets: list[_Packet] = []
    reader, is_packed, reads_to_end = PacketReader(container, stream), False, True
    is_mpeg4 = context.name == "mpeg4"
    # AVI has no presentation times: they follow from the order of packets, if none is missing.
    is_reordered = is_avi and context.name in ("h264", "hevc") and context.has_b_frames
    due: int | None = None
    try:
        for packet in filter(attrgetter("size"), reader):
            reads_to_end = not packet.is_corrupt
            if packet.is_corrupt and not shows_damage(container.format.name):
                break
            if is_reordered and due is not None and packet.dts != due:
                raise MediaError("broken_video", f"frames are missing in the AVI file behind frame {len(packets)}")
            if packet.dts is not None and (packet.is_keyframe or due is not None):
                due = packet.dts + 1
            is_packed = is_packed or (is_mpeg4 and bytes(packet).count(VOP) > 1)
            hidden = bool(packet.is_discard)
            is_key, duration = bool(packet.is_keyframe), packet.duration or 0
            packets.append(_Packet(packet.pts, duration, is_key, hidden, packet.pos, packet.dts))
    except av.error.FFmpegError:
        reads_to_end = False
    num_packets, num_promised = len(packets), stream.frames
    is_short = num_packets < num_promised
    if is_short and is_avi:  # it counts dropped frames, which are chunks of no bytes
        end = riff_damage(path)
        is_short = end is not None
        if end is not None and tolerates_damage:
            packets = [packet for packet in packets if packet.position is not None and packet.position < end]
    promise_s = promised_s(path, formats, container.duration and container.duration / av.time_base)
    if promise_s and num_packets:
        ticks = sorted(packet.tick or 0 for packet in packets)
        last = ticks[-1] + 2 * max(_usual_gap(ticks), packets[-1].duration)
        is_short = float(last * Fraction(stream.time_base or 1)) < promise_s
    bad_tick = math.inf
    if packets and (not reads_to_end or is_short):
        if not tolerates_damage:
            count = f"{num_packets} of {num_promised} frames" if num_promised else f"only {num_packets} frames"
            raise MediaError("broken_video", f"the file is damaged or cut short: it contains {count}")
        # Missing packets have later decoding times, and no frame is shown before it is decoded.
        bad_tick = math.inf if packets[-1].dts is None else packets[-1].dts + 1
    listing = _Listing(packets, reader.num_joins, is_packed or is_reordered, bad_tick)
    if not listing.shown:
        raise MediaError("broken_video", "the video has no frames")
    return listing


def _timed(video: VideoStream, listing: _Listing, damage: str) -> VideoStream:
    """Complete a video with the times of its packets."""
    first, shown = listing.packets[0], listing.shown
    ticks = sorted(packet.tick for packet in shown if packet.tick is not None)
    if (ticks[-1] - ticks[0]) * video.tick_s > MAX_VIDEO_S:
        if not damage:
            raise MediaError(
                "broken_video", f"the file is damaged: its frames have times over more than {MAX_VIDEO_S} s"
            )
        origin = shown[0].tick or 0
        ticks = [tick for tick in ticks if 0 <= (tick - origin) * video.tick_s <= MAX_VIDEO_S]
    keys = {packet.tick: packet.position for packet in shown if packet.is_key and packet.tick is not None}
    start = ticks[0]
    if not first.is_key or (first.tick is not None and start < first.tick):
        # The file starts inside a group of pictures, or with an open one.
        start = _first_decodable(video, next(iter(keys), start) if not first.is_key else start)
    kept = ticks[bisect_left(ticks, start) :]
    if not kept:
        raise MediaError("broken_video", "not one frame can be decoded")
    last = max(packet.duration for packet in shown if packet.tick == kept[-1])
    last = last if last * video.tick_s <= MAX_VIDEO_S else 0
    return replace(
        video,
        ticks=tuple(kept),
        keys={} if listing.num_joins else keys,
        last_ticks=last or _usual_gap(kept),
        skipped_ticks=kept[0] - ticks[0],
        part=parts.late_start(len(ticks) - len(kept), float((kept[0] - ticks[0]) * video.tick_s)),
        restarts_cleanly=first.is_key and not listing.num_joins and _restarts_cleanly(listing.packets),
    )


def _restarts_cleanly(packets: Sequence[_Packet]) -> bool:
    """Return whether all packets are shown, and none that follows a key frame in the file is shown before it (open
    group of pictures)."""
    key = 0
    for packet in packets:
        tick = packet.tick or 0
        key = tick if packet.is_key else key
        if packet.is_hidden or tick < key:
            return False
    return True


def _usual_gap(ticks: Sequence[int | None]) -> int:
    gaps = sorted(b - a for a, b in pairwise(tick for tick in ticks if tick is not None))
    return gaps[len(gaps) // 2] if gaps else 1


def _first_decodable(video: VideoStream, start: int) -> int:
    """Return the time of the first frame that can be decoded, at `start` or later."""
    with open_container(video.path) as container:
        for frame in FrameReader(container, container.streams[video.stream]):
            if frame.pts is not None and frame.pts >= start:
                return int(frame.pts)
    raise MediaError("broken_video", "not one frame can be decoded")


def _with_damage(video: VideoStream, damage: str) -> VideoStream:
    """Add to `part` how much of a damaged video is used, and why."""
    return replace(video, part=parts.joined((video.part, parts.good_part(len(video.ticks), video.end_s, damage))))


def _good_part(video: VideoStream, bad_tick: float, damage: str) -> VideoStream:
    """Decode a damaged video, and let it end before `bad_tick` and its first frame that is damaged or missing."""
    numbers: dict[int | None, int] = {}
    with open_container(video.path) as container:
        frames = FrameReader(container, container.streams[video.stream])
        first_damage = (
            math.inf
        )  # packet, in the order of the file, in which frames come after those that they reference
        with contextlib.suppress(MediaError):
            for frame in frames:
                if frame.pts is not None and frame.pts >= video.ticks[0] and frames.number is not None:
                    numbers[frame.pts] = frames.number
                    if frames.is_damaged:
                        first_damage = min(first_damage, frames.number)
    begin = numbers.get(video.ticks[0], 0)
    first_damage = min((first_damage, *(number for number in frames.lost if number >= begin)))
    kept = list(takewhile(lambda tick: numbers.get(tick, math.inf) < first_damage and tick < bad_tick, video.ticks))
    if not kept:
        raise MediaError("broken_video", "not one frame can be decoded")
    return _with_damage(replace(video, ticks=tuple(kept), last_ticks=_usual_gap(kept)), damage)


def _filled(times: Sequence[int | None]) -> list[int]:
    """Return the times of frames in order, with guesses of missing ones; all are 0 if no frame has a time.

    AVI and ASF have no time that could be the last frame's if packets are reordered: it repeats the one before.
    """
    first = next((index for index, time in enumerate(times) if time is not None), None)
    if first is None:
        return [0] * len(times)
    gap, ticks = _usual_gap(times), [0] * first
    for index, time in enumerate(times[first:], start=first):
        repeats = index + 1 == len(times) and index > first and time == ticks[-1]
        ticks.append(ticks[-1] + gap if time is None or repeats else time)
    ticks[:first] = [ticks[first] - (first - index) * gap for index in range(first)]
    return ticks


def _counted(video: VideoStream, listing: _Listing, frame_s: Fraction, damage: str) -> VideoStream:
    """Complete a video whose packets do not give the times of its frames: decode it, count its frames, and use their
    times if each has one of its own, in order of presentation, or else numbers at the stream's rate. With `damage`, it
    ends before the first damaged frame."""
    times: list[int | None] = []
    num_before = 0
    with open_container(video.path) as container:
        frames = FrameReader(container, container.streams[video.stream])
        try:
            for frame in frames:
                num_before = num_before if times else len(frames.lost)
                is_bad = frames.is_damaged or len(frames.lost) > num_before or (frame.pts or 0) >= listing.bad_tick
                if damage and is_bad:
                    break
                times.append(frame.pts)
        except MediaError:
            if not damage:
                raise
    num_lost = 0 if damage else len(frames.lost) - num_before
    if not times or num_lost:
        what = f"{num_lost} of its packets are no frames" if times else "not one frame can be decoded"
        raise MediaError("broken_video", f"the file is damaged: {what}")
    video = replace(video, is_timed=False, part=parts.late_start(num_before, float(num_before * frame_s)))
    ticks = _filled(times)
    if all(earlier < later for earlier, later in pairwise(ticks)):
        start = min((packet.tick for packet in listing.shown if packet.tick is not None), default=ticks[0])
        skipped = max(0, ticks[0] - start) if num_before else 0
        video = replace(video, ticks=tuple(ticks), last_ticks=_usual_gap(ticks), skipped_ticks=skipped)
    else:
        video = replace(video, ticks=tuple(range(len(times))), tick_s=frame_s)
    return _with_damage(video, damage) if damage else video
