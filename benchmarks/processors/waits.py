"""Measures how long an engine of fixed pace waits for input in the real graph."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
import torch

from actors.results import Stamp
from actors.serving.engine_thread import Waits
from benchmarks.decode import timed_job
from benchmarks.harness.markdown import Results, percent, table
from benchmarks.harness.paced import StandIn
from benchmarks.harness.results import progress
from benchmarks.processors.cases import CASES, front_end_of, write_files
from configs.pool import Job
from configs.schema import CaptionJob
from decoding.types import Completion, Request
from models.inputs.output_size import OutputSizes
from models.inputs.processing import FrontEnd
from pipeline.cluster.ray_session import driver_actor, session
from pipeline.media.image_decoding import DecodeOptions
from pipeline.media.row_weights import Weigher
from pipeline.prompts.row_options import PromptOptions
from pipeline.rows.schemas import result_schema
from pipeline.run import wait_times
from pipeline.run.batches import MOST_BATCH_ROWS, choose_batch_rows
from pipeline.run.graph import MAX_PROCESSOR_CALLS_PER_WORKER, caption_dataset
from pipeline.run.processing import Processing
from pipeline.source.datasource import SpanDatasource
from pipeline.source.manifest import freeze

SHARE, START_S = 0.9, 20.0


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

    Every report follows one batch of `batch_rows` rows; the last batch may be smaller. Raise RuntimeError if no report
    is later.
    """
    last = reports[-1]
    place = next((place for place, one in enumerate(reports) if one.total_s >= START_S), len(reports) - 1)
    start, num_later = reports[place], len(reports) - 1 - place
    if not num_later:
        raise RuntimeError(f"the run ended with its first {START_S:.0f} s: its case needs more rows on this machine")
    later = Waits(last.idle_s - start.idle_s, last.queued_s - start.queued_s, last.total_s - start.total_s)
    return {
        "total_s": round(last.total_s, 2),
        "actors_waited_share": round(last.actors_waited, 4),
        "later_rows_per_s": round(num_later * batch_rows / later.total_s, 2),
        "later_actors_waited_share": round(later.actors_waited, 4),
    }


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
