"""How fast media are decoded, what the decoders' process holds meanwhile, and whether an actor has to wait for input.

    python -m benchmarks.decode                      # all three parts, printed and written to results/decode.json
    python -m benchmarks.decode --only throughput    # one part (throughput, memory, waits); the others stay as they are
    python -m benchmarks.decode --quick              # a tenth of the rows, printed only

Throughput is rows per second of CPU time, parent and decoders' process together: what one core does, whatever else
the machine is doing. Memory is the resident size of the decoders' process after each video, over 2,000 videos of two
seconds and ten of ten minutes (in windows of ten seconds), with its replacement as configured and without. Waiting is
measured on the real graph with an engine that takes a set time for each row.
"""

from __future__ import annotations

import argparse
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

from actors.results import Stamp
from benchmarks.media_files import FPS, encode_jpeg, photograph, write_video
from configs.schema import CaptionJob, Job
from decoding.types import Completion, Request
from pipeline.cluster.ray_session import session
from pipeline.media.image_decoding import DecodeOptions, decode_image, decode_table
from pipeline.media.video.sampling import Sampling
from pipeline.media.video.worker import DecoderWorker, Limits, resident_bytes
from pipeline.prompts.row_options import Asking
from pipeline.rows.schemas import result_schema
from pipeline.run import wait_times
from pipeline.run.graph import caption_dataset
from pipeline.source.datasource import SpanDatasource
from pipeline.source.manifest import freeze

RESULTS = Path(__file__).parent / "results" / "decode.json"
SIDE_PX = 336
NUM_FRAMES = 8
NEVER = 10**9
WINDOW_S = 10.0
DECODERS = ("auto", "decord", "pyav")
PARTS = ("throughput", "memory", "waits")


# --- throughput ----------------------------------------------------------------------------------------------------


def throughput(folder: Path, num_rows: int) -> dict[str, Any]:
    """Rows per CPU second of 640 × 480 JPEGs to 336 px, and of 480p H.264 of ten seconds at 8 frames."""
    jpegs = [encode_jpeg(photograph(seed, 640, 480)) for seed in range(8)]
    began_s = time.process_time()
    for row in range(num_rows):
        decode_image(jpegs[row % len(jpegs)], 64_000_000, SIDE_PX)
    cells: dict[str, Any] = {"jpeg_640x480": _rate(num_rows, time.process_time() - began_s)}
    for gop in (48, 240):
        path = folder / f"gop_{gop}.mp4"
        write_video(path, gop, 240, 854, 480, gop)
        for decoder in DECODERS:
            cells[f"mp4_480p_gop_{gop}/{decoder}"] = _video_rate(str(path), decoder, max(2, num_rows // 10))
    return {"num_frames": NUM_FRAMES, "side_px": SIDE_PX, "cells": cells}


def _video_rate(path: str, decoder: str, num_rows: int) -> dict[str, float]:
    worker = DecoderWorker(
        decoder, Sampling(num_frames=NUM_FRAMES), Limits(max_side_px=SIDE_PX, worker_max_videos=NEVER)
    )
    worker.decode(path)  # starts the process and loads the libraries
    began_s = time.process_time() + _child_cpu_s(worker)
    for _ in range(num_rows):
        worker.decode(path)
    spent_s = time.process_time() + _child_cpu_s(worker) - began_s
    worker.close()
    return _rate(num_rows, spent_s)


def _child_cpu_s(worker: DecoderWorker) -> float:
    """CPU seconds of the decoders' process so far."""
    assert worker.pid is not None, "the process has been started"
    fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rate(num_rows: int, cpu_s: float) -> dict[str, float]:
    return {"rows": num_rows, "rows_per_cpu_s": round(num_rows / cpu_s, 2)}


# --- memory --------------------------------------------------------------------------------------------------------


def memory(folder: Path, num_short: int, num_long: int, long_s: int) -> dict[str, Any]:
    """Resident bytes of the decoders' process after each of many videos, decoders alone and with replacement."""
    short = folder / "short"
    short.mkdir()
    for seed in range(min(num_short, 20)):
        write_video(short / f"{seed:02}.mp4", seed, 2 * FPS, 320, 240, 24)
    long = folder / "long.mp4"
    write_video(long, 99, long_s * FPS, 320, 240, 120)
    files = sorted(map(str, short.iterdir()))
    plan = [files[row % len(files)] for row in range(num_short)]
    every = max(1, num_short // num_long) if num_long else NEVER
    for place in range(num_long):
        plan.insert(place * (every + 1) + every // 4, str(long))  # the first is among the first hundred
    runs = {
        "configured": ("auto", Limits().worker_max_videos),
        "decord_never_replaced": ("decord", NEVER),
        "pyav_never_replaced": ("pyav", NEVER),
    }
    told = {name: _hold(plan, decoder, most) for name, (decoder, most) in runs.items()}
    return {"num_short": num_short, "num_long": num_long, "long_s": long_s, "runs": told}


def _hold(plan: list[str], decoder: str, worker_max_videos: int) -> dict[str, Any]:
    """Peaks of resident memory over a run, of the decoders' process and of the one that it answers."""
    limits = Limits(max_side_px=224, worker_max_videos=worker_max_videos, timeout_s=600.0)
    worker = DecoderWorker(decoder, Sampling(num_frames=NUM_FRAMES, clip_s=WINDOW_S), limits)
    resident, parent, num_clips = [], [], 0
    for path in plan:
        num_clips += len(worker.decode(path))
        resident.append(worker.held_bytes)
        parent.append(resident_bytes(os.getpid()))
    num_started = worker.num_started
    worker.close()
    return {
        "num_videos": len(plan),
        "num_clips": num_clips,
        "num_processes": num_started,
        "peak_mib_first_100": _mib(max(resident[:100])),
        "peak_mib_after": _mib(max(resident[100:], default=0)),
        "parent_peak_mib_first_100": _mib(max(parent[:100])),
        "parent_peak_mib_after": _mib(max(parent[100:], default=0)),
        "peak_mib_every_20": [_mib(max(resident[start : start + 20])) for start in range(0, len(resident), 20)],
    }


def _mib(num_bytes: int) -> float:
    return round(num_bytes / 2**20, 1)


# --- waiting -------------------------------------------------------------------------------------------------------


class TimedEngine:
    """One slot that takes `row_s` for each row, and looks at its pixels."""

    def __init__(self, row_s: float) -> None:
        self._row_s = row_s
        self._waiting: list[Request] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def step(self) -> list[Completion]:
        request = self._waiting.pop(0)
        time.sleep(self._row_s)
        shown = [*request.images, *(clip.frames for clip in request.videos)]
        return [Completion(request.sample_id, (1,), f"{sum(one.nbytes for one in shown)}", finish_reason="stop")]


class TimedPair:
    """A pair that loads nothing."""

    target_id = "timed"
    drafter_id = ""

    def __init__(self, row_s: float) -> None:
        self._row_s = row_s

    def render(self, messages: Any) -> str:
        return "x"

    def engine(self, slots: int, max_context_tokens: int) -> TimedEngine:
        return TimedEngine(self._row_s)


class LoadTimed:
    """Loads a `TimedPair`."""

    def __init__(self, row_s: float) -> None:
        self._row_s = row_s

    def __call__(self, config: CaptionJob, num_threads: int | None) -> TimedPair:
        return TimedPair(self._row_s)


def waits(folder: Path, num_videos: int, rows_per_s: float) -> dict[str, Any]:
    """The real graph on real files, its actor set to a rate well below what one core decodes."""
    videos = folder / "waits"
    videos.mkdir()
    for seed in range(8):
        write_video(videos / f"{seed}.mp4", seed, 96, 854, 480, 48)
    for copy in range(8, num_videos):
        shutil.copyfile(videos / f"{copy % 8}.mp4", videos / f"{copy}.mp4")
    cells = {}
    for share in (0.5, 8.0):
        cells[f"actor_at_{share:g}_of_the_limit"] = _run_graph(videos, 1.0 / (share * rows_per_s))
    return {"num_videos": num_videos, "decoder_rows_per_s": rows_per_s, "cells": cells}


def _run_graph(videos: Path, row_s: float) -> dict[str, Any]:
    job = CaptionJob.model_validate(
        {
            "source": {"kind": "videos", "path": str(videos), "max_side_px": SIDE_PX},
            "prompt": "What moves?",
            "model": {"target": {"path": "timed"}},
            "pool": {"batch_rows": 8, "slots": 1, "max_batches_in_flight": 4},
            "sink": {"path": str(videos / "out")},
            "job": {"progress": False},
        }
    )
    asking = Asking.of(job)
    frozen = freeze(job.source, asking)
    source = SpanDatasource(job.source, frozen, ())
    decode = partial(decode_table, options=DecodeOptions.of(job.source, frozen.root, asking))
    with session(Job(num_cpus=2)), wait_times.measured() as measured:
        stamp = Stamp("waits", 1, "0")
        dataset = caption_dataset(
            job, source, source.num_spans, decode, result_schema(), stamp, load=LoadTimed(row_s), flow=measured.report
        )
        began_s = time.monotonic()
        num_rows = sum(len(batch["sample_id"]) for batch in dataset.iter_batches(batch_size=None))
        wall_s = time.monotonic() - began_s
        told = measured.total()
    return {
        "row_s": round(row_s, 4),
        "num_rows": num_rows,
        "wall_s": round(wall_s, 1),
        "actors_waited_share": round(told.actors_waited, 4),
        "input_waited_share": round(told.input_waited, 4),
    }


# --- the command ---------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Run; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__)
    parser.add_argument("--only", choices=PARTS, help="run one part")
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows, and nothing is written")
    options = parser.parse_args(arguments)
    scale = 10 if options.quick else 1
    parts: dict[str, Callable[[Path], dict[str, Any]]] = {
        "throughput": lambda folder: throughput(folder, 400 // scale),
        "memory": lambda folder: memory(folder, 2000 // scale, 10 // scale, 600 // scale),
        "waits": lambda folder: waits(folder, 80 // scale, _decoder_rate(folder)),
    }
    for name, run in parts.items():
        if options.only in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                found = run(Path(folder))
            print(json.dumps({name: found}, indent=1), flush=True)
            if not options.quick:
                _keep(name, found)
    return 0


def _keep(name: str, found: dict[str, Any]) -> None:
    """Put one part into the committed results."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    versions = {"machine": platform.machine(), **{name: version(name) for name in ("av", "decord")}}
    results[name] = versions | found
    RESULTS.write_text(json.dumps({part: results[part] for part in PARTS if part in results}, indent=1) + "\n")


def _decoder_rate(folder: Path) -> float:
    """Rows per second of wall time that one decoders' process gives here and now."""
    path = folder / "rate.mp4"
    write_video(path, 0, 96, 854, 480, 48)
    worker = DecoderWorker("auto", Sampling(num_frames=NUM_FRAMES), Limits(max_side_px=SIDE_PX))
    worker.decode(str(path))
    began_s = time.monotonic()
    for _ in range(20):
        worker.decode(str(path))
    spent_s = time.monotonic() - began_s
    worker.close()
    return 20 / spent_s


if __name__ == "__main__":
    sys.exit(main())
