"""A row's videos to clips: fetched or opened in place, decoded by the worker of this process, put into Arrow."""

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

from configs.schema import Source
from configs.video import DEFAULT_NUM_FRAMES
from pipeline.media.video.sampling import Sampling
from pipeline.media.video.worker import NO_VIDEOS, DecodedClip, DecoderWorker, Limits
from pipeline.rows import schemas
from pipeline.rows.schemas import RowError
from pipeline.sources.uris import Fetcher, scheme_of
from pipeline.storage import access

COPY_BYTES = 8 * 1024 * 1024
CODES = {"missing_image": "missing_video", "unreadable_image": "unreadable_video", "image_too_large": "video_too_large"}
"""Error texts of fetching, for videos."""


@dataclass(frozen=True)
class VideoOptions:
    """How a job's videos are had and decoded; cheap to send to a worker."""

    decoder: str
    sampling: Sampling
    limits: Limits
    max_video_bytes: int
    fetcher: Fetcher

    @classmethod
    def of(cls, source: Source, root: str) -> VideoOptions:
        """The options of a job on this source, whose root is `root` as a URL."""
        video = source.video
        counted = video.num_frames or (None if video.fps or video.timestamps_s else DEFAULT_NUM_FRAMES)
        return cls(
            decoder=video.decoder,
            sampling=Sampling(counted, video.fps, video.timestamps_s, video.max_frames, video.clip_s),
            limits=Limits(
                max_pixels=source.max_image_pixels,
                max_side_px=source.max_side_px if isinstance(source.max_side_px, int) else None,
                max_decoded_bytes=video.max_decoded_bytes,
                timeout_s=video.timeout_s,
                worker_max_videos=video.worker_max_videos,
                worker_max_bytes=video.worker_max_bytes,
            ),
            max_video_bytes=video.max_video_bytes,
            fetcher=Fetcher(source, root),
        )


@dataclass(frozen=True)
class Span:
    """Which clip of its video a row is, as the columns of `rows.SPAN`."""

    clip_index: int | None = None
    num_clips: int | None = None
    clip_start_s: float | None = None
    clip_end_s: float | None = None

    def name(self, sample_id: str) -> str:
        """The id of this clip's row: `<id>@start-end`, in seconds."""
        return f"{sample_id}@{_seconds(self.clip_start_s)}-{_seconds(self.clip_end_s)}"


NO_SPAN = Span()


def _seconds(value: float | None) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")


def decode_videos(cell: Sequence[Mapping[str, Any]], options: VideoOptions) -> list[tuple[Span, list[DecodedClip]]]:
    """The rows that a row's videos (`rows.ENCODED_VIDEOS`) make: one with all of them, or one for each clip of its only
    video if the job cuts videos into windows.

    Raises:
        RowError: a video cannot be fetched or decoded; of several, the message names the one.
    """
    cuts = options.sampling.clip_s is not None
    if cuts and len(cell) > 1:
        raise RowError("invalid_value", f"the row has {len(cell)} videos, and source.video.clip_s cuts one into rows")
    decoded: list[list[DecodedClip]] = []
    for number, ref in enumerate(cell, start=1):
        try:
            with opened(ref, options) as path:
                decoded.append(_worker(options).decode(path))
        except RowError as error:
            if len(cell) == 1:
                raise
            raise RowError(error.code, f"video {number} of {len(cell)}: {error.message}") from None
    if len(decoded) == 1:
        spans = [Span(clip.clip_index, clip.num_clips, clip.start_s, clip.end_s) for clip in decoded[0]]
        return [(span, [clip]) for span, clip in zip(spans, decoded[0])]
    return [(NO_SPAN, [clip for clips in decoded for clip in clips])]


# --- where a video is ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(ref: Mapping[str, Any], options: VideoOptions) -> Iterator[str]:
    """A path of this machine at which the video can be read while the context lasts.

    Raises:
        RowError: `missing_video`, `unreadable_video`, `video_too_large`, `uri_refused`.
    """
    try:
        if ref["bytes"] is not None:
            with _stored(ref["bytes"]) as path:
                yield path
            return
        if ref["uri"] is not None and scheme_of(ref["uri"]) in ("data", "http", "https"):
            [data] = options.fetcher.fetch([ref["uri"]], options.max_video_bytes).values()
            if isinstance(data, RowError):
                raise data
            with _stored(data) as path:
                yield path
            return
        filesystem, where = _located(ref, options)
        if access.is_local(filesystem) and ref["offset"] is None:
            # The decoder opens the resolved path, which holds no link that may be changed meanwhile.
            yield _checked_file(where, options, named_by_row=ref["uri"] is not None)
            return
        with _copied(filesystem, where, ref["offset"], ref["size"], options.max_video_bytes) as path:
            yield path
    except RowError as error:
        raise RowError(CODES.get(error.code, error.code), error.message) from None


def _located(ref: Mapping[str, Any], options: VideoOptions) -> tuple[Any, str]:
    """The file system and path of a listed file, or of a URI that the row names and the job allows."""
    if ref["uri"] is None:
        filesystem, root = access.open_url(options.fetcher.root, "source.path")
        return filesystem, access.join(root, ref["path"])
    scheme = scheme_of(ref["uri"])
    if "\0" in ref["uri"] or "::" in ref["uri"]:
        raise RowError("uri_refused", f"{access.shown(ref['uri'])!r}: it is no plain path or URL")
    if scheme and scheme not in options.fetcher.source.uri_schemes:
        raise RowError("uri_refused", f"{access.shown(ref['uri'])!r}: {scheme!r} is not in source.uri_schemes")
    return options.fetcher.locate(ref["uri"])


def _checked_file(path: str, options: VideoOptions, named_by_row: bool) -> str:
    """The resolved path of a regular file that may be read and is not too large."""
    try:
        with access.open_regular(path, options.fetcher.roots if named_by_row else None) as file:
            size = os.fstat(file.fileno()).st_size
    except access.OutsideRoots as refusal:
        raise RowError("uri_refused", f"{access.shown(path)!r}: {access.reason_of(refusal)}") from None
    except FileNotFoundError:
        raise RowError("missing_video", f"{access.shown(path)} does not exist") from None
    except OSError as error:
        raise RowError("unreadable_video", f"{access.shown(path)} cannot be read: {access.reason_of(error)}") from None
    if size > options.max_video_bytes:
        raise RowError("video_too_large", f"{access.shown(path)} has {size} bytes, more than {options.max_video_bytes}")
    return os.path.realpath(path)


@contextlib.contextmanager
def _stored(data: bytes) -> Iterator[str]:
    with tempfile.NamedTemporaryFile(prefix="draftfleet-", suffix=".video") as file:
        file.write(data)
        file.flush()
        yield file.name


@contextlib.contextmanager
def _copied(filesystem: Any, path: str, offset: int | None, size: int | None, max_bytes: int) -> Iterator[str]:
    """A part of a file, or all of a remote one, as a file of this machine."""
    with tempfile.NamedTemporaryFile(prefix="draftfleet-", suffix=".video") as copy:
        try:
            with access.open_file(filesystem, path) as file:
                file.seek(offset or 0)
                left = max_bytes + 1 if size is None else size
                while left > 0 and (block := file.read(min(COPY_BYTES, left))):
                    copy.write(block)
                    left -= len(block)
        except FileNotFoundError:
            raise RowError("missing_video", f"{access.shown(path)} does not exist") from None
        except Exception as error:  # drivers raise what they like: any failure is this row's, and only this row's
            message = f"{access.shown(path)} cannot be read: {access.reason_of(error)}"
            raise RowError("unreadable_video", message) from None
        if copy.tell() > max_bytes:
            raise RowError("video_too_large", f"{access.shown(path)} has more than {max_bytes} bytes")
        copy.flush()
        yield copy.name


# --- the worker of this process --------------------------------------------------------------------------------------

_running: dict[tuple[str, Sampling, Limits], DecoderWorker] = {}


def image_worker(videos: VideoOptions | None, max_pixels: int, max_side_px: int | None) -> DecoderWorker:
    """The worker of this process for images: the one that decodes the job's videos, where there may be some."""
    if videos is not None:
        return _worker(videos)
    return _worker_of((NO_VIDEOS, Sampling(num_frames=1), Limits(max_pixels=max_pixels, max_side_px=max_side_px)))


def _worker(options: VideoOptions) -> DecoderWorker:
    return _worker_of((options.decoder, options.sampling, options.limits))


def _worker_of(key: tuple[str, Sampling, Limits]) -> DecoderWorker:
    """The one worker of this process; jobs of other options end the one before."""
    if key not in _running:
        close_worker()
        _running[key] = DecoderWorker(*key)
    return _running[key]


@atexit.register
def close_worker() -> None:
    """End this process's worker, if it has one."""
    for worker in _running.values():
        worker.close()
    _running.clear()


# --- Arrow ----------------------------------------------------------------------------------------------------------


def clip_column(cells: Sequence[Sequence[DecodedClip]]) -> pa.Array:
    """Rows of clips as a column `list<rows.CLIP>`."""
    flat = [clip for cell in cells for clip in cell]
    values = {field.name: [getattr(clip, field.name) for clip in flat] for field in schemas.CLIP}
    parts = [pa.array(values[field.name], field.type) for field in schemas.CLIP]
    offsets = np.concatenate([[0], np.cumsum([len(cell) for cell in cells])]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.StructArray.from_arrays(parts, fields=list(schemas.CLIP)))


def some_frames(cell: Sequence[Mapping[str, Any]], count: int) -> list[NDArray[np.uint8]]:
    """At most `count` frames (height, width, 3) of one row's clips, evenly spaced, out of the column's Python value."""
    frames = [
        frame
        for clip in cell
        for frame in np.frombuffer(clip["rgb"], np.uint8).reshape(clip["num_frames"], clip["height"], clip["width"], 3)
    ]
    places = np.linspace(0, len(frames) - 1, min(count, len(frames))).round().astype(int)
    return [frames[place] for place in places]


def span_columns(spans: Sequence[Span]) -> dict[str, pa.Array]:
    """The columns of `rows.SPAN`."""
    return {name: pa.array([getattr(span, name) for span in spans], kind) for name, kind in schemas.SPAN}
