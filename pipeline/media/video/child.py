"""Decodes images and videos sequentially in a subprocess, which `pipeline.media.video.worker` starts.

Native decoders crash, leak and hang on hostile files. So this process does nothing else: it has no credentials in its
environment, no Ray, no stores and no network; RLIMIT_AS bounds its memory, and a file that takes too long ends it. The
supervisor sends the bytes of images over a pipe, and videos as local paths.

    python -m pipeline.media.video.child REQUESTS_FD ANSWERS_FD MAX_BYTES DECODER

DECODER is a value of `source.video.decoder`, or `none` for a process that decodes images only.
"""

from __future__ import annotations

import gc
import importlib
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.media import pixels
from pipeline.media.pixels import MediaError
from pipeline.media.video import messages, parts
from pipeline.media.video.sampling import FrameSampling, Shots, windows

if TYPE_CHECKING:
    from pipeline.media.video.container import VideoStream

NO_VIDEOS = "none"
NUM_NEEDED_FRAMES = 2
"""A decoding failure counts as out of memory if the free memory at the peak is below this number of frames."""
MODULES = {"decord": "decord"}
"""Libraries of decoders besides PyAV, which opens every file."""
GRACE_S = 5.0
"""Seconds after a file's time limit at which SIGALRM ends the process; normally the supervisor ends it earlier."""


def probe(path: str, max_pixels: int, square_pixels: bool, damage: str = "") -> VideoStream:
    """Call `pipeline.media.video.probing.probe`, imported lazily: an image-only process loads no video library."""
    from pipeline.media.video import probing

    return probing.probe(path, max_pixels, square_pixels, damage)


def main() -> None:
    """Answer requests until the supervisor closes the pipe."""
    requests, answers, max_bytes, decoder = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor ends this process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with os.fdopen(requests, "rb") as source, os.fdopen(answers, "wb") as sink:
        try:
            if decoder != NO_VIDEOS:
                for module in dict.fromkeys(("av", MODULES.get(decoder, "av"))):
                    importlib.import_module(module)  # before the time limit of the first video starts
            pixels.installed_formats()
        except ImportError as error:
            sink.write(messages.pack({"kind": "failed", "message": str(error)}))
            return
        _bound_memory(max_bytes)
        sink.write(messages.pack({"kind": "ready"}))
        sink.flush()
        gc.freeze()  # so that collections below examine the objects of one file only
        while True:
            try:
                request, data = messages.receive(lambda count: _exactly(source, count))
            except EOFError:
                return
            signal.setitimer(signal.ITIMER_REAL, request["timeout_s"] + GRACE_S)
            for part in _answer(request, data):
                sink.write(part)
            sink.flush()
            del data
            if request.get("kind") != "image":
                gc.collect()  # PyAV's frames with side data are in reference cycles, and hold threads
            signal.setitimer(signal.ITIMER_REAL, 0)


def _exactly(source: Any, count: int) -> bytes:
    data: bytes = source.read(count)
    if len(data) < count:
        raise EOFError
    return data


def _free_memory_bytes() -> float:
    """Return how many bytes below its memory limit the process was at its peak; infinite if unknown."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    status = Path("/proc/self/status")
    if limit == resource.RLIM_INFINITY or not status.exists():
        return float("inf")
    peak = next(line for line in status.read_text().splitlines() if line.startswith("VmPeak"))
    return limit - 1024 * int(peak.split()[1])


def _bound_memory(max_bytes: int) -> None:
    """Limit the address space to `max_bytes` above its current size; does nothing without `/proc`."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + max_bytes, used + max_bytes))


def _answer(request: dict[str, Any], data: bytes) -> Iterator[bytes | memoryview]:
    """Yield the messages for one file: its pixels or clips and an `end` message, or an `error` message."""
    what = request.get("kind", "video")
    try:
        yield from _image(request, data) if what == "image" else _clips(request)
        yield messages.pack({"kind": "end"})
        return
    except MediaError as error:
        code, message = error.code, error.message
    except MemoryError:
        code, message = f"{what}_too_large", "decoding takes more than source.video.worker_max_bytes of memory"
    except Exception as error:  # decoders raise errors of no common class
        code = f"broken_{what}"
        message = f"the {what} cannot be decoded: {type(error).__name__}: {error}"[:300]
    yield messages.pack({"kind": "error", "code": code, "message": message})


def _image(request: dict[str, Any], data: bytes) -> Iterator[bytes | memoryview]:
    rgb = pixels.decode(data, request["max_pixels"], request["max_side_px"], request["convert_to_srgb"])
    height, width = rgb.shape[:2]
    if rgb.nbytes > request["max_decoded_bytes"]:
        message = f"with its image of {width} x {height} the row takes more than {request['row_limit']}"
        raise MediaError("row_too_large", message)
    yield messages.pack({"kind": "image", "height": height, "width": width}, rgb.nbytes)
    yield np.ascontiguousarray(rgb).data.cast("B")


def _clips(request: dict[str, Any]) -> Iterator[bytes | memoryview]:
    video = probe(request["path"], request["max_pixels"], request["square_pixels"], request["damage"])
    try:
        yield from _clips_of(video, request)
    except MediaError as error:
        # Decoders that cannot allocate a frame report the video as damaged.
        if error.code == "broken_video" and _free_memory_bytes() < NUM_NEEDED_FRAMES * 2 * video.width * video.height:
            raise MemoryError from None
        raise
    finally:
        video.close()


def _clips_of(video: VideoStream, request: dict[str, Any]) -> Iterator[bytes | memoryview]:
    from pipeline.media.video.decode import read_frames

    given = dict(request["sampling"])
    shots = None if given["shots"] is None else Shots(**given["shots"])
    sampling = FrameSampling(**{**given, "timestamps_s": tuple(given["timestamps_s"]), "shots": shots})
    times_s, limit = video.times_s, request["max_decoded_bytes"]
    edges = None
    if shots is not None:
        from pipeline.media.video.shots import shot_edges

        edges = shot_edges(video, shots)
    clips = windows(times_s, video.end_s, sampling, edges)
    indices = [index for clip in clips for index in clip.indices]
    damaged: set[int] = set()
    frames = read_frames(video, indices, request["max_side_px"], request["decoder"], damaged)
    for number, clip in enumerate(clips):
        clip_frames = []
        for _ in clip.indices:
            frame = next(frames)
            height, width = frame.shape[:2]
            if frame.nbytes * len(indices) > limit:
                raise MediaError(
                    "video_too_large",
                    f"{len(indices)} frames of {width} x {height} in {len(clips)} clip(s) are more than "
                    f"source.video.max_decoded_bytes ({limit})",
                )
            clip_frames.append(frame)
        rgb = np.stack(clip_frames)
        num_frames, height, width = rgb.shape[:3]
        header = {
            "kind": "clip",
            "clip_index": number,
            "num_clips": len(clips),
            "start_s": video.skipped_s + clip.start_s,
            "end_s": video.skipped_s + clip.end_s,
            "fps": clip.rate_fps,
            "timestamps_s": [max(0.0, times_s[index] - clip.start_s) for index in clip.indices],
            "num_frames": num_frames,
            "height": height,
            "width": width,
            "part": parts.joined((video.part, parts.traces(len(damaged & {*clip.indices}), num_frames))),
        }
        yield messages.pack(header, rgb.nbytes)
        yield rgb.data.cast("B")


if __name__ == "__main__":
    main()
