"""Measures the CPU time of decoding, processing, packing and unpacking an image."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray import cloudpickle

from benchmarks.decode import photograph, timed_job
from benchmarks.harness.markdown import Results, percent, table
from benchmarks.processors.cases import CASES, front_end_of, write_files
from pipeline.media.image_decoding import DecodeOptions
from pipeline.media.video.clips import close_worker, worker_of
from pipeline.prompts.row_options import PromptOptions
from pipeline.run.graph import MAX_PROCESSOR_CALLS_PER_WORKER

NUM_COSTS, BATCH_ROWS, IMAGES_PER_S = 40, 16, 15
QUESTION = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]


def costs() -> Results:
    """Return the CPU time of loading, and of each step for the images of each case."""
    cases = {}
    for case, (width, height, _) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            write_files(Path(folder), case, 1)
            job = timed_job({"kind": "images", "path": folder, "max_side_px": max(width, height)}, {}, Path(folder))
            options = DecodeOptions.of(job.source, folder, PromptOptions.of(job))
            cases[case] = case_costs(case, (Path(folder) / "00000.jpg").read_bytes(), options)
    return {"loading": loading(), "cases": cases}


def case_costs(case: str, data: bytes, options: DecodeOptions) -> Results:
    """Return milliseconds of CPU per image of each step, and bytes of one row's pixels and packed outputs."""
    front_end, worker = front_end_of(case), worker_of(options.media)
    memory = bytearray(1 << 26)

    def decode() -> tuple[int, int]:
        return worker.decode_image(data, lambda count: memoryview(memory)[:count], len(memory))

    height, width = decode()
    pid = worker.pid
    child_s = _child_cpu_s(pid)
    decode_s = _cpu_s(decode)
    decode_s += (_child_cpu_s(pid) - child_s) / (NUM_COSTS + 1)
    close_worker()
    images = [photograph(0, width, height)]
    prompt = front_end.render(QUESTION)
    packed = front_end.pack(prompt, images)
    process_s = _cpu_s(lambda: front_end.encode(prompt, images))
    pack_s = _cpu_s(lambda: front_end.pack(prompt, images)) - process_s
    found = {"decode_ms": decode_s, "process_ms": process_s, "pack_ms": pack_s, "unpack_ms": _cpu_s(packed.unpack)}
    sizes = {
        "pixel_bytes": images[0].nbytes,
        "packed_bytes": packed.num_bytes,
        "float_bytes": packed.num_unpacked_bytes,
    }
    return {name: round(1000 * value, 2) for name, value in found.items()} | sizes


def _cpu_s(function: Callable[[], Any]) -> float:
    """Return the CPU seconds of one call in this process, after one call that warms up."""
    function()
    start_s = time.process_time()
    for _ in range(NUM_COSTS):
        function()
    return (time.process_time() - start_s) / NUM_COSTS


def _child_cpu_s(pid: int | None) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def loading() -> Results:
    """Return the CPU seconds of importing torch and transformers and of unpickling a processor in a new process."""
    import subprocess

    program = (
        "import sys, time, pickle; data = sys.stdin.buffer.read(); start = time.process_time(); pickle.loads(data);"
        "print(time.process_time() - start)"
    )
    pickled = cloudpickle.dumps(front_end_of("1 MP").processor)
    found = [
        float(subprocess.run([sys.executable, "-c", program], input=pickled, capture_output=True, check=True).stdout)
        for _ in range(3)
    ]
    return {"load_cpu_s": round(min(found), 2), "max_calls": MAX_PROCESSOR_CALLS_PER_WORKER, "batch_rows": BATCH_ROWS}


def costs_table(results: Results) -> str:
    """Render milliseconds of CPU per image, the cores for a rate of images, and the share of loading."""
    rows = []
    found = results["costs"]
    for case, cost in found["cases"].items():
        task_ms = cost["decode_ms"] + cost["process_ms"] + cost["pack_ms"]
        load_s, calls_s = found["loading"]["load_cpu_s"], found["loading"]["max_calls"] * BATCH_ROWS * task_ms / 1000
        share = percent(load_s / (load_s + calls_s), 1)
        steps = [f"{cost[name]:.1f}" for name in ("decode_ms", "process_ms", "pack_ms", "unpack_ms")]
        sizes = [f"{cost[name] / 1e6:.2f}" for name in ("pixel_bytes", "packed_bytes", "float_bytes")]
        rows.append((case, *steps, f"{IMAGES_PER_S * task_ms / 1000:.2f}", share, *sizes))
    columns = f"image | decode | process | pack | unpack (actor) | cores for {IMAGES_PER_S} images/s | loading"
    return table(f"{columns} | pixels, MB | packed, MB | floats, MB", rows)
