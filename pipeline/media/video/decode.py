"""Reads frames of a probed video with PyAV: finds each by its time, applies the display matrix and resizes. On request,
decord reads them (`pipeline.media.video.decord_frames`).

Runs in the decoding process.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.media.pixels import MediaError, fitting
from pipeline.media.video.colour import UNSPECIFIED, rgb_of
from pipeline.media.video.container import VideoStream, open_container, rewound
from pipeline.media.video.decord_frames import decord_frames, refuse_other_frames
from pipeline.media.video.packets import FrameReader, shows_damage

NUM_RESTARTS = 2
"""Maximum number of key frames at which decoding restarts for one frame, before it restarts at the first frame."""
UPRIGHT = (1, 0, 0, 1)
"""The display matrix of frames that are shown as they are stored."""
Frames = Iterator[NDArray[np.uint8]]


def read_frames(
    video: VideoStream,
    indices: Sequence[int],
    max_side_px: int | None,
    decoder: str = "auto",
    damaged: set[int] | None = None,
) -> Frames:
    """Yield the frames `indices` (ascending) of a video as uint8 RGB (height, width, 3), all of the first frame's size,
    with the display matrix applied. Indices of damaged frames that are shown are added to `damaged`. MediaError
    `broken_video` for a frame that is damaged or cannot be decoded, `unsupported_video` if there is no decoder, or if
    `decoder` is decord and it would return other frames, `video_too_large`."""
    if decoder == "decord":
        first = _first_frame(video)
        refuse_other_frames(video, first, _matrix(first) == UPRIGHT)
        yield from decord_frames(video, indices, *fitting(first.width, first.height, max_side_px))
        return
    with rewound(video) as container:
        cursor = _Cursor(container, video)
        size: tuple[int, int] | None = None
        last: tuple[int, NDArray[np.uint8]] | None = None
        for index in indices:
            if last is None or last[0] != index:
                frame = cursor.frame(index)
                if cursor.is_damaged and not shows_damage(video.format):
                    raise MediaError("broken_video", f"the frame at {video.times_s[index]:g} s is damaged")
                if cursor.is_damaged and damaged is not None:
                    damaged.add(index)
                if size is None:
                    first = frame if index == 0 else _first_frame(video)
                    size = fitting(*video.size_of(first.width, first.height), max_side_px)
                    matrix = _matrix(first)
                last = index, np.ascontiguousarray(_displayed(rgb_of(frame, *size), matrix))
            yield last[1]


def _first_frame(video: VideoStream) -> Any:
    """Return the first frame; further ones may have other sizes, or no copy of a display matrix in the stream."""
    with open_container(video.path) as container:
        return _Cursor(container, video).frame(0)


def _matrix(frame: Any) -> tuple[int, ...]:
    """Return the upper left of a frame's display matrix: x' = a x + c y and y' = b x + d y, as (a, b, c, d).
    MediaError `unsupported_video` for Dolby Vision of which other decoders show wrong colours."""
    for data in frame.side_data:
        if data.type.name in ("DOVI_METADATA", "DOVI_RPU_BUFFER") and frame.color_trc == UNSPECIFIED:
            raise MediaError("unsupported_video", "its colours are Dolby Vision without a base layer (profile 5)")
        if data.type.name == "DISPLAYMATRIX":
            a, b, _, c, d, *_ = struct.unpack("=9i", bytes(data))
            return a, b, c, d
    return UPRIGHT


def _displayed(pixels: NDArray[np.uint8], matrix: tuple[int, ...]) -> NDArray[np.uint8]:
    """Apply the quarter turns and flips of a display matrix; other angles are rounded to quarter turns."""
    a, b, c, d = matrix
    if abs(b) + abs(c) > abs(a) + abs(d):
        pixels, a, d = pixels.transpose(1, 0, 2), c, b
    return pixels[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]


class _Cursor:
    """A decoding position in a video; frames must be requested in presentation order."""

    def __init__(self, container: Any, video: VideoStream) -> None:
        self._container, self._video = container, video
        self._stream = container.streams[video.stream]
        self._index = -1
        self._keys = video.keys
        self._start_reading()

    def _start_reading(self) -> None:
        self._reader = FrameReader(self._container, self._stream)
        self._frames = iter(self._reader)

    @property
    def is_damaged(self) -> bool:
        """Whether the last frame is damaged, or depends on damage."""
        return self._reader.is_damaged

    def frame(self, index: int) -> Any:
        """Return frame number `index`; MediaError `broken_video` if it cannot be decoded."""
        if self._video.is_timed:
            frame = self._frame_at(self._video.ticks[index])
        else:
            for _ in range(self._index + 1, index):
                next(self._frames, None)
            frame = next(self._frames, None)
        if frame is None:
            time_s = self._video.times_s[index]
            raise MediaError("broken_video", f"the frame at {time_s:g} s cannot be decoded")
        self._index = index
        return frame

    def _frame_at(self, tick: int) -> Any:
        """Return the frame whose presentation time is `tick`; None if it cannot be decoded.

        Decoding continues from the current position, or restarts at the last key frame at or before `tick` if that key
        frame is after the current position. As frames after a key frame may reference earlier frames, decoding restarts
        at the key frame before, and finally at the first frame, until the frame is found.
        """
        ticks = self._video.ticks
        keys = sorted((key for key in self._keys if ticks[0] < key <= tick), reverse=True)
        current_tick = ticks[self._index] if self._index >= 0 else ticks[0]
        starts: list[int | None] = [*keys[:NUM_RESTARTS], ticks[0]] if keys and keys[0] > current_tick else [None]
        for start in starts:
            if (self._keys or start in (None, ticks[0])) and (frame := self._search(tick, start)) is not None:
                return frame
        return None

    def _search(self, tick: int, start: int | None) -> Any:
        """Return the frame of this tick, decoding from `start` or the current position; None if it is not found."""
        if start is not None:
            self._container.seek(start, stream=self._stream, backward=True)
            self._start_reading()
        for frame in self._frames:
            if start is not None and not self._is_where_it_was():
                return None
            if frame.pts is not None and frame.pts >= tick:
                return frame if frame.pts == tick else None
        return None

    def _is_where_it_was(self) -> bool:
        """Return whether the first key frame after a seek has the time with which reading from the start found it; if
        it has not, as with the index of a damaged file, the position is not changed by seeking any more."""
        tick, position = self._reader.first_key or (0, None)
        is_found = position is None or self._keys.get(tick, position) == position
        if not is_found:
            self._keys = {}
        return is_found
