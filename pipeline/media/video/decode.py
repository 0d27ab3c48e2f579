"""Reads frames of a probed video with PyAV or decord; applies the rotation and downscales.

    pyav         any allowed format; finds every frame by its time and reports missing frames
    decord       only if frames after a key frame never reference frames before it, because otherwise decord 0.6
                 silently returns wrong frames; no rotated videos, because it resizes them incorrectly
    auto         decord if it is installed and allowed for the video, otherwise PyAV

Runs in the decoding process.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from pipeline.media.pixels import MediaError, fitting
from pipeline.media.video.container import VideoStream, open_container

MODULES = {"pyav": "av", "decord": "decord"}
SEEKABLE = {"mov", "matroska"}
"""Formats with an index of key frames; decord seeks correctly only in these."""
CLEAN_CODECS = ("h264", "hevc", "vp8", "vp9", "mpeg4")

Frames = Iterator[NDArray[np.uint8]]


def import_decoders(decoder: str) -> None:
    """Import this decoder's library before the time limit of the first video starts; ImportError if it fails."""
    if decoder in MODULES:
        importlib.import_module(MODULES[decoder])
    elif _has_decord():
        importlib.import_module("decord")


def _has_decord() -> bool:
    return importlib.util.find_spec("decord") is not None


def read_frames(video: VideoStream, indices: Sequence[int], decoder: str, max_side_px: int | None) -> Frames:
    """Yield the frames `indices` (ascending) of a video as uint8 RGB (height, width, 3) with the rotation applied.

    Raises:
        MediaError: `broken_video` for a frame that cannot be decoded, `unsupported_video` for a video of which this
            decoder would return wrong frames.
    """
    reader = _pyav
    if decoder != "pyav":
        refusal = _refusal(video)
        if refusal and decoder != "auto":
            raise MediaError("unsupported_video", f"{decoder} {refusal}; source.video.decoder: auto takes PyAV for it")
        if not refusal and (decoder != "auto" or _has_decord()):
            reader = _decord
    return reader(video, indices, max_side_px)


def _refusal(video: VideoStream) -> str:
    """Return why only PyAV decodes this video correctly; empty if decord does, too."""
    formats = video.format.split(",")
    if not SEEKABLE & set(formats) or video.codec not in CLEAN_CODECS:
        return f"does not find frames reliably in {video.codec} in {formats[0]}"
    if not video.restarts_cleanly:
        return "gives wrong frames for this video, whose frames depend on frames before their key frame"
    if rotation(video):
        return "does not turn and shrink this rotated video"
    return ""


def rotation(video: VideoStream) -> int:
    """Return the rotation of the first frame's display matrix, in counter-clockwise quarter turns (0 to 3)."""
    with open_container(video.path) as container:
        for frame in decoded_frames(container, container.streams[video.stream]):
            return _turns(frame)
    raise MediaError("broken_video", "not one frame can be decoded")


def _turns(frame: Any) -> int:
    return int(round(frame.rotation / 90) % 4)


def _broken(error: BaseException, reason: str | None = None) -> MediaError:
    lines = (reason or str(error)).strip().splitlines() or [type(error).__name__]
    return MediaError("broken_video", f"the video cannot be decoded: {lines[0][:200]}")


def _check_count(reader: Any, video: VideoStream, decoder: str) -> None:
    if len(reader) != len(video.ticks):
        message = f"{decoder} counts {len(reader)} frames where the file has {len(video.ticks)}"
        raise MediaError("broken_video", message)


# --- PyAV ----------------------------------------------------------------------------------------------------------


def decoded_frames(container: Any, stream: Any) -> Iterator[Any]:
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
        raise _broken(error, error.strerror) from None


def _pyav(video: VideoStream, indices: Sequence[int], max_side_px: int | None) -> Frames:
    width, height = fitting(video.width, video.height, max_side_px)
    with open_container(video.path) as container:
        cursor = _Cursor(container, video)
        last: tuple[int, NDArray[np.uint8]] | None = None
        for index in indices:
            if last is None or last[0] != index:
                frame = cursor.frame(index)
                pixels = frame.to_ndarray(format="rgb24", width=width, height=height, interpolation="BILINEAR")
                last = index, np.ascontiguousarray(np.rot90(pixels, _turns(frame)))
            yield last[1]


class _Cursor:
    """A decoding position in a video; frames must be requested in presentation order."""

    def __init__(self, container: Any, video: VideoStream) -> None:
        self._container, self._video = container, video
        self._stream = container.streams[video.stream]
        self._stream.thread_type = "NONE"
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


# --- decord --------------------------------------------------------------------------------------------------------


def _decord(video: VideoStream, indices: Sequence[int], max_side_px: int | None) -> Frames:
    import decord

    width, height = fitting(video.width, video.height, max_side_px)
    try:
        reader = decord.VideoReader(video.path, ctx=decord.cpu(0), width=width, height=height, num_threads=1)
        _check_count(reader, video, "decord")
        for index in indices:
            # decord pads the rows of some narrow frames and returns them with 4 channels, for example at 48 pixels.
            rows = reader[index].asnumpy().reshape(height, -1)
            yield rows[:, : width * 3].reshape(height, width, 3)
    except decord.DECORDError as error:
        raise _broken(error) from None
