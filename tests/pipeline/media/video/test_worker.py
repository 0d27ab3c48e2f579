from __future__ import annotations

import os
import signal
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from pipeline.media.video.sampling import FrameSampling
from pipeline.media.video.worker import DecodeLimits, DecoderWorker, WorkerError
from pipeline.rows.schemas import RowError
from tests.pipeline.media.video import files
from tests.pipeline.media.video.files import encode_video, number_in

pytestmark = pytest.mark.slow

FOUR = FrameSampling(num_frames=4)
WIDE = DecodeLimits()


@pytest.fixture
def worker_of():
    """Makes workers and ends them."""
    made: list[DecoderWorker] = []

    def make(
        sampling: FrameSampling = FOUR, limits: DecodeLimits = WIDE, decoder: str = "auto", code: str = ""
    ) -> DecoderWorker:
        """A worker; with `code`, that is run in its process after the decoders' module is imported."""
        command = None
        if code:
            script = "from pipeline.media.video import child\n" + textwrap.dedent(code) + "\nchild.main()\n"
            command = [sys.executable, "-c", script]
        made.append(DecoderWorker(decoder, sampling, limits, command))
        return made[-1]

    yield make
    for worker in made:
        worker.close()


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("good") / "good.mp4"
    path.write_bytes(encode_video(48, codec="libx264", options={"preset": "ultrafast"}))
    return str(path)


def frames_of(clip) -> np.ndarray:
    return np.frombuffer(clip.rgb, np.uint8).reshape(clip.num_frames, clip.height, clip.width, 3)


def code_of(worker: DecoderWorker, path: str) -> str:
    with pytest.raises(RowError) as caught:
        worker.decode(path)
    return caught.value.code


def test_clips_come_with_their_frames_and_exact_times(worker_of, good) -> None:
    [clip] = worker_of(limits=DecodeLimits(max_side_px=64)).decode(good)
    assert (clip.num_frames, clip.height, clip.width) == (4, 24, 64)
    assert (clip.clip_index, clip.num_clips, clip.start_s, clip.end_s, clip.fps) == (0, 1, 0.0, 2.0, 2.0)
    assert [number_in(frame) for frame in frames_of(clip)] == [0, 16, 31, 47]
    assert clip.timestamps_s == [0.0, 16 / 24, 31 / 24, 47 / 24]


def test_windows_become_clips_whose_times_begin_at_zero(worker_of, good) -> None:
    clips = worker_of(FrameSampling(num_frames=3, clip_s=0.5)).decode(good)
    assert [(clip.clip_index, clip.num_clips, clip.start_s, clip.end_s) for clip in clips] == [
        (0, 4, 0.0, 0.5),
        (1, 4, 0.5, 1.0),
        (2, 4, 1.0, 1.5),
        (3, 4, 1.5, 2.0),
    ]
    assert [[number_in(frame) for frame in frames_of(clip)] for clip in clips] == [
        [0, 6, 11],
        [12, 18, 23],
        [24, 30, 35],
        [36, 42, 47],
    ]
    for clip in clips:
        assert clip.timestamps_s == pytest.approx([0.0, 6 / 24, 11 / 24])


def test_one_process_serves_many_videos_and_is_replaced_after_its_share(worker_of, good) -> None:
    worker = worker_of(limits=DecodeLimits(worker_max_videos=3))
    for _ in range(7):
        worker.decode(good)
    assert worker.num_started == 3


def test_a_process_that_has_grown_is_replaced(worker_of, good) -> None:
    leak = "kept = []\nprobe = child.probe\ndef leaking(*args):\n    kept.append(bytearray(b'x' * (40 << 20)))\n"
    leak += "    return probe(*args)\nchild.probe = leaking"
    worker = worker_of(limits=DecodeLimits(worker_max_bytes=256 << 20), code=leak)
    for _ in range(8):
        worker.decode(good)
    assert 2 <= worker.num_started <= 8


CRASH = """
import os, signal
probe = child.probe
def crashing(path, max_pixels):
    if path.endswith("bad.mp4"):
        os.kill(os.getpid(), signal.SIGSEGV)
    return probe(path, max_pixels)
child.probe = crashing
"""


def test_a_crash_costs_one_video(worker_of, good, tmp_path) -> None:
    bad = tmp_path / "bad.mp4"
    bad.write_bytes(Path(good).read_bytes())
    worker = worker_of(code=CRASH)
    worker.decode(good)
    with pytest.raises(RowError, match="was ended by SIGSEGV while it had this video") as caught:
        worker.decode(str(bad))
    assert caught.value.code == "decoder_died"
    assert worker.decode(good)[0].num_frames == 4
    assert worker.num_started == 2


def test_a_crash_in_the_middle_of_an_answer_costs_one_video(worker_of, good) -> None:
    half = "import os\npack = child.messages.pack\ndef half(header, num_bytes=0):\n"
    half += (
        "    return pack(header, num_bytes) if header['kind'] == 'ready' else os._exit(7)\nchild.messages.pack = half"
    )
    with pytest.raises(RowError, match="ended with code 7") as caught:
        worker_of(code=half).decode(good)
    assert caught.value.code == "decoder_died"


def test_a_hang_costs_one_video_and_its_time(worker_of, good) -> None:
    hang = "import signal\nprobe = child.probe\nchild.probe = lambda *args: signal.pause()"
    worker = worker_of(limits=DecodeLimits(timeout_s=0.3), code=hang)
    assert code_of(worker, good) == "decode_timeout"
    assert worker.pid is None


def test_an_alarm_ends_a_decoding_process_that_hangs_without_its_supervisor(worker_of, good) -> None:
    hang = "import signal\nchild.GRACE_S = 0.1\nchild.probe = lambda *args: signal.pause()"
    worker = worker_of(limits=DecodeLimits(timeout_s=0.1), code=hang)
    worker._running()
    process = worker._process
    os.write(worker._requests, child_request(worker, good))
    assert process.wait(timeout=600) == -signal.SIGALRM


def child_request(worker: DecoderWorker, path: str) -> bytes:
    from pipeline.media.video import messages

    return messages.pack(worker._request | {"path": path})


def test_a_process_exits_when_its_supervisor_closes_the_connection(worker_of, good) -> None:
    worker = worker_of()
    worker.decode(good)
    process = worker._process
    worker.close()
    assert process.returncode == 0
    assert worker.pid is None


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not count a process's memory")
def test_a_bomb_is_refused_and_the_process_survives(worker_of, good) -> None:
    bomb = "import numpy as np\nprobe = child.probe\ndef large(path, max_pixels):\n"
    bomb += "    np.zeros(1 << 30, np.uint8).fill(1)\n    return probe(path, max_pixels)\nchild.probe = large"
    worker = worker_of(limits=DecodeLimits(worker_max_bytes=512 << 20), code=bomb)
    with pytest.raises(RowError, match="worker_max_bytes") as caught:
        worker.decode(good)
    assert caught.value.code == "video_too_large"
    assert worker.num_started == 1


def test_a_missing_library_is_reported_before_any_video(worker_of, good) -> None:
    missing = "import sys\nsys.modules['decord'] = None"
    with pytest.raises(WorkerError, match=r"cannot start: .*decord"):
        worker_of(decoder="decord", code=missing).decode(good)
    with pytest.raises(WorkerError, match="ended with code 1 before it was ready"):
        worker_of(code="raise SystemExit(1)").decode(good)


def test_no_secret_reaches_the_process_that_reads_hostile_files(worker_of, good, monkeypatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-for-decoders")
    worker = worker_of()
    worker.decode(good)
    environment = Path(f"/proc/{worker._process.pid}/environ").read_bytes()
    assert b"PATH=" in environment
    assert b"not-for-decoders" not in environment


def test_more_frames_than_allowed_are_refused_before_they_pile_up(worker_of, good) -> None:
    frame_bytes = files.WIDTH * files.HEIGHT * 3
    assert len(worker_of(limits=DecodeLimits(max_decoded_bytes=4 * frame_bytes)).decode(good)) == 1
    worker = worker_of(limits=DecodeLimits(max_decoded_bytes=4 * frame_bytes - 1))
    with pytest.raises(
        RowError, match=r"4 frames of 128 x 48 in 1 clip\(s\) are more than source.video.max_decoded_bytes"
    ):
        worker.decode(good)


def test_a_moment_outside_the_video_is_the_rows_error(worker_of, good) -> None:
    assert code_of(worker_of(FrameSampling(timestamps_s=(1.0, 2.5))), good) == "no_such_frame"
    [clip] = worker_of(FrameSampling(timestamps_s=(0.0, 1.0))).decode(good)
    assert [number_in(frame) for frame in frames_of(clip)] == [0, 24]


def test_memory_stays_flat_over_hundreds_of_videos(worker_of, good) -> None:
    worker = worker_of(FrameSampling(num_frames=2), DecodeLimits(max_side_px=32, worker_max_videos=50))
    seen = []
    for _ in range(200):
        worker.decode(good)
        seen.append(worker.resident_bytes)
    assert worker.num_started == 4
    assert max(seen[100:]) < max(seen[:100]) + (16 << 20)
