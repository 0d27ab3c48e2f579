"""Measures media decoding: speed, memory of the decoding process, and whether actors wait for input.

    python -m benchmarks.decode                      # all three parts; writes results/decode.json
    python -m benchmarks.decode --only throughput    # one part (throughput, memory, waits); the others are kept

Throughput is rows per second of CPU time, parent and decoding process together; `plain` is a loop of PyAV over the same
frames in one process, without checks, measured in turns with the decoders. Memory is the resident size of the
decoding process after each video, over 2,000 videos of two seconds and ten of ten minutes (in clips of ten seconds),
with and without restarts. Waits are measured on the real graph with an engine of fixed time per row.
"""

from __future__ import annotations

import io
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from actors.results import Stamp
from actors.serving.engine_thread import ReportWaits
from benchmarks.harness.markdown import Results
from benchmarks.harness.paced import PacedPair
from benchmarks.harness.results import command_line, read_results, results_file, write_results
from configs.pool import JobSectionConfig
from configs.schema import CaptionJobConfig
from pipeline.cluster.ray_session import session
from pipeline.manifest.datasource import SpanDatasource
from pipeline.manifest.freezing import freeze
from pipeline.media.image_decoding import DecodeOptions, decode_image, decode_table
from pipeline.media.video.sampling import FrameSampling
from pipeline.media.video.worker import DecodeLimits, DecoderWorker, resident_bytes
from pipeline.prompts.row_options import PromptOptions
from pipeline.rows.schemas import result_schema
from pipeline.run import wait_times
from pipeline.run.graph import CaptionStages, RunContext, caption_dataset

RESULTS = results_file("decode")
SIDE_PX = 336
NUM_FRAMES = 8
NEVER = 10**9
FPS = 24
VIDEOS_PER_TURN = 5
NUM_IMAGES, NUM_VIDEOS, NUM_SHORT, NUM_LONG, LONG_S, NUM_WAITS = 400, 40, 2000, 10, 600, 80


def photograph(seed: int, width: int, height: int) -> NDArray[np.uint8]:
    """Draw smooth shapes with grain (height, width, 3); their JPEG size is about that of a photograph."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (max(2, height // 60), max(2, width // 60), 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    return (smooth + generator.integers(-12, 13, (height, width, 1))).clip(0, 255).astype(np.uint8)


def write_video(path: Path, seed: int, num_frames: int, width: int, height: int, gop: int) -> None:
    """Write H.264 in MP4: a view moving over a photograph, with key frames at most `gop` frames apart."""
    field = photograph(seed, width + 96, height + 96)
    with av.open(str(path), "w") as output:
        stream: Any = output.add_stream("libx264", rate=FPS, options={"preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.gop_size = gop
        stream.codec_context.thread_count = 1
        for number in range(num_frames):
            left, top = int(48 + 47 * np.sin(number / 17)), int(48 + 47 * np.cos(number / 23))
            frame = np.ascontiguousarray(field[top : top + height, left : left + width])
            output.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        output.mux(stream.encode())


def throughput(folder: Path) -> Results:
    """Return rows per CPU second for 640 × 480 JPEGs and for ten seconds of 480p H.264."""
    jpegs = []
    for seed in range(8):
        buffer = io.BytesIO()
        Image.fromarray(photograph(seed, 640, 480)).save(buffer, "JPEG", quality=90)
        jpegs.append(buffer.getvalue())
    start_s = time.process_time()
    for row in range(NUM_IMAGES):
        decode_image(jpegs[row % len(jpegs)], 64_000_000, SIDE_PX)
    cells = {"jpeg_640x480": _rate(NUM_IMAGES, time.process_time() - start_s)}
    for gop in (48, 240):
        path = folder / f"gop_{gop}.mp4"
        write_video(path, gop, 240, 854, 480, gop)
        for decoder, spent_s in _compare_decoders(path, gop).items():
            cells[f"mp4_480p_gop_{gop}/{decoder}"] = _rate(NUM_VIDEOS, spent_s)
    return {"num_frames": NUM_FRAMES, "side_px": SIDE_PX, "cells": cells}


def _compare_decoders(path: Path, gop: int) -> dict[str, float]:
    """Return the CPU seconds of decoding a video `NUM_VIDEOS` times, by decoder, and with `decode_plainly`; they take
    turns, so that a change of the machine's speed concerns all."""
    limits = DecodeLimits(max_side_px=SIDE_PX, worker_max_videos=NEVER)
    runs: dict[str, tuple[Callable[[], Any], Callable[[], float]]] = {
        "plain": (partial(decode_plainly, path, gop), time.process_time)
    }
    workers = [DecoderWorker(name, FrameSampling(num_frames=NUM_FRAMES), limits) for name in ("auto", "decord")]
    for name, worker in zip(("auto", "decord"), workers, strict=True):
        runs[name] = partial(worker.decode, str(path)), partial(_cpu_s, worker)
        worker.decode(str(path))  # starts the process
    spent_s = dict.fromkeys(runs, 0.0)
    for _ in range(NUM_VIDEOS // VIDEOS_PER_TURN):
        for name, (decode, clock) in runs.items():
            start_s = clock()
            for _ in range(VIDEOS_PER_TURN):
                decode()
            spent_s[name] += clock() - start_s
    for worker in workers:
        worker.close()
    return spent_s


def decode_plainly(path: Path, gop: int) -> NDArray[np.uint8]:
    """Decode evenly spaced frames of a video of constant rate, with a key frame every `gop` frames, to RGB (num_frames,
    height, width, 3): seek if a key frame is between two frames, and decode up to the time of each."""
    frames: list[NDArray[np.uint8]] = []
    number = 0
    with av.open(str(path)) as container:
        stream: Any = container.streams.video[0]
        stream.thread_type = "NONE"
        reader = container.decode(stream)
        gap = round(1 / (stream.average_rate * stream.time_base))
        height = round(SIDE_PX * stream.height / stream.width)
        for wanted in np.linspace(0, stream.frames - 1, NUM_FRAMES).round().astype(int):
            if wanted // gop != number // gop:
                container.seek(int(wanted) * gap, stream=stream)
                reader = container.decode(stream)
            frame = next(frame for frame in reader if frame.pts >= wanted * gap)
            frames.append(frame.to_ndarray(format="rgb24", width=SIDE_PX, height=height, interpolation="BILINEAR"))
            number = wanted
    return np.stack(frames)


def _time_decoding(worker: DecoderWorker, path: Path, num_rows: int, clock: Callable[[], float]) -> float:
    """Return the seconds of `clock` to decode a video `num_rows` times, after one decoding that starts the process."""
    worker.decode(str(path))
    start_s = clock()
    for _ in range(num_rows):
        worker.decode(str(path))
    spent_s = clock() - start_s
    worker.close()
    return spent_s


def _cpu_s(worker: DecoderWorker) -> float:
    """Return the CPU seconds of this process and of the decoding process."""
    fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
    return time.process_time() + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rate(num_rows: int, cpu_s: float) -> dict[str, float]:
    return {"rows": num_rows, "rows_per_cpu_s": round(num_rows / cpu_s, 2)}


def memory(folder: Path) -> Results:
    """Return the resident bytes of the decoding process after each of many videos, with and without restarts of it."""
    short = [str(folder / f"{seed:02}.mp4") for seed in range(20)]
    for seed, path in enumerate(short):
        write_video(Path(path), seed, 2 * FPS, 320, 240, 24)
    long = folder / "long.mp4"
    write_video(long, 99, LONG_S * FPS, 320, 240, 120)
    plan = [short[row % len(short)] for row in range(NUM_SHORT)]
    every = NUM_SHORT // NUM_LONG
    for index in range(NUM_LONG):
        plan.insert(index * (every + 1) + every // 4, str(long))  # the first long video is among the first hundred
    runs = {
        "configured": _hold(plan, DecodeLimits().worker_max_videos),
        "never_replaced": _hold(plan, NEVER),
    }
    return {"num_short": NUM_SHORT, "num_long": NUM_LONG, "long_s": LONG_S, "runs": runs}


def _hold(plan: list[str], worker_max_videos: int) -> Results:
    """Return the peaks of resident memory of the decoding process and of its parent over a run."""
    limits = DecodeLimits(max_side_px=224, worker_max_videos=worker_max_videos, timeout_s=600.0)
    worker = DecoderWorker("auto", FrameSampling(num_frames=NUM_FRAMES, clip_s=10.0), limits)
    resident, parent, num_clips = [], [], 0
    for path in plan:
        num_clips += len(worker.decode(path))
        resident.append(worker.resident_bytes)
        parent.append(resident_bytes(os.getpid()))
    num_started = worker.num_started
    worker.close()

    def peak(values: list[int]) -> float:
        return round(max(values) / 2**20, 1)

    return {
        "num_videos": len(plan),
        "num_clips": num_clips,
        "num_processes": num_started,
        "peak_mib_first_100": peak(resident[:100]),
        "peak_mib_after": peak(resident[100:]),
        "parent_peak_mib_first_100": peak(parent[:100]),
        "parent_peak_mib_after": peak(parent[100:]),
        "peak_mib_every_20": [peak(resident[start : start + 20]) for start in range(0, len(resident), 20)],
    }


def timed_job(source: dict[str, Any], pool: dict[str, Any], output: Path) -> CaptionJobConfig:
    """Return a job over `source` whose model is a `PacedPair`."""
    return CaptionJobConfig.model_validate(
        {
            "source": source,
            "prompt": "What?",
            "model": {"target": {"path": "timed"}},
            "pool": {"slots": 1, **pool},
            "sink": {"path": str(output)},
            "job": {"progress": False},
        }
    )


def timed_dataset(job: CaptionJobConfig, pair: PacedPair, report_waits: ReportWaits | None = None) -> Any:
    """Build a job's real Ray Data graph over timed engines."""
    prompt_options = PromptOptions.of(job)
    frozen = freeze(job.source, prompt_options)
    source = SpanDatasource(job.source, frozen, ())
    decode = partial(decode_table, options=DecodeOptions.of(job.source, frozen.root, prompt_options))
    stages, run = (
        CaptionStages(decode, result_schema(), pair),
        RunContext(Stamp("timed", 1, "0"), report_waits=report_waits),
    )
    return caption_dataset(job, source, source.num_spans, stages, run)


def waits(folder: Path) -> Results:
    """Return the wait times of the real graph on real files, with one actor slower and one faster than a decoding
    process."""
    for seed in range(8):
        write_video(folder / f"{seed}.mp4", seed, 96, 854, 480, 48)
    for copy in range(8, NUM_WAITS):
        shutil.copyfile(folder / f"{copy % 8}.mp4", folder / f"{copy}.mp4")
    worker = DecoderWorker("auto", FrameSampling(num_frames=NUM_FRAMES), DecodeLimits(max_side_px=SIDE_PX))
    rows_per_s = 20 / _time_decoding(worker, folder / "0.mp4", 20, time.monotonic)
    source = {"kind": "videos", "path": str(folder), "max_side_px": SIDE_PX}
    job = timed_job(source, {"batch_rows": 8, "max_batches_in_flight": 4}, folder / "out")
    cells = {}
    for share in (0.5, 8.0):
        row_s = 1.0 / (share * rows_per_s)
        with session(JobSectionConfig(num_cpus=2)), wait_times.collect_waits() as measured:
            dataset = timed_dataset(job, PacedPair(1.0 / row_s), report_waits=measured.report)
            start_s = time.monotonic()
            num_rows = sum(len(batch["sample_id"]) for batch in dataset.iter_batches(batch_size=None))
            wall_s = time.monotonic() - start_s
            total = measured.total()
        cells[f"actor_at_{share:g}_of_the_limit"] = {
            "row_s": round(row_s, 4),
            "num_rows": num_rows,
            "wall_s": round(wall_s, 1),
            "actors_waited_share": round(total.actors_waited, 4),
            "input_waited_share": round(total.input_waited, 4),
        }
    return {"num_videos": NUM_WAITS, "decoder_rows_per_s": rows_per_s, "cells": cells}


PARTS = {"throughput": throughput, "memory": memory, "waits": waits}


def main(arguments: list[str] | None = None) -> int:
    parser = command_line("decode", __doc__)
    parser.add_argument("--only", choices=PARTS, help="run one part")
    options = parser.parse_args(arguments)
    for name, run in PARTS.items():
        if options.only in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                result = run(Path(folder))
            print(json.dumps({name: result}, indent=1), flush=True)
            results = read_results(RESULTS) if RESULTS.exists() else {}
            versions = {"machine": platform.machine(), **{name: version(name) for name in ("av", "decord")}}
            results[name] = versions | result
            write_results(RESULTS, {part: results[part] for part in PARTS if part in results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
