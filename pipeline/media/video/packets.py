"""Reads the packets of an open video stream and decodes them. Runs in the decoding process."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import av

from pipeline.media.pixels import MediaError

DISCONTINUOUS = frozenset({"mpegts", "mpeg", "flv", "ogg"})
"""Formats whose times may restart in the middle, because files of them are joined or recorded from streams."""
UNORDERED = frozenset({"avi", "asf"})
"""Formats that store one time per packet; presentation times of packets in order are guesses, and off at gaps."""
SILENT = frozenset({"mpeg1video", "mpeg2video"})
"""Codecs whose decoders mark concealed damage in some cases only; they can raise an error in its place."""
JUMP_S, SLACK_S = 10, Fraction(1, 10)
"""Times restart where they jump by more than `JUMP_S` seconds or back by more than `SLACK_S`, as FFmpeg has it."""


def shows_damage(formats: str) -> bool:
    """Return whether damaged pictures are shown: players show a broadcast that lost some of its packets."""
    return "mpegts" in formats.split(",")


class PacketReader:
    """Iterates over a stream's packets from the container's position. Where times restart, as in joined files, those of
    further packets are moved behind the times before; `num_joins` is the number of such places so far."""

    def __init__(self, container: Any, stream: Any) -> None:
        self._container, self._stream = container, stream
        formats, context = container.format.name.split(","), stream.codec_context
        self._is_continuous = DISCONTINUOUS.isdisjoint(formats)
        in_order = context.name in ("h264", "hevc") and not context.has_b_frames
        self._is_guessed = in_order and not UNORDERED.isdisjoint(formats)
        tick_s = Fraction(stream.time_base or 1)
        self._jump, self._slack = JUMP_S / tick_s, SLACK_S / tick_s
        self.num_joins = 0

    def __iter__(self) -> Iterator[Any]:
        offset = 0
        last: int | None = None
        due = 0
        for packet in self._container.demux(self._stream):
            if self._is_guessed and packet.dts is not None:
                packet.pts = packet.dts
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


class FrameReader:
    """Iterates over a stream's frames in presentation order from the container's position; packets that cannot be
    decoded are skipped.

    `is_damaged` is whether the last frame is concealed damage, or may reference a picture that is damaged or was lost
    in the packets that were read: up to the next key frame after the damage. `number` is that of its packet, None if
    unknown, and `lost` are the numbers of skipped packets. `first_key` is time and position in the file of the first
    key packet.
    """

    def __init__(self, container: Any, stream: Any) -> None:
        if not stream.codec_context.is_open:
            stream.thread_type = "NONE"
            if stream.codec_context.name in SILENT and not shows_damage(container.format.name):
                stream.codec_context.options = {"err_detect": "explode"}
        self._packets, self._codec = PacketReader(container, stream), stream.codec_context.name
        self._numbers: dict[int, int] = {}
        self._damaged_at: int | None = None
        self.is_damaged = False
        self.number: int | None = None
        self.lost: list[int] = []
        self.first_key: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[Any]:
        try:
            for number, packet in enumerate(self._packets):
                if packet.pts is not None:
                    if self.first_key is None and packet.is_keyframe and packet.pos is not None:
                        self.first_key = packet.pts, packet.pos
                    self._numbers[packet.pts] = number
                try:
                    frames = packet.decode()
                except av.error.InvalidDataError:
                    self.lost.append(number)
                    self._damage(number)
                    continue
                for frame in frames:
                    self._judge(frame)
                    yield frame
        except av.error.DecoderNotFoundError:
            raise MediaError("unsupported_video", f"there is no decoder for {self._codec}") from None
        except av.error.FFmpegError as error:
            lines = (error.strerror or str(error)).strip().splitlines() or [type(error).__name__]
            raise MediaError("broken_video", f"the video cannot be decoded: {lines[0][:200]}") from None

    def _damage(self, number: int) -> None:
        self._damaged_at = number if self._damaged_at is None else min(number, self._damaged_at)

    def _judge(self, frame: Any) -> None:
        """Set `is_damaged` for a frame; the number of its packet orders it and damage in the file."""
        self.number = number = self._numbers.pop(frame.pts, None)
        at = self._damaged_at
        if frame.key_frame and not frame.is_corrupt and at is not None and (number is None or at < number):
            self._damaged_at = at = None
        if frame.is_corrupt:
            self._damage(0 if number is None else number)
        self.is_damaged = self._damaged_at is not None and (number is None or number >= self._damaged_at)
