"""The measurement of video decoders: its plain loop decodes the frames of the decoder, and its rows compare both."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.decode import NUM_FRAMES, SIDE_PX, decode_plainly, write_video
from benchmarks.tables.jobs import _decoders
from pipeline.media.video.sampling import FrameSampling
from pipeline.media.video.worker import DecodeLimits, DecoderWorker


def test_the_plain_loop_decodes_the_same_frames(tmp_path: Path) -> None:
    write_video(tmp_path / "video.mp4", 1, 60, 640, 360, 16)
    worker = DecoderWorker("auto", FrameSampling(num_frames=NUM_FRAMES), DecodeLimits(max_side_px=SIDE_PX))
    [clip] = worker.decode(str(tmp_path / "video.mp4"))
    worker.close()
    plain = decode_plainly(tmp_path / "video.mp4", 16)
    assert plain.shape == (NUM_FRAMES, clip.height, clip.width, 3)
    assert np.array_equal(plain, np.frombuffer(clip.rgb, np.uint8).reshape(plain.shape))


def test_rows_compare_decoders_with_the_plain_loop_if_it_was_measured() -> None:
    rates = {"plain": 10.0, "auto": 9.6, "decord": 8.0}
    cells = {f"mp4_480p_gop_48/{name}": {"rows_per_cpu_s": rate} for name, rate in rates.items()}
    results = {"throughput": {"side_px": 336, "num_frames": 8, "cells": cells}}
    assert [row["by"] for row in _decoders(results)] == [
        "a plain loop of PyAV",
        "`auto`, 96% of the plain loop",
        "`decord`, 80% of the plain loop",
    ]
    del cells["mp4_480p_gop_48/plain"]
    assert [row["by"] for row in _decoders(results)] == ["`auto`", "`decord`"]
