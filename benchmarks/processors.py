"""Measures where the target's processor runs: CPU time per image, and how long an engine waits for input.

    python -m benchmarks.processors                 # writes results/processors.json; minutes
    python -m benchmarks.processors --only costs    # one part (costs, waits); the other is kept

Costs are CPU seconds of one core per image: decoding (with its subprocess), processing, packing, and unpacking in the
actor. Waits are measured on the real graph, with an engine of fixed time per row that reads processor outputs or,
with the processor in the actor, runs it on one prefetch thread, as engines on GPUs do. Its pace is 90 % of the rate of
the graph without such an engine, with the processor in tasks. That rate is measured before and after the run, after the
first `START_S` seconds, in which Ray starts the processes that decode. Batches have the rows that a job chooses itself.
"""

from __future__ import annotations

import functools
import io
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
import torch
from PIL import Image
from ray import cloudpickle
from transformers import CLIPImageProcessorPil, Qwen2VLImageProcessorPil

from actors.results import Stamp
from actors.serving.engine_thread import Waits
from benchmarks.decode import photograph, timed_job
from benchmarks.harness.markdown import Results, percent, table
from benchmarks.harness.paced import StandIn
from benchmarks.harness.results import command_line, finish, machine, progress, read_results, results_file
from configs.pool import Job
from configs.schema import CaptionJob
from decoding.types import Completion, Request
from models.inputs.output_size import OutputSizes
from models.inputs.processing import FrontEnd
from models.loading.checkpoints import CheckpointRef, read_config, read_processor
from pipeline.cluster.ray_session import driver_actor, session
from pipeline.media.image_decoding import DecodeOptions
from pipeline.media.row_weights import Weigher
from pipeline.media.video.clips import close_worker, worker_of
from pipeline.prompts.row_options import PromptOptions
from pipeline.rows.schemas import result_schema
from pipeline.run import wait_times
from pipeline.run.batches import MOST_BATCH_ROWS, choose_batch_rows
from pipeline.run.graph import MAX_PROCESSOR_CALLS_PER_WORKER, caption_dataset
from pipeline.run.processing import Processing
from pipeline.source.datasource import SpanDatasource
from pipeline.source.manifest import freeze

RESULTS = results_file("processors")
ZOO = Path(__file__).resolve().parents[1] / "zoo/checkpoints"
CASES = {"336 px": (640, 480, 6000), "1 MP": (1024, 1024, 1200)}
"""Width and height of the JPEG files, and number of rows of a run."""
NUM_FILES, NUM_COSTS, BATCH_ROWS, SHARE, IMAGES_PER_S = 16, 40, 16, 0.9, 15
START_S = 20.0
QUESTION = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]


def front_end_of(case: str) -> FrontEnd:
    """Return the processor of LLaVA-1.5 (336 px) or of Qwen2.5-VL (1 MP), with the tokenizer of a zoo model."""
    ref = CheckpointRef(str(ZOO / ("caption_target" if case == "336 px" else "video_target")))
    processor = read_processor(ref, read_config(ref))
    if case == "336 px":
        size = {"height": 336, "width": 336}
        processor.image_processor = CLIPImageProcessorPil(size={"shortest_edge": 336}, crop_size=size)
        processor.patch_size = 14
    else:
        processor.image_processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 12845056})
    return FrontEnd(processor)


def write_files(folder: Path, case: str, num_rows: int) -> None:
    """Write `num_rows` JPEG files of a case, of which `NUM_FILES` are different."""
    width, height, _ = CASES[case]
    files = []
    for seed in range(min(NUM_FILES, num_rows)):
        buffer = io.BytesIO()
        Image.fromarray(photograph(seed, width, height)).save(buffer, "JPEG", quality=90)
        files.append(buffer.getvalue())
    for row in range(num_rows):
        (folder / f"{row:05}.jpg").write_bytes(files[row % NUM_FILES])


def _cpu_s(function: Callable[[], Any]) -> float:
    """Return the CPU seconds of one call in this process, after one call that warms up."""
    function()
    start_s = time.process_time()
    for _ in range(NUM_COSTS):
        function()
    return (time.process_time() - start_s) / NUM_COSTS


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


def _child_cpu_s(pid: int | None) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


class ProcessingEngine:
    """An engine with one slot that spends `row_s` seconds per row, after its prompt was prepared on one thread."""

    def __init__(self, row_s: float, front_end: FrontEnd) -> None:
        self._row_s, self._front_end = row_s, front_end
        self._waiting: list[Request] = []
        self._thread = ThreadPoolExecutor(1)
        self._prompts: dict[str, Future[int]] = {}

    def submit(self, request: Request) -> None:
        self._waiting.append(request)
        self.expect([request])

    def expect(self, requests: Iterable[Request]) -> None:
        """Prepare the prompts of these requests on the thread, at most eight at once."""
        for request in requests:
            if len(self._prompts) >= 8:
                return
            if request.sample_id not in self._prompts:
                self._prompts[request.sample_id] = self._thread.submit(self._prepare, request)

    def _prepare(self, request: Request) -> int:
        if request.inputs is not None:
            outputs = request.inputs.unpack()
        else:
            outputs = self._front_end.encode(request.prompt, request.images, request.videos)
        return sum(one.nbytes for one in outputs.values())

    def step(self) -> list[Completion]:
        request = self._waiting.pop(0)
        if request.sample_id not in self._prompts:
            self._prompts[request.sample_id] = self._thread.submit(self._prepare, request)
        num_bytes = self._prompts.pop(request.sample_id).result()
        time.sleep(self._row_s)
        return [Completion(request.sample_id, (1,), f"{num_bytes}", finish_reason="stop")]


class ProcessingPair(StandIn):
    """A pair with a processor and without models."""

    def __init__(self, row_s: float, case: str) -> None:
        self._row_s, self._case = row_s, case

    def __call__(self, config: CaptionJob, num_threads: int | None) -> Any:
        torch.set_num_threads(1)
        self._front_end = front_end_of(self._case)
        return self

    def render(self, messages: Any) -> str:
        return self._front_end.render(messages)

    def engine(self, slots: int) -> ProcessingEngine:
        return ProcessingEngine(self._row_s, self._front_end)


class WaitReports:
    """Keeps all reports of one engine in their order; runs as a Ray actor."""

    def __init__(self) -> None:
        self._reports: list[Waits] = []

    def report(self, _: str, waits: Waits) -> None:
        self._reports.append(waits)

    def read(self) -> list[Waits]:
        return self._reports


def rates_and_waits(reports: Sequence[Waits], batch_rows: int) -> Results:
    """Return an engine's rate and waits: of the whole run, and after the first report behind `START_S`.

    Every report follows one batch of `batch_rows` rows; the last batch may be smaller.
    """
    last = reports[-1]
    place = next((place for place, one in enumerate(reports) if one.total_s >= START_S), len(reports) - 1)
    start, num_later = reports[place], len(reports) - 1 - place
    later = Waits(last.idle_s - start.idle_s, last.queued_s - start.queued_s, last.total_s - start.total_s)
    found: Results = {"total_s": round(last.total_s, 2), "actors_waited_share": round(last.actors_waited, 4)}
    if num_later:
        found["later_rows_per_s"] = round(num_later * batch_rows / later.total_s, 2)
        found["later_actors_waited_share"] = round(later.actors_waited, 4)
    return found


def run_graph(job: CaptionJob, case: str, row_s: float, in_tasks: bool) -> Results:
    """Run the job's graph; return its rows, and the rate and the waits of its engine."""
    from pipeline.media.image_decoding import decode_table

    prompt_options = PromptOptions.of(job)
    frozen = freeze(job.source, prompt_options)
    source = SpanDatasource(job.source, frozen, ())
    options = DecodeOptions.of(job.source, frozen.root, prompt_options)
    outputs: tuple[Any, ...] = ()
    with session(Job(num_cpus=2)), driver_actor(WaitReports) as reports:
        if in_tasks:
            front_end = front_end_of(case)
            sizes = OutputSizes.measure(front_end, job.source.max_side_px)  # type: ignore[arg-type]
            shipped = Processing(front_end.processor, False, sizes)
            options = DecodeOptions(
                prompt_options,
                options.media,
                options.max_images_per_row,
                options.max_decoded_bytes,
                shipped.for_tasks(job),
            )
            outputs = (sizes, False)
        dataset = caption_dataset(
            job,
            source,
            source.num_spans,
            functools.partial(decode_table, options=options),
            result_schema(),
            Stamp("timed", 1, "0"),
            load=ProcessingPair(row_s, case),
            flow=wait_times.WaitTimes(reports).report,
            weigher=Weigher.of(job.source, job.pool.rows_per_batch, prompt_options, *outputs),
            max_calls=MAX_PROCESSOR_CALLS_PER_WORKER,
        )
        num_rows = sum(len(batch["sample_id"]) for batch in dataset.iter_batches(batch_size=None))
        waited = rates_and_waits(ray.get(reports.read.remote()), job.pool.rows_per_batch)
    rate = round(num_rows / waited["total_s"], 2)
    return {"num_rows": num_rows, "row_ms": round(1000 * row_s, 2), "rows_per_s": rate, **waited}


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


def waits() -> Results:
    """Return the runs of the real graph with the processor in tasks and in the actor."""
    return {"cases": {case: case_waits(case) for case in CASES}}


def case_waits(case: str) -> Results:
    """Return the rate of one case without an engine of fixed pace, and its runs with one."""
    width, height, num_rows = CASES[case]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "in"
        folder.mkdir()
        write_files(folder, case, num_rows)
        source = {"kind": "images", "path": str(folder), "max_side_px": max(width, height)}
        job = timed_job(source, {}, Path(temporary) / "out")
        rows = choose_batch_rows(job.pool, num_rows, 1, MOST_BATCH_ROWS)
        job = job.model_copy(update={"pool": job.pool.model_copy(update={"batch_rows": rows})})
        runs: Results = {}
        for name in ("limit, tasks", "tasks", "limit after", "actor"):
            rate = runs["limit, tasks"]["later_rows_per_s"] if runs else 0.0
            row_s = 0.0 if name.startswith("limit") else 1.0 / (SHARE * rate)
            runs[name] = run_graph(job, case, row_s, in_tasks=name != "actor")
            progress(case, name, runs[name])
        return runs


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


def waits_table(results: Results) -> str:
    if "waits" not in results:
        return "Unmeasured: other work ran on the machine. `python -m benchmarks.processors --only waits` measures it."
    rows = []
    for case, runs in results["waits"]["cases"].items():
        limits = " and ".join(f"{runs[name]['later_rows_per_s']:.1f}" for name in ("limit, tasks", "limit after"))
        for place in ("tasks", "actor"):
            run = runs[place]
            rate, pace = f"{run['rows_per_s']:.1f}", f"{1000 / run['row_ms']:.1f}"
            waited = (percent(run[name], 1) for name in ("actors_waited_share", "later_actors_waited_share"))
            later = f"{run['later_rows_per_s']:.1f}"
            rows.append((case, place, f"{run['num_rows']:,}", limits, pace, rate, later, *waited))
    columns = (
        "image | processor | rows | limit before and after, rows/s | engine's pace, rows/s | rows/s | rows/s later"
    )
    return table(f"{columns} | engine waited | engine waited later", rows)


PARTS = {"costs": costs, "waits": waits}
TABLES = {"processor_costs": costs_table, "processor_waits": waits_table}


def main(arguments: list[str] | None = None) -> int:
    parser = command_line("processors", __doc__)
    parser.add_argument("--only", choices=PARTS, help="run one part")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = read_results(RESULTS) if RESULTS.exists() else {}
    for name, run in PARTS.items():
        if options.only in (None, name):
            results[name] = {"machine": machine(), **run()}
    return finish(RESULTS, results, *TABLES.values())


if __name__ == "__main__":
    sys.exit(main())
