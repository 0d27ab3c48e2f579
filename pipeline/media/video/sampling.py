"""Samples frames: cuts a long video into windows and selects the frames of each window."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.media.pixels import MediaError

SLACK_S = 1e-6
"""Tolerance in seconds when times are compared, because frame times are rounded to container ticks."""


@dataclass(frozen=True)
class Shots:
    """How a video is cut at scene changes: threshold in percent, lengths in seconds, and the most shots."""

    threshold: float = 10.0
    min_s: float = 1.0
    max_s: float | None = None
    max_count: int = 1000


@dataclass(frozen=True)
class FrameSampling:
    """One of three sampling modes: `num_frames` evenly spaced frames including the first and last of the clip; `fps`
    frames per second, starting at the first; or the frames shown at `timestamps_s`.

    With `num_frames` or `fps`, no frame occurs twice, so a short video has fewer frames. With `fps`, a clip with
    more than `max_frames` frames gets `max_frames` evenly spaced ones instead. `clip_s` cuts the video into windows of
    that many seconds; a remainder shorter than half a window is added to the last window. `shots` cuts it at scene
    changes instead.
    """

    num_frames: int | None = None
    fps: float | None = None
    timestamps_s: tuple[float, ...] = ()
    max_frames: int = 64
    clip_s: float | None = None
    shots: Shots | None = None

    @property
    def cuts(self) -> bool:
        """Whether a video may become several clips."""
        return self.clip_s is not None or self.shots is not None


@dataclass(frozen=True)
class Window:
    """A clip from `start_s` to `end_s` (exclusive), and the numbers of its frames in presentation order."""

    start_s: float
    end_s: float
    indices: tuple[int, ...]
    rate_fps: float


def windows(
    times_s: Sequence[float], end_s: float, sampling: FrameSampling, edges: Sequence[float] | None = None
) -> list[Window]:
    """Return the clips of a video that ends at `end_s`, with frame times `times_s` (ascending, the first at 0). They
    start at `edges`, or at those of `clip_s` if these are None. A window in which no frame begins has the frame visible
    at its start. MediaError `no_such_frame`: a timestamp is outside."""
    assert times_s, "a video without frames has no clips"
    clip_s = sampling.clip_s
    if edges is None:
        edges = [0.0]
    if clip_s is not None and end_s > clip_s:
        edges = [round(number * clip_s, 6) for number in range(max(1, math.floor(end_s / clip_s + 0.5 + SLACK_S)))]
    return [_sampled(times_s, start, end, sampling) for start, end in zip(edges, [*edges[1:], end_s], strict=True)]


def _sampled(times_s: Sequence[float], start_s: float, end_s: float, sampling: FrameSampling) -> Window:
    # A frame that begins before the clip is used only if no frame begins inside the clip.
    first = max(0, bisect_right(times_s, start_s + SLACK_S) - 1)
    if times_s[first] < start_s - SLACK_S and first + 1 < len(times_s) and times_s[first + 1] < end_s - SLACK_S:
        first += 1
    stop = max(first + 1, bisect_left(times_s, end_s - SLACK_S))
    seconds = max(end_s - start_s, SLACK_S)
    if sampling.timestamps_s:
        wanted = tuple(_frame_at(times_s, end_s, moment) for moment in sampling.timestamps_s)
        between = sampling.timestamps_s[-1] - sampling.timestamps_s[0]
        return Window(start_s, end_s, wanted, (len(wanted) - 1) / between if between > 0 else 1 / seconds)
    if sampling.fps is not None:
        count = max(1, math.ceil(seconds * sampling.fps - SLACK_S))
        if count <= sampling.max_frames:
            moments = (start_s + number / sampling.fps for number in range(count))
            indices = tuple(max(first, bisect_right(times_s, moment + SLACK_S) - 1) for moment in moments)
            if len(set(indices)) == count:
                return Window(start_s, end_s, indices, sampling.fps)
        count = min(count, sampling.max_frames)
    else:
        assert sampling.num_frames is not None, "one way of sampling is always given"
        count = sampling.num_frames
    chosen = tuple(range(first, stop))
    if len(chosen) > count:  # evenly spaced with both ends, rounded like Qwen3-VL
        chosen = tuple(first + int(offset) for offset in np.linspace(0, stop - 1 - first, count).round())
    return Window(start_s, end_s, chosen, len(chosen) / seconds)


def _frame_at(times_s: Sequence[float], end_s: float, moment: float) -> int:
    if not -SLACK_S <= moment < end_s + SLACK_S:
        raise MediaError("no_such_frame", f"no frame is shown at {moment:g} s: the video ends at {end_s:g} s")
    return max(0, bisect_right(times_s, moment + SLACK_S) - 1)
