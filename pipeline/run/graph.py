"""Builds the Ray Data graphs of jobs, from read tasks through actors to the dataset of results.

Captions: read spans → repartition into batches → decode media → generate → write. Images: read → repartition → prepare
prompts → generate codes → repartition → decode codes → encode files → write.

When an actor dies, Ray keeps the blocks that a task has already returned, and discards the retry's blocks with the same
indices without comparing them. So every task returns one block with its rows in input order. Ray's splitting of blocks
by bytes is disabled. Each stage bounds its blocks by rows instead:

    read      one span of the manifest, still encoded: `source.span_max_rows` rows or `source.span_max_bytes`
    cut       `pool.batch_rows` rows, still encoded, identical in a retry; heavy rows and rows with several prompts
              count as several, so that `source.max_decoded_bytes` bounds a task (`pipeline.media.row_weights`)
    decode    the same rows as RGB or as processor outputs; with clips one row per task, whose clips are
              repartitioned again
    generate  the same rows with generated text
    prepare   `pool.batch_rows` prompts with their conditions and sampling values
    draw      the generated VQ codes of these prompts' images, `sampling.num_images_per_prompt` rows per prompt
    cut       images, a multiple of `vq.batch_rows` (`rows_per_image_batch`)
    paint     the same images as RGB
    encode    the same images as encoded files
    write     the columns of the sink, outside the graph (`pipeline.output.writer`)

Ray fuses no stages: it does not fuse a repartition, and tasks request other resources than actors. So tasks run ahead
of actors, in other processes.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa
import ray.data
from ray.data import ActorPoolStrategy, DataContext, Dataset, Datasource

from actors import synthesize as image_stage
from actors.engine_actor import load_pair
from actors.generate import Generate, LoadPair
from actors.paint import LoadPainter, Paint, load_painter
from actors.results import ReportProgress, Stamp
from actors.serving.engine_thread import ReportWaits
from configs.pool import ActorPoolConfig, EnginePoolConfig
from configs.schema import CaptionJobConfig
from configs.synthesis import SynthesizeJobConfig
from pipeline.media.row_weights import Weighed, Weigher, padded
from pipeline.prompts.row_options import MAX_PROMPTS
from pipeline.resources.requests import GPU_ACTOR_CPUS, PREPARE_CPUS
from pipeline.run.crash_ledger import CrashLedgerClient, with_ledger
from pipeline.run.job_plan import MAX_BATCH_IMAGES

MAX_ACTOR_RESTARTS = 100
"""Restarts of one actor over the whole job; the loss of its node counts too."""
MAX_TASK_RETRIES = 3
"""Retries of one batch of an actor without a crash ledger."""
MAX_READ_RETRIES = 10
"""Retries of one task without a crash ledger; the loss of its node or of its output counts too."""
MAX_LEDGER_RETRIES = 100
"""Retries of one batch with a crash ledger, which gives up rows much earlier. Ray Data's default has no limit."""
MAX_CALLS_PER_WORKER = 64
"""Tasks per worker process before Ray starts a new one, because native decoders leak memory."""
MAX_PROCESSOR_CALLS_PER_WORKER = 1024
"""The same for tasks that run the target's processor, whose import and loading take several seconds of CPU; images and
videos are decoded in a subprocess, which is replaced more often."""
CUT_CPUS = 0.1
"""CPUs of one task that cuts blocks: it waits for room for its output most of the time."""
TASK_OPTIONS = {"max_calls": MAX_CALLS_PER_WORKER, "max_retries": MAX_READ_RETRIES}
RESERVED_SHARE = 0.1
"""Share of the resources that Ray Data reserves for its operators in equal parts. Its default, a half, keeps CPUs from
decoding that reading and cutting do not use (decision 45)."""


def configure(context: DataContext, max_ahead_bytes: int | None = None) -> None:
    """Set the Ray Data options that the graph requires.

    `max_ahead_bytes` limits the object store memory of blocks between source and results (None: no limit). Ray starts
    no task that would exceed it, except one per stage.
    """
    limits = context.execution_options.resource_limits
    context.execution_options.resource_limits = limits.copy(object_store_memory=max_ahead_bytes or math.inf)
    context.target_max_block_size = None
    context.op_resource_reservation_ratio = RESERVED_SHARE
    context.enable_progress_bars = False  # the job draws its own
    # This detector warns of every actor that holds a model without `memory=`.
    context.issue_detectors_config.high_memory_detector_config.detection_time_interval_s = -1


@dataclass(frozen=True)
class RunContext:
    """The stamp of the rows of one run of a graph, and where its actors and tasks report."""

    stamp: Stamp
    report_progress: ReportProgress | None = None
    report_waits: ReportWaits | None = None
    ledger: CrashLedgerClient | None = None

    def reports(self) -> dict[str, Any]:
        return {"report_progress": self.report_progress, "report_waits": self.report_waits}


Build = Callable[[Any, RunContext], Dataset]
"""Builds the dataset of results from a plan."""


class BuildCaptions(Protocol):
    """Builds the dataset of captions from a plan, with another actor too (`CaptionStages.actor`)."""

    def __call__(self, plan: Any, run: RunContext, actor: type[Generate] = Generate, **options: Any) -> Dataset: ...


@dataclass(frozen=True)
class CaptionStages:
    """The stages of a caption job. `decode` maps a READ table to a DECODED table; `schema` is that of the results.

    With a `weigher`, decode tasks are bounded by the weight of their rows, otherwise by their number of rows.
    `max_calls` is the number of decode tasks per worker process. `actor` may be a subclass of Generate, which is made
    with further arguments `options`.
    """

    decode: Callable[[pa.Table], pa.Table]
    schema: pa.Schema
    load: LoadPair = load_pair
    weigher: Weigher | None = None
    max_calls: int = MAX_CALLS_PER_WORKER
    actor: type[Generate] = Generate
    options: Mapping[str, Any] = field(default_factory=dict)


def caption_dataset(
    config: CaptionJobConfig, datasource: Datasource, num_spans: int, stages: CaptionStages, run: RunContext
) -> Dataset:
    """Build the lazy dataset of caption results, without the write."""
    pool, weigher, cuts_videos = config.pool, stages.weigher, config.source.video.cuts
    shares_media = config.columns.prompts is not None and not cuts_videos
    assert weigher is not None or not shares_media, "rows that share pixels travel in one block"
    decode_rows = 1 if cuts_videos else pool.rows_per_batch  # one video may become hundreds of clips
    labels, block_rows, pad_to = pool.decode_label_selector, pool.rows_per_batch, None
    if weigher is not None and not cuts_videos:
        datasource = Weighed(datasource, weigher)
        # Ray joins blocks until they have the rows of a batch, so each block is padded to that number.
        pad_to = block_rows = pool.rows_per_batch + (MAX_PROMPTS if shares_media else 0)
    batches = read_batches(datasource, num_spans, decode_rows, pool.max_ahead_bytes, labels)
    decode = stages.decode if run.ledger is None else with_ledger(stages.decode, run.ledger.of("decode"))
    if pad_to is not None:
        decode = padded(decode, pad_to)  # receives tables without filler rows
    max_retries = MAX_READ_RETRIES if run.ledger is None else MAX_LEDGER_RETRIES
    tasks = {"max_calls": stages.max_calls, "max_retries": max_retries, **_placed(labels)}
    decoded = map_tasks(batches, decode, "decode", decode_rows, pool.decode_cpus, tasks)
    if cuts_videos:
        block_rows = pool.rows_per_batch if weigher is None else weigher.rows_of_clips
        decoded = cut(decoded, block_rows)
    arguments = (config, stages.schema, run.stamp)
    named_arguments = {"load": stages.load, **run.reports(), **stages.options}
    return map_actors(decoded, stages.actor, arguments, named_arguments, pool, run.ledger, batch_rows=block_rows)


@dataclass(frozen=True)
class ImageStages:
    """The stages of a synthesis job. `prepare` maps READ to PREPARED tables, `encode` PAINTED to RESULT tables
    (`pipeline.synthesis.rows`); `coded` and `painted` are the schemas of CODED and PAINTED tables. Images whose ids are
    in `present` are not generated again."""

    prepare: Callable[[pa.Table], pa.Table]
    encode: Callable[[pa.Table], pa.Table]
    coded: pa.Schema
    painted: pa.Schema
    present: frozenset[str] = frozenset()
    load: image_stage.LoadPair = load_pair
    load_painter: LoadPainter = load_painter


def synthesis_dataset(
    config: SynthesizeJobConfig, datasource: Datasource, num_spans: int, stages: ImageStages, run: RunContext
) -> Dataset:
    """Build the lazy dataset of image results, without the write; if `sink.images` is false, it ends at the codes."""
    prompt_rows, image_rows = config.pool.rows_per_batch, rows_per_image_batch(config)
    prompts = read_batches(datasource, num_spans, prompt_rows)
    prepared = map_tasks(prompts, stages.prepare, "prepare", prompt_rows, PREPARE_CPUS)
    arguments = (config, stages.coded, run.stamp)
    named_arguments = {"load": stages.load, **run.reports(), "present": stages.present}
    drawn = map_actors(
        prepared, image_stage.Synthesize, arguments, named_arguments, config.pool, run.ledger, batch_rows=prompt_rows
    )
    if not config.sink.images:
        return drawn
    images = cut(drawn, image_rows)
    painting = {"load": stages.load_painter, "ledger": None if run.ledger is None else run.ledger.of("paint")}
    pixels = map_actors(images, Paint, (config, stages.painted), painting, config.vq, batch_rows=image_rows)
    return map_tasks(pixels, stages.encode, "encode", image_rows, config.image.encode_cpus)


def rows_per_image_batch(config: SynthesizeJobConfig) -> int:
    """Return the images of a batch between the stages of a synthesis job, a multiple of `vq.batch_rows`."""
    num_images = config.pool.rows_per_batch * config.sampling.num_images_per_prompt
    forwards = min(num_images, MAX_BATCH_IMAGES) // config.vq.batch_rows
    return config.vq.batch_rows * max(1, forwards)


def read_batches(
    datasource: Datasource,
    num_spans: int,
    batch_rows: int,
    max_ahead_bytes: int | None = None,
    labels: dict[str, str] | None = None,
) -> Dataset:
    """Read a source in `num_spans` tasks, on nodes with these labels, and repartition it by `batch_rows` rows."""
    configure(DataContext.get_current(), max_ahead_bytes)
    options = {"max_retries": MAX_READ_RETRIES, **_placed(labels)}
    with _free_remote_arguments():
        spans = ray.data.read_datasource(datasource, override_num_blocks=num_spans, ray_remote_args=options)
    return cut(spans, batch_rows)


@contextlib.contextmanager
def _free_remote_arguments() -> Iterator[None]:
    """Suppress Ray's warning about `ray_remote_args`, deprecated since 2.60: no other option limits retries yet."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated")
        yield


def cut(rows: Dataset, batch_rows: int) -> Dataset:
    """Repartition into blocks of exactly `batch_rows` rows; the last block may have fewer."""
    dataset = rows.repartition(target_num_rows_per_block=batch_rows, strict=True)
    dataset._logical_plan.dag.ray_remote_args["num_cpus"] = CUT_CPUS  # no public option sets it
    return dataset


def map_tasks(
    batches: Dataset,
    function: Callable[[pa.Table], pa.Table],
    name: str,
    batch_rows: int,
    num_cpus: float,
    options: Mapping[str, Any] = TASK_OPTIONS,
) -> Dataset:
    """Apply a function of tables to batches in CPU tasks, one task per batch; Ray shows the stage as `name`."""
    with _free_remote_arguments():
        return batches.map_batches(
            named(function, name),
            batch_size=batch_rows,
            batch_format="pyarrow",
            zero_copy_batch=True,
            num_cpus=num_cpus,
            **options,
        )


def map_actors(
    batches: Dataset,
    actor: type,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    pool: ActorPoolConfig,
    ledger: CrashLedgerClient | None = None,
    *,
    batch_rows: int,
) -> Dataset:
    """Apply a pool of actors, which each hold a model, to batches of `batch_rows` rows."""
    if ledger is not None:
        keywords = {**keywords, "ledger": ledger.of("engine")}
    with _free_remote_arguments():
        return batches.map_batches(
            actor,
            fn_constructor_args=arguments,
            fn_constructor_kwargs=keywords,
            batch_size=batch_rows,
            batch_format="pyarrow",
            zero_copy_batch=True,
            compute=pool_strategy(pool),
            **actor_resources(pool),
            max_restarts=MAX_ACTOR_RESTARTS,
            max_task_retries=MAX_TASK_RETRIES if ledger is None else MAX_LEDGER_RETRIES,
        )


def pool_strategy(pool: ActorPoolConfig) -> ActorPoolStrategy:
    """Return Ray's strategy for a pool of actors.

    An engine processes several batches concurrently; any other actor processes one while the next is transferred. More
    batches queue at an actor only if the pool may grow, because Ray adds actors when batches queue.
    """
    elastic = pool.max_size > pool.min_size
    calls = pool.max_batches_in_flight if isinstance(pool, EnginePoolConfig) else 1
    waiting = calls if isinstance(pool, EnginePoolConfig) else calls + 1
    return ActorPoolStrategy(
        min_size=pool.min_size,
        max_size=pool.max_size,
        initial_size=pool.initial_size,
        max_tasks_in_flight_per_actor=waiting * (2 if elastic else 1),
        max_concurrent_calls_per_actor=calls,
    )


def actor_resources(pool: ActorPoolConfig) -> dict[str, Any]:
    """Return Ray's remote arguments of one actor; an actor without a GPU reserves no CPU: its torch threads are set."""
    resources: dict[str, Any] = {"num_cpus": GPU_ACTOR_CPUS if pool.gpus else 0}
    if pool.gpus:
        resources["num_gpus"] = pool.gpus
    if pool.accelerator_type:
        resources["accelerator_type"] = pool.accelerator_type
    return {**resources, **_placed(pool.label_selector)}


def _placed(labels: dict[str, str] | None) -> dict[str, Any]:
    return {"label_selector": labels} if labels else {}


def named(function: Callable[[pa.Table], pa.Table], name: str) -> Callable[[pa.Table], pa.Table]:
    """Return a function, which may be a `partial`, under the name that Ray shows for its stage."""

    def stage(table: pa.Table) -> pa.Table:
        return function(table)

    stage.__name__ = stage.__qualname__ = name
    return stage
