"""Fetches or opens the videos of a row, decodes them to clips in this process's worker, and builds Arrow columns."""

from __future__ import annotations

import atexit
import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from configs.source import DEFAULT_NUM_FRAMES, SourceConfig, VideoConfig
from files.local import open_regular
from pipeline.formats.uris import Fetcher, row_errors, scheme_of
from pipeline.media.video import parts
from pipeline.media.video.sampling import FrameSampling, Shots
from pipeline.media.video.worker import DecodedClip, DecodeLimits, DecoderWorker
from pipeline.rows import schemas
from pipeline.rows.schemas import RowError
from pipeline.storage import access

COPY_BYTES = 8 * 1024 * 1024
CODES = {"missing_image": "missing_video", "unreadable_image": "unreadable_video", "image_too_large": "video_too_large"}
"""Maps the error codes of fetching images to those for videos."""


@dataclass(frozen=True)
class MediaOptions:
    """How a job's images and videos are fetched and decoded; small when pickled."""

    decoder: str
    sampling: FrameSampling
    limits: DecodeLimits
    max_video_bytes: int
    fetcher: Fetcher

    @classmethod
    def of(cls, source: SourceConfig, root: str) -> MediaOptions:
        """Build the options of a job on this source; `root` is the URL of the source root."""
        video = source.video
        counted = video.num_frames or (None if video.fps or video.timestamps_s else DEFAULT_NUM_FRAMES)
        return cls(
            decoder=video.decoder,
            sampling=FrameSampling(
                counted, video.fps, video.timestamps_s, video.max_frames, video.clip_s, shots_of(video)
            ),
            limits=DecodeLimits(
                max_pixels=source.max_image_pixels,
                max_side_px=source.max_side_px if isinstance(source.max_side_px, int) else None,
                convert_to_srgb=source.convert_to_srgb,
                square_pixels=video.square_pixels,
                keeps_damaged=video.on_damage == "keep",
                max_decoded_bytes=video.max_decoded_bytes,
                timeout_s=video.timeout_s,
                worker_max_videos=video.worker_max_videos,
                worker_max_bytes=video.worker_max_bytes,
            ),
            max_video_bytes=video.max_video_bytes,
            fetcher=Fetcher(source, root),
        )


def shots_of(video: VideoConfig) -> Shots | None:
    """Return how videos are cut into shots; None if they are not."""
    if video.split != "shots":
        return None
    return Shots(video.shot_threshold, video.min_shot_s, video.max_shot_s, video.max_shots)


@dataclass(frozen=True)
class Span:
    """The position of a row's clip in its video, with the columns of `schemas.SPAN`."""

    clip_index: int | None = None
    num_clips: int | None = None
    clip_start_s: float | None = None
    clip_end_s: float | None = None
    partial_video: str = ""

    def name(self, sample_id: str) -> str:
        """Return the id of this clip's row: `<id>@start-end`, in seconds."""
        start, end = (f"{value:.3f}".rstrip("0").rstrip(".") for value in (self.clip_start_s, self.clip_end_s))
        return f"{sample_id}@{start}-{end}"


NO_SPAN = Span()


def decode_videos(cell: Sequence[Mapping[str, Any]], options: MediaOptions) -> list[tuple[Span, list[DecodedClip]]]:
    """Decode a row's videos (`schemas.ENCODED_VIDEOS`) to (span, clips) of each result row: one row with all videos, or
    one per clip if the job cuts the row's only video into windows. RowError if a video cannot be fetched or decoded."""
    if options.sampling.cuts and len(cell) > 1:
        name = "clip_s" if options.sampling.shots is None else "split"
        raise RowError("invalid_value", f"the row has {len(cell)} videos, and source.video.{name} cuts one into rows")
    decoded: list[list[DecodedClip]] = []
    for number, ref in enumerate(cell, start=1):
        try:
            with opened(ref, options) as path:
                decoded.append(worker_of(options).decode(path))
        except RowError as error:
            if len(cell) == 1:
                raise
            raise RowError(error.code, f"video {number} of {len(cell)}: {error.message}") from None
    if len(decoded) == 1:
        spans = [Span(clip.clip_index, clip.num_clips, clip.start_s, clip.end_s, clip.part) for clip in decoded[0]]
        return [(span, [clip]) for span, clip in zip(spans, decoded[0])]
    clips = [clip for video_clips in decoded for clip in video_clips]
    named = ((f"video {number} of {len(clips)}", clip.part) for number, clip in enumerate(clips, start=1))
    part = parts.joined(f"{name}: {text}" for name, text in named if text)
    return [(Span(partial_video=part), clips)]


@contextlib.contextmanager
def opened(ref: Mapping[str, Any], options: MediaOptions) -> Iterator[str]:
    """Provide a local path of the video within the context; RowError `missing_video`, `unreadable_video`,
    `video_too_large` or `uri_refused`."""
    with contextlib.ExitStack() as stack:
        try:
            path = _path_of(ref, options, stack)
        except RowError as error:
            raise RowError(CODES.get(error.code, error.code), error.message) from None
        yield path


def _path_of(ref: Mapping[str, Any], options: MediaOptions, stack: contextlib.ExitStack) -> str:
    """Return a local path of the video; `stack` removes a temporary copy. RowError has the codes for images."""
    data, uri, max_bytes = ref["bytes"], ref["uri"], options.max_video_bytes
    if data is None and uri is not None and scheme_of(uri) in ("data", "http", "https"):
        [data] = options.fetcher.fetch([uri], max_bytes).values()
        if isinstance(data, RowError):
            raise data
    if data is not None:
        copy = stack.enter_context(_temporary())
        copy.write(data)
        copy.flush()
        return str(copy.name)

    def local_copy(filesystem: Any, path: str) -> str:
        return _local_copy(filesystem, path, ref, options, stack)

    if uri is not None:
        options.fetcher.check(uri)
        return options.fetcher.first_existing(uri, local_copy)
    filesystem, root = access.open_url(options.fetcher.root, "source.path")
    return local_copy(filesystem, access.join(root, ref["path"]))


def _local_copy(
    filesystem: Any, path: str, ref: Mapping[str, Any], options: MediaOptions, stack: contextlib.ExitStack
) -> str:
    """Return the path of a local file, or of a copy of a remote one or of a part of a file."""
    uri, max_bytes, name = ref["uri"], options.max_video_bytes, access.shown(path)
    if access.is_local(filesystem) and ref["offset"] is None:
        with row_errors(name), open_regular(path, None if uri is None else options.fetcher.roots) as file:
            size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise RowError("video_too_large", f"{name} has {size} bytes, more than {max_bytes}")
        # The decoder opens the resolved path, which contains no symlink that may be changed meanwhile.
        return os.path.realpath(path)
    copy = stack.enter_context(_temporary())
    with row_errors(name), access.open_file(filesystem, path) as file:
        file.seek(ref["offset"] or 0)
        num_left = max_bytes + 1 if ref["size"] is None else ref["size"]
        while num_left > 0 and (block := file.read(min(COPY_BYTES, num_left))):
            copy.write(block)
            num_left -= len(block)
    if copy.tell() > max_bytes:
        raise RowError("video_too_large", f"{name} has more than {max_bytes} bytes")
    copy.flush()
    return str(copy.name)


def _temporary() -> Any:
    return tempfile.NamedTemporaryFile(prefix="draftfleet-", suffix=".video")


_running: dict[tuple[str, FrameSampling, DecodeLimits], DecoderWorker] = {}


def worker_of(media: MediaOptions) -> DecoderWorker:
    """Return this process's worker for these options; a worker with other options is closed first."""
    key = (media.decoder, media.sampling, media.limits)
    if key not in _running:
        close_worker()
        _running[key] = DecoderWorker(*key)
    return _running[key]


@atexit.register
def close_worker() -> None:
    for worker in _running.values():
        worker.close()
    _running.clear()


def clip_column(cells: Sequence[Sequence[DecodedClip]]) -> pa.Array:
    """Convert each row's clips to one column of type `list<schemas.CLIP>`."""
    flat = [clip for cell in cells for clip in cell]
    parts = [pa.array([getattr(clip, field.name) for clip in flat], field.type) for field in schemas.CLIP]
    offsets = np.cumsum([0, *map(len, cells)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.StructArray.from_arrays(parts, fields=list(schemas.CLIP)))


def some_frames(cell: Sequence[Mapping[str, Any]], count: int) -> list[NDArray[np.uint8]]:
    """Return up to `count` evenly spaced frames (height, width, 3) from the column's Python value of one row."""
    frames = [
        frame
        for clip in cell
        for frame in np.frombuffer(clip["rgb"], np.uint8).reshape(clip["num_frames"], clip["height"], clip["width"], 3)
    ]
    indices = np.linspace(0, len(frames) - 1, min(count, len(frames))).round().astype(int)
    return [frames[index] for index in indices]
