"""Defines the section `source.video`: frame sampling, the decoder, and the limits of one video."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.section import Section

DEFAULT_NUM_FRAMES = 8


class Video(Section):
    """Sampling of frames from videos, the video decoder, and its limits."""

    decoder: Literal["auto", "decord", "pyav", "torchcodec"] = "auto"
    """Video decoder: `auto` (decord for files that it seeks exactly, otherwise PyAV), `decord`, `pyav`, or `torchcodec`
    (not a dependency)."""
    num_frames: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Number of evenly spaced frames of a clip, including its first and last frame; 8 if neither `fps` nor
    `timestamps_s` is set."""
    fps: Annotated[float, Field(gt=0.0, le=240.0)] | None = None
    """Frames per second, in place of `num_frames`."""
    max_frames: Annotated[int, Field(ge=1, le=4096)] = 64
    """Most frames of a clip sampled by `fps`; a longer one gets fewer frames per second."""
    timestamps_s: tuple[Annotated[float, Field(ge=0.0)], ...] = ()
    """Times of the frames in seconds, in place of `num_frames`."""
    clip_s: Annotated[float, Field(ge=0.1)] | None = None
    """Length of clips in seconds; each clip is one row. A remainder shorter than half a clip joins the last clip."""
    max_video_bytes: Annotated[int, Field(ge=1)] = 2 * 1024**3
    """Most bytes of a video file; a larger file is a row error."""
    max_decoded_bytes: Annotated[int, Field(ge=1)] = 1024**3
    """Most bytes of a video's sampled frames; a video that needs more is a row error."""
    timeout_s: Annotated[float, Field(gt=0.0, le=3600.0)] = 60.0
    """Longest time to decode a video; a video that takes longer is a row error."""
    worker_max_videos: Annotated[int, Field(ge=1)] = 200
    """Number of videos after which the decoding process is replaced, because native decoders leak memory."""
    worker_max_bytes: Annotated[int, Field(ge=64 * 1024**2)] = 1024**3
    """Memory limit of the decoding process, excluding its libraries; the process is replaced at half of the limit."""

    @model_validator(mode="after")
    def _one_sampling(self) -> Video:
        given = [name for name in ("num_frames", "fps", "timestamps_s") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are both given; frames are sampled in one way")
        if any(later <= earlier for earlier, later in zip(self.timestamps_s, self.timestamps_s[1:])):
            raise ValueError("timestamps_s must be in ascending order, none twice")
        if self.timestamps_s and self.clip_s is not None:
            raise ValueError("timestamps_s are moments of the whole video, so they do not go with clip_s")
        return self
