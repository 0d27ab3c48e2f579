"""The decoders' process: decodes images and videos one after the other. Started by `pipeline.media.video.worker`.

Native decoders of hostile files crash, leak and hang. So nothing else runs here: no credentials in the environment, no
Ray, no store and no network; memory is bounded by the system, and a file that takes too long ends the process. The
bytes of an image come over the pipe; a video comes as a path of this machine.

    python -m pipeline.media.video.child REQUESTS_FD ANSWERS_FD MAX_BYTES DECODER

DECODER is a value of `source.video.decoder`, or `none` for a process that is sent images only.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.media import pixels
from pipeline.media.video import messages
from pipeline.media.video.errors import VideoError
from pipeline.media.video.sampling import Sampling, SamplingError, Window, windows

if TYPE_CHECKING:
    from pipeline.media.video.container import Video

NO_VIDEOS = "none"
NUM_NEEDED_FRAMES = 2
"""With room for fewer frames than this left at the worst moment, a failure was for want of memory."""
GRACE_S = 5.0
"""Seconds after its time limit at which the system ends the process; normally the supervisor does so earlier."""


def probe(path: str, max_pixels: int) -> Video:
    """See `pipeline.media.video.container.probe`; a process for images alone loads no video library."""
    from pipeline.media.video import container

    return container.probe(path, max_pixels)


def main() -> None:
    """Answer requests until the supervisor closes its end."""
    requests, answers, max_bytes, decoder = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when it is over
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with os.fdopen(requests, "rb") as source, os.fdopen(answers, "wb") as sink:
        try:
            if decoder != NO_VIDEOS:
                from pipeline.media.video.decode import import_decoders

                import_decoders(decoder)
            pixels.installed_formats()
        except ImportError as error:
            sink.write(messages.pack({"kind": "failed", "message": str(error)}))
            return
        _bound_memory(max_bytes)
        sink.write(messages.pack({"kind": "ready"}))
        sink.flush()
        while True:
            try:
                request, data = messages.receive(lambda count: _exactly(source, count))
            except EOFError:
                return
            signal.setitimer(signal.ITIMER_REAL, request["timeout_s"] + GRACE_S)
            for part in _answer_image(request, data) if request.get("kind") == "image" else _answer(request):
                sink.write(part)
            sink.flush()
            del data
            signal.setitimer(signal.ITIMER_REAL, 0)


def _exactly(source: Any, count: int) -> bytes:
    data: bytes = source.read(count)
    if len(data) < count:
        raise EOFError
    return data


def _memory_left() -> float:
    """Bytes that the process could still have allocated at its peak; infinite if unknown."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    status = Path("/proc/self/status")
    if limit == resource.RLIM_INFINITY or not status.exists():
        return float("inf")
    peak = next(line for line in status.read_text().splitlines() if line.startswith("VmPeak"))
    return limit - 1024 * int(peak.split()[1])


def _bound_memory(max_bytes: int) -> None:
    """At most `max_bytes` more than the libraries themselves have taken, where the system can count that."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + max_bytes, used + max_bytes))


def _answer_image(request: dict[str, Any], data: bytes | bytearray) -> Iterator[bytes | memoryview]:
    """The messages for one image: its pixels and an end, or an error."""
    try:
        rgb = pixels.decode(data, request["max_pixels"], request["max_side_px"])
        height, width = rgb.shape[:2]
        if rgb.nbytes > request["max_decoded_bytes"]:
            message = f"with its image of {width} x {height} the row takes more than {request['row_limit']}"
            yield messages.pack({"kind": "error", "code": "row_too_large", "message": message})
            return
        yield messages.pack({"kind": "image", "height": height, "width": width}, rgb.nbytes)
        yield np.ascontiguousarray(rgb).data.cast("B")
        yield messages.pack({"kind": "end"})
    except pixels.PixelError as error:
        yield messages.pack({"kind": "error", "code": error.code, "message": error.message})
    except MemoryError:
        message = "decoding takes more than source.video.worker_max_bytes of memory"
        yield messages.pack({"kind": "error", "code": "image_too_large", "message": message})


def _answer(request: dict[str, Any]) -> Iterator[bytes]:
    """The messages for one video: its clips and an end, or an error."""
    try:
        yield from _clips(request)
        yield messages.pack({"kind": "end"})
    except VideoError as error:
        yield messages.pack({"kind": "error", "code": error.code, "message": error.message})
    except SamplingError as error:
        yield messages.pack({"kind": "error", "code": "no_such_frame", "message": str(error)})
    except MemoryError:
        message = "decoding takes more than source.video.worker_max_bytes of memory"
        yield messages.pack({"kind": "error", "code": "video_too_large", "message": message})
    except Exception as error:  # bindings raise what they like for damaged files: this row's error, and only its
        message = f"the video cannot be decoded: {type(error).__name__}: {error}"[:300]
        yield messages.pack({"kind": "error", "code": "broken_video", "message": message})


def _clips(request: dict[str, Any]) -> Iterator[bytes]:
    video = probe(request["path"], request["max_pixels"])
    try:
        yield from _clips_of(video, request)
    except VideoError as error:
        # Decoders that get no memory for a frame call the video damaged.
        if error.code == "broken_video" and _memory_left() < NUM_NEEDED_FRAMES * 2 * video.width * video.height:
            raise MemoryError from None
        raise


def _clips_of(video: Video, request: dict[str, Any]) -> Iterator[bytes]:
    from pipeline.media.video.decode import read_frames

    sampling = Sampling(**{**request["sampling"], "timestamps_s": tuple(request["sampling"]["timestamps_s"])})
    times_s = video.times_s
    clips = windows(times_s, video.end_s, sampling)
    wanted = [index for clip in clips for index in clip.indices]
    frames = read_frames(video, wanted, request["decoder"], request["max_side_px"])
    for number, clip in enumerate(clips):
        shown: list[NDArray[np.uint8]] = []
        for _ in clip.indices:
            frame = next(frames)
            if frame.nbytes * len(wanted) > request["max_decoded_bytes"]:
                raise VideoError("video_too_large", _too_many(len(clips), len(wanted), frame, request))
            shown.append(frame)
        pixels = np.stack(shown)
        yield messages.pack(_header(clip, number, len(clips), times_s, pixels), pixels.nbytes)
        yield pixels.tobytes()


def _too_many(num_clips: int, num_frames: int, frame: NDArray[np.uint8], request: dict[str, Any]) -> str:
    height, width = frame.shape[:2]
    limit = f"source.video.max_decoded_bytes ({request['max_decoded_bytes']})"
    return f"{num_frames} frames of {width} x {height} in {num_clips} clip(s) are more than {limit}"


def _header(
    clip: Window, number: int, num_clips: int, times_s: list[float], pixels: NDArray[np.uint8]
) -> dict[str, Any]:
    num_frames, height, width = pixels.shape[:3]
    return {
        "kind": "clip",
        "clip_index": number,
        "num_clips": num_clips,
        "start_s": clip.start_s,
        "end_s": clip.end_s,
        "fps": clip.rate_fps,
        "timestamps_s": [max(0.0, times_s[index] - clip.start_s) for index in clip.indices],
        "num_frames": num_frames,
        "height": height,
        "width": width,
    }


if __name__ == "__main__":
    main()
