"""The section `source.video`: frame sampling, the decoder, and the limits of one video."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.section import Section

DEFAULT_NUM_FRAMES = 8


class Video(Section):
    """How videos become clips of frames."""

    decoder: Literal["auto", "decord", "pyav", "torchcodec"] = "auto"
    """`auto` (decord for files whose frames it finds exactly, otherwise PyAV), `decord`, `pyav`, `torchcodec` (not a
    dependency)."""
    num_frames: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Frames of a clip, evenly spaced, first and last among them; 8 if neither `fps` nor `timestamps_s` is set."""
    fps: Annotated[float, Field(gt=0.0, le=240.0)] | None = None
    """Or: frames per second."""
    max_frames: Annotated[int, Field(ge=1, le=4096)] = 64
    """Most frames of a clip sampled by `fps`; a longer one gets fewer frames per second."""
    timestamps_s: tuple[Annotated[float, Field(ge=0.0)], ...] = ()
    """Or: the frames shown at these moments."""
    clip_s: Annotated[float, Field(ge=0.1)] | None = None
    """Cut videos into windows of this many seconds, one row each; a rest under half a window joins the last."""
    max_video_bytes: Annotated[int, Field(ge=1)] = 2 * 1024**3
    """Larger videos are row errors."""
    max_decoded_bytes: Annotated[int, Field(ge=1)] = 1024**3
    """So are videos whose sampled frames have more bytes."""
    timeout_s: Annotated[float, Field(gt=0.0, le=3600.0)] = 60.0
    """So are videos that take longer to decode."""
    worker_max_videos: Annotated[int, Field(ge=1)] = 200
    """Videos after which the decoding process is replaced, because native decoders leak."""
    worker_max_bytes: Annotated[int, Field(ge=64 * 1024**2)] = 1024**3
    """Memory of that process besides its libraries; it is replaced at half of it."""

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
