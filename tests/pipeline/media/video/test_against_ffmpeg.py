"""Generated videos show the frames that ffmpeg's program shows, at the same times, or are error rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.media.video import parts
from pipeline.media.video.sampling import FrameSampling
from pipeline.media.video.worker import DecodedClip, DecodeLimits, DecoderWorker
from pipeline.rows.schemas import RowError
from tests.covering import covering
from tests.pipeline.media.video.strangers import (
    CHANGED,
    FLIPPED,
    GOP,
    NUM_FRAMES,
    Case,
    Shown,
    by_ffmpeg,
    cases,
    shown_otherwise,
)

ALL = FrameSampling(num_frames=200)
CLOSE = 6.0
"""Mean absolute difference of pixels up to which two decodings show the same; that of two numbers is 25 or more."""
TICK_S = 0.0021
"""Containers with times in milliseconds round each time."""
GUESSED_STARTS = ("avi", "asf")
"""Containers without the time of the first frame, if packets are reordered."""
UNREPORTED = ("mjpeg", "ffv1", "vp8")
"""Streams whose decoders report little damage inside a picture. Of other streams, they report that of most bytes."""
NO_PROMISE = ("mpegts", "h264", "hevc", "mpeg2video")
"""Containers whose header does not promise a number of frames, bytes or seconds; a cut between packets is unknown."""
BEGINS_LATE = ("lost_first_key", "starts_inside")
CASES = list(cases())
FAST = {Case(*values) for values in covering([(c.stream, c.container, c.rate, c.damage) for c in CASES], 1)}
OTHERWISE = shown_otherwise()
Decode = Callable[[bytes, str], DecodedClip | RowError]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("videos") / "video"


@pytest.fixture(scope="module")
def decode(path: Path) -> Iterator[Decode]:
    """The only clip of a video, or its error, by `on_damage`."""
    workers = {
        name: DecoderWorker("auto", ALL, DecodeLimits(keeps_damaged=name == "keep")) for name in ("error", "keep")
    }

    def outcome(data: bytes, on_damage: str = "error") -> DecodedClip | RowError:
        path.write_bytes(data)
        return decoded(workers[on_damage], path)

    yield outcome
    for worker in workers.values():
        worker.close()


def decoded(worker: DecoderWorker, path: Path) -> DecodedClip | RowError:
    try:
        [clip] = worker.decode(str(path))
    except RowError as error:
        return error
    return clip


def shown(clip: DecodedClip) -> Shown:
    frames = np.frombuffer(clip.rgb, np.uint8).reshape(clip.num_frames, clip.height, clip.width, 3)
    return Shown(frames, [clip.start_s + time_s for time_s in clip.timestamps_s])


def difference(clip: DecodedClip, path: Path, has_starts: bool = True, unreported: int = 0) -> str:
    """How a clip differs from what ffmpeg shows, apart from what the clip's `part` reports; empty if it does not.
    `unreported` frames may have other pixels."""
    ours, theirs = shown(clip), by_ffmpeg(path, clip.width, clip.height)
    num_more = len(theirs.times_s) - len(ours.times_s)
    if num_more < 0 or (num_more > 0 and not clip.part):
        return f"{len(ours.times_s)} frames, not {len(theirs.times_s)}: {ours.numbers}, not {theirs.numbers}"
    is_cut = "are used" in clip.part
    starts = range(num_more + 1) if parts.LATE_START in clip.part and is_cut else [0 if is_cut else num_more]
    has_starts = has_starts and parts.LATE_START not in clip.part  # ffmpeg counts from the first packet
    found = [_difference(ours, theirs, start, clip.part, has_starts, unreported) for start in starts]
    return "" if "" in found else found[0]


def _difference(ours: Shown, theirs: Shown, start: int, part: str, has_starts: bool, unreported: int) -> str:
    """The same for the frames of ffmpeg from `start`."""
    rows = slice(start, start + len(ours.times_s))
    times = np.array(ours.times_s), np.array(theirs.times_s[rows])
    if not has_starts:
        times = times[0] - times[0][0], times[1] - times[1][0]
    if np.abs(times[0] - times[1]).max() > TICK_S:
        return f"times {times[0].tolist()}, not {times[1].tolist()}"
    pixels = np.abs(ours.frames.astype(np.int16) - theirs.frames[rows]).mean(axis=(1, 2, 3))
    num_traces = int(part.split(f"{parts.DAMAGED}: ")[1].split()[0]) if "have traces" in part else 0
    if (pixels > CLOSE).sum() > num_traces + unreported:
        return f"frames {ours.numbers}, not {theirs.numbers[rows]}: {pixels.round().tolist()}"
    return ""


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=() if case in FAST else pytest.mark.slow) for case in CASES]
)
def test_a_video_shows_the_frames_of_ffmpeg_at_their_times_or_is_an_error(
    case: Case, decode: Decode, path: Path
) -> None:
    has_starts = case.container not in GUESSED_STARTS
    unreported = GOP if case.stream in UNREPORTED and case.damage in CHANGED else 0
    outcome = decode(case.data, "error")
    if isinstance(outcome, DecodedClip):
        assert difference(outcome, path, has_starts, unreported) == ""
        assert (parts.LATE_START in outcome.part) <= (case.damage != "whole")
        assert "cut" not in case.damage or case.container in NO_PROMISE or outcome.num_frames == NUM_FRAMES
        return
    assert case.damage != "whole", outcome
    assert case.damage not in BEGINS_LATE or not by_ffmpeg(path).times_s, outcome
    kept = decode(case.data, "keep")
    if isinstance(kept, DecodedClip):
        assert f"{parts.DAMAGED}: the first {kept.num_frames} frames" in kept.part
        assert outcome.message in kept.part
        unreported = max(unreported, 3 * (case.damage in FLIPPED))
        assert is_true(kept, case) or difference(kept, path, has_starts, unreported) == ""
    else:
        assert (kept.code, kept.message) == (outcome.code, outcome.message)


def is_true(clip: DecodedClip, case: Case) -> bool:
    """Whether every frame has the time of the number that it shows; ffmpeg guesses some times behind damage."""
    numbers = shown(clip).numbers
    if not set(numbers) <= set(range(NUM_FRAMES)):
        return False
    true_s = np.array([case.time_s(number) for number in numbers])
    times_s = np.array(clip.timestamps_s)
    return bool(np.abs((times_s - times_s[0]) - (true_s - true_s[0])).max() <= TICK_S)


@pytest.mark.parametrize("name", OTHERWISE)
def test_a_video_that_is_shown_otherwise_than_stored_looks_as_in_ffmpeg(name: str, decode: Decode, path: Path) -> None:
    clip = decode(OTHERWISE[name], "error")
    assert isinstance(clip, DecodedClip), clip
    assert clip.part == ""
    assert difference(clip, path) == ""


FAULTS: dict[str, tuple[Any, str]] = {
    "frames_one_later": (
        Case("h264_b", "mp4", "24", "whole").data,
        "read = decode.read_frames\n"
        "def late(video, indices, *rest):\n"
        "    last = len(video.ticks) - 1\n"
        "    return read(video, [min(index + 1, last) for index in indices], *rest)\n"
        "decode.read_frames = late",
    ),
    "display_matrix_ignored": (OTHERWISE["h264-turned_90"], "decode._displayed = lambda pixels, matrix: pixels"),
    "display_matrix_ignored_flip": (
        OTHERWISE["mpeg4-flipped_vertically"],
        "decode._displayed = lambda pixels, matrix: pixels",
    ),
    "first_key_frame_dropped": (
        Case("mpeg4", "avi", "25", "whole").data,
        "timed = probing._timed\n"
        "def later(*arguments):\n"
        "    video = timed(*arguments)\n"
        "    return replace(video, ticks=video.ticks[1:])\n"
        "probing._timed = later",
    ),
    "times_of_packets_in_order": (
        Case("h264", "mp4", "variable", "whole").data,
        "timed = probing._timed\n"
        "def even(*arguments):\n"
        "    video = timed(*arguments)\n"
        "    count = len(video.ticks)\n"
        "    gap = (video.ticks[-1] - video.ticks[0]) // (count - 1)\n"
        "    child.even = [float(number * gap * video.tick_s) for number in range(count)]\n"
        "    return video\n"
        "probing._timed = even\n"
        "container.VideoStream.times_s = property(lambda video: child.even)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_of_reading_is_found(name: str, path: Path) -> None:
    data, fault = FAULTS[name]
    path.write_bytes(data)
    imports = "from dataclasses import replace\nfrom pipeline.media.video import child, container, decode, probing\n"
    found = []
    for code in ("", fault):
        command = [sys.executable, "-c", f"{imports}{code}\nchild.main()\n"]
        worker = DecoderWorker("auto", ALL, DecodeLimits(), command)
        clip = decoded(worker, path)
        worker.close()
        assert isinstance(clip, DecodedClip), clip
        found.append(difference(clip, path))
    assert found[0] == ""
    assert found[1] != ""
