"""Reads frames of a probed video with PyAV: finds each by its time, applies the display matrix and resizes.

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
from pipeline.media.video.container import VideoStream, open_container
from pipeline.media.video.packets import decoded_frames

Frames = Iterator[NDArray[np.uint8]]


def read_frames(video: VideoStream, indices: Sequence[int], max_side_px: int | None) -> Frames:
    """Yield the frames `indices` (ascending) of a video as uint8 RGB (height, width, 3), all of the first frame's size,
    with the display matrix applied. MediaError `broken_video` for a frame that cannot be decoded, `unsupported_video`
    if there is no decoder, `video_too_large`."""
    with open_container(video.path) as container:
        cursor = _Cursor(container, video)
        size: tuple[int, int] | None = None
        last: tuple[int, NDArray[np.uint8]] | None = None
        for index in indices:
            if last is None or last[0] != index:
                frame = cursor.frame(index)
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
    return 1, 0, 0, 1


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
        self._frames = decoded_frames(container, self._stream)
        self._index = -1

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
        at earlier key frames, and finally at the first frame, until the frame is found.
        """
        ticks = self._video.ticks
        keys = sorted((key for key in self._video.keys if ticks[0] < key <= tick), reverse=True)
        current_tick = ticks[self._index] if self._index >= 0 else ticks[0]
        starts: list[int | None] = [*keys, ticks[0]] if keys and keys[0] > current_tick else [None]
        return next((frame for start in starts if (frame := self._search(tick, start)) is not None), None)

    def _search(self, tick: int, start: int | None) -> Any:
        """Return the frame of this tick, decoding from `start` or the current position; None if it is not found."""
        if start is not None:
            self._container.seek(start, stream=self._stream, backward=True)
            self._frames = decoded_frames(self._container, self._stream)
        for frame in self._frames:
            if frame.pts is not None and frame.pts >= tick:
                return frame if frame.pts == tick else None
        return None
