"""Finds the shots of a video: FFmpeg's scene change detector over small frames, then rules for flashes and lengths.

Runs in the decoding process. The detector is the `scene` score of FFmpeg's filter `select`, which PyAV contains: the
smaller of the mean absolute difference of a frame to the one before it and of the change of this difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from pipeline.media.pixels import MediaError
from pipeline.media.video.container import VideoStream, open_container
from pipeline.media.video.packets import FrameReader
from pipeline.media.video.sampling import SLACK_S, Shots

WIDTH, HEIGHT = 64, 36
"""Size in pixels of the frames that are compared."""
FLASH_S = 0.3
"""A change after which the picture returns within this time is a flash and no cut."""


def shot_edges(video: VideoStream, shots: Shots) -> list[float]:
    """Decode the video once, and return the start of each shot in seconds, the first at 0.

    Cuts are dropped if a shot would be shorter than `min_s`; shots longer than `max_s` are cut into equal parts.
    MediaError `video_too_large` for more than `max_count` shots, and the errors of decoding.
    """
    edges = [0.0]
    for cut_s in _cuts(video, shots.threshold):
        if cut_s - edges[-1] >= shots.min_s - SLACK_S and video.end_s - cut_s >= shots.min_s - SLACK_S:
            edges.append(round(cut_s, 6))
    if shots.max_s is not None:
        edges = [part for pair in zip(edges, [*edges[1:], video.end_s]) for part in _parts(*pair, shots.max_s)]
    if len(edges) > shots.max_count:
        raise MediaError(
            "video_too_large", f"the video has {len(edges)} shots, more than source.video.max_shots ({shots.max_count})"
        )
    return edges


def _parts(start_s: float, end_s: float, max_s: float) -> list[float]:
    """Return the starts of the fewest equal parts of at most `max_s`."""
    count = max(1, math.ceil((end_s - start_s) / max_s - SLACK_S))
    return [round(start_s + number * (end_s - start_s) / count, 6) for number in range(count)]


def _cuts(video: VideoStream, threshold: float) -> Iterator[float]:
    """Yield the times of scene changes in seconds after the first frame, without those of flashes."""
    detector, times_s = _Detector(threshold), video.times_s
    pending: tuple[float, NDArray[np.int16]] | None = None
    before: NDArray[np.int16] | None = None
    for index, small in _small_frames(video):
        time_s, pixels = times_s[index], small.to_ndarray().astype(np.int16)
        is_change = detector.is_change(small)
        if pending is not None:
            if time_s - pending[0] > FLASH_S:
                yield pending[0]
                pending = None
            elif _difference(pixels, pending[1]) < threshold:
                pending, is_change = None, False
        if pending is None and is_change and before is not None:
            pending = time_s, before
        before = pixels
    if pending is not None:
        yield pending[0]


def _difference(frame: NDArray[np.int16], other: NDArray[np.int16]) -> float:
    """Return the mean absolute difference of two frames in percent."""
    return float(np.abs(frame - other).mean()) * 100 / 255


def _small_frames(video: VideoStream) -> Iterator[tuple[int, Any]]:
    """Yield the index and a small RGB frame of each frame of the video that can be decoded."""
    indices = {tick: index for index, tick in enumerate(video.ticks)} if video.is_timed else None
    with open_container(video.path) as container:
        for number, frame in enumerate(FrameReader(container, container.streams[video.stream])):
            index = number if indices is None else indices.get(frame.pts, -1)
            if 0 <= index < len(video.ticks):
                yield index, frame.reformat(WIDTH, HEIGHT, "rgb24", interpolation="AREA")


class _Detector:
    """A filter graph that passes the frames at which a scene changes."""

    def __init__(self, threshold: float) -> None:
        self._graph = av.filter.Graph()
        source = self._graph.add_buffer(width=WIDTH, height=HEIGHT, format="rgb24", time_base=Fraction(1))
        chosen = self._graph.add("select", f"gt(scene,{threshold / 100:.6f})")
        source.link_to(chosen)
        chosen.link_to(self._graph.add("buffersink"))
        self._graph.configure()
        self._number = 0

    def is_change(self, small: Any) -> bool:
        """Return whether a scene begins with this frame; frames are passed in order."""
        small.pts, small.time_base = self._number, Fraction(1)
        self._number += 1
        self._graph.push(small)
        try:
            self._graph.pull()
        except (av.error.BlockingIOError, av.error.EOFError):
            return False
        return True
