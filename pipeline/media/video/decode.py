"""Reads frames of a probed video with PyAV, each by its exact time. Runs in the decoding process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from pipeline.media.pixels import MediaError, fitting
from pipeline.media.video.container import Video, open_container


def read_frames(video: Video, indices: Sequence[int], max_side_px: int | None) -> Iterator[NDArray[np.uint8]]:
    """Yield the frames `indices` (ascending) of a video as uint8 RGB (height, width, 3) with the rotation applied;
    MediaError `broken_video` for a frame that cannot be decoded, `unsupported_video` without a decoder."""
    width, height = fitting(video.width, video.height, max_side_px)
    with open_container(video.path) as container:
        cursor = _Cursor(container, video)
        last: tuple[int, NDArray[np.uint8]] | None = None
        for index in indices:
            if last is None or last[0] != index:
                frame = cursor.frame(index)
                pixels = frame.to_ndarray(format="rgb24", width=width, height=height, interpolation="BILINEAR")
                quarter_turns = int(round(frame.rotation / 90) % 4)  # counter-clockwise, from the display matrix
                last = index, np.ascontiguousarray(np.rot90(pixels, quarter_turns))
            yield last[1]


def _decoded(container: Any, stream: Any) -> Iterator[Any]:
    """Yield frames in presentation order from the container's current position; damaged packets are skipped."""
    try:
        for packet in container.demux(stream):
            try:
                yield from packet.decode()
            except av.error.InvalidDataError:
                continue
    except av.error.DecoderNotFoundError:
        raise MediaError("unsupported_video", f"there is no decoder for {stream.codec_context.name}") from None
    except av.error.FFmpegError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise MediaError("broken_video", f"the video cannot be decoded: {reason[:200]}") from None


class _Cursor:
    """A decoding position in a video; frames must be requested in presentation order."""

    def __init__(self, container: Any, video: Video) -> None:
        self._container, self._video = container, video
        self._stream = container.streams[video.stream]
        self._stream.thread_type = "NONE"
        self._frames = _decoded(container, self._stream)
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
            self._frames = _decoded(self._container, self._stream)
        for frame in self._frames:
            if frame.pts is not None and frame.pts >= tick:
                return frame if frame.pts == tick else None
        return None
