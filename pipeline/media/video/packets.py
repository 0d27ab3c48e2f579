"""Reads the packets of an open video stream and decodes them. Runs in the decoding process."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import av

from pipeline.media.pixels import MediaError

DISCONTINUOUS = frozenset({"mpegts", "mpeg", "flv", "ogg"})
"""Formats whose times may restart in the middle, because files of them are joined or recorded from streams."""
JUMP_S, SLACK_S = 10, Fraction(1, 10)
"""Times restart where they jump by more than `JUMP_S` seconds or back by more than `SLACK_S`, as FFmpeg has it."""


class PacketReader:
    """Iterates over a stream's packets from the container's position. Where times restart, as in joined files, those of
    further packets are moved behind the times before; `num_joins` is the number of such places so far."""

    def __init__(self, container: Any, stream: Any) -> None:
        self._container, self._stream = container, stream
        self._is_continuous = DISCONTINUOUS.isdisjoint(container.format.name.split(","))
        tick_s = Fraction(stream.time_base or 1)
        self._jump, self._slack = JUMP_S / tick_s, SLACK_S / tick_s
        self.num_joins = 0

    def __iter__(self) -> Iterator[Any]:
        offset = 0
        last: int | None = None
        due = 0
        for packet in self._container.demux(self._stream):
            if not self._is_continuous and packet.dts is not None:
                dts = packet.dts + offset
                if last is not None and (dts > due + self._jump or dts < last - self._slack):
                    offset += due - dts
                    self.num_joins += 1
                packet.dts += offset
                if packet.pts is not None:
                    packet.pts += offset
                last, due = packet.dts, packet.dts + (packet.duration or 0)
            yield packet


def decoded_frames(container: Any, stream: Any, damage: list[int] | None = None) -> Iterator[Any]:
    """Yield frames in presentation order from the container's position; damaged packets are skipped, and the number of
    frames before each is added to `damage`."""
    if not stream.codec_context.is_open:
        stream.thread_type = "NONE"
    num_frames = 0
    try:
        for packet in PacketReader(container, stream):
            try:
                frames = packet.decode()
            except av.error.InvalidDataError:
                if damage is not None:
                    damage.append(num_frames)
                continue
            num_frames += len(frames)
            yield from frames
    except av.error.DecoderNotFoundError:
        raise MediaError("unsupported_video", f"there is no decoder for {stream.codec_context.name}") from None
    except av.error.FFmpegError as error:
        lines = (error.strerror or str(error)).strip().splitlines() or [type(error).__name__]
        raise MediaError("broken_video", f"the video cannot be decoded: {lines[0][:200]}") from None
