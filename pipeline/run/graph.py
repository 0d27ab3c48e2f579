"""The Ray Data graphs of jobs: the path of tables from read tasks through actors to the writer.

Captions: read spans → cut into batches → decode media → generate → write. Images: read → cut → prepare prompts → draw
codes → cut → decode codes → encode files → write.

When an actor dies, Ray keeps the blocks that a task had already reported and drops those of its retry by index, unread.
So every task makes one block with its rows in input order. Ray's cutting of blocks by bytes is switched off, and rows
bound the size of a block instead:

    read      one span of the manifest, still encoded: `source.span_max_rows` rows or `source.span_max_bytes`
    cut       slices of `pool.batch_rows` rows, still encoded, equal in a retry; heavy rows and rows with several
              prompts count for several, so that `source.max_decoded_bytes` bounds a task (`pipeline.media.row_weights`)
    decode    those rows as RGB; one row at a time if `source.video.clip_s` makes many of each, which are cut again
    generate  those rows as text
    prepare   rows of `pool.batch_rows` prompts, with their ready features
    draw      those prompts' images as codes, `sampling.num_images_per_prompt` rows for each
    cut       slices of `vq.batch_rows` images
    paint     those images as RGB
    encode    those images as files
    save      the columns of the sink, outside the graph (`pipeline.output.writer`)

No stage is fused into another: Ray fuses nothing with a cut, and tasks require other resources than actors. So tasks
run ahead of actors, in other processes.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import ray.data
from ray.data import ActorPoolStrategy, DataContext, Dataset, Datasource

from actors import synthesize as image_stage
from actors.engine_actor import load_pair
from actors.generate import Generate, LoadPair
from actors.paint import LoadPainter, Paint, load_painter
from actors.results import Stamp, Tally
from actors.serving.engine_thread import ReportWaits
from configs.schema import ActorPool, CaptionJob, EnginePool
from configs.synthesis import SynthesizeJob
from pipeline.media.row_weights import Weighed, Weigher, padded
from pipeline.prompts.row_options import MAX_PROMPTS
from pipeline.run.crash_ledger import CrashLedger, journalled

MAX_ACTOR_RESTARTS = 100
"""Of one actor over the whole job; losing its machine counts too."""
MAX_TASK_RETRIES = 3
"""Of one batch without a crash ledger."""
MAX_READ_RETRIES = 10
"""Of one task on files or pixels without a crash ledger; losing its machine, or its output, counts too."""
MAX_JOURNALLED_RETRIES = 100
"""Of one batch with a crash ledger, which gives rows up well before. Ray Data retries for ever by default."""
MAX_CALLS_PER_WORKER = 64
"""Tasks of one process before Ray starts a fresh one: native decoders leak."""
PREPARE_CPUS = 0.5
"""Of one task that fills prompts. A resource request of its own keeps Ray from fusing the stage."""


def configure(context: DataContext, max_ahead_bytes: int | None = None) -> None:
    """Set the options that the graph requires.

    No task starts whose output would take the bytes between files and results beyond `max_ahead_bytes`, except one per
    stage.
    """
    limits = context.execution_options.resource_limits
    context.execution_options.resource_limits = limits.copy(object_store_memory=max_ahead_bytes or math.inf)
    context.target_max_block_size = None
    context.enable_progress_bars = False  # the job draws its own
    # It warns of every actor that holds a model without `memory=`.
    context.issue_detectors_config.high_memory_detector_config.detection_time_interval_s = -1


def caption_dataset(
    config: CaptionJob,
    datasource: Datasource,
    num_spans: int,
    decode: Callable[[pa.Table], pa.Table],
    schema: pa.Schema,
    stamp: Stamp,
    load: LoadPair = load_pair,
    tally: Tally | None = None,
    flow: ReportWaits | None = None,
    log: CrashLedger | None = None,
    weigher: Weigher | None = None,
) -> Dataset:
    """The lazy dataset of results: everything but the write. `decode` maps a READ table to a DECODED table.

    With a weigher, decoding tasks are cut by the weight of their rows; without, by their number.
    """
    pool, cuts_videos = config.pool, config.source.video.clip_s is not None
    shares_media = config.columns.prompts is not None and not cuts_videos
    assert weigher is not None or not shares_media, "rows that share pixels travel in one block"
    decode_rows = 1 if cuts_videos else pool.batch_rows  # one video may become hundreds of clips
    labels, block_rows, pad_to = pool.decode_label_selector, pool.batch_rows, None
    if weigher is not None and not cuts_videos:
        datasource = Weighed(datasource, weigher)
        # Ray joins blocks until they have the rows of a batch, so each block is padded to that number.
        pad_to = block_rows = pool.batch_rows + (MAX_PROMPTS if shares_media else 0)
    batches = read_batches(datasource, num_spans, decode_rows, pool.max_ahead_bytes, labels)
    decoded = map_tasks(batches, decode, "decode", decode_rows, pool.decode_cpus, log, labels, pad_to)
    if cuts_videos:
        block_rows = pool.batch_rows if weigher is None else weigher.rows_of_clips
        decoded = cut(decoded, block_rows)
    arguments = {"load": load, "tally": tally, "flow": flow}
    return map_actors(decoded, Generate, (config, schema, stamp), arguments, pool, log, block_rows)


def synthesis_dataset(
    config: SynthesizeJob,
    datasource: Datasource,
    num_spans: int,
    prepare: Callable[[pa.Table], pa.Table],
    encode: Callable[[pa.Table], pa.Table],
    schemas: tuple[pa.Schema, pa.Schema],
    stamp: Stamp,
    load: image_stage.LoadPair = load_pair,
    load_painter: LoadPainter = load_painter,
    tally: Tally | None = None,
    flow: ReportWaits | None = None,
    log: CrashLedger | None = None,
    present: frozenset[str] = frozenset(),
) -> Dataset:
    """The lazy dataset of results: everything but the write; without images it ends at the codes.

    `prepare` maps READ to PREPARED tables, `encode` PAINTED to RESULT tables; `schemas` are those of CODED and PAINTED
    tables. Images that are `present` are not made again.
    """
    coded, painted = schemas
    prompts = read_batches(datasource, num_spans, config.pool.batch_rows)
    prepared = map_tasks(prompts, prepare, "prepare", config.pool.batch_rows, PREPARE_CPUS)
    arguments = {"load": load, "tally": tally, "flow": flow, "present": present}
    drawn = map_actors(prepared, image_stage.Synthesize, (config, coded, stamp), arguments, config.pool, log)
    if not config.sink.images:
        return drawn
    images = cut(drawn, config.vq.batch_rows)
    pixels = map_actors(images, Paint, (config, painted), {"load": load_painter}, config.vq)
    return map_tasks(pixels, encode, "encode", config.vq.batch_rows, config.image.encode_cpus)


def read_batches(
    datasource: Datasource,
    num_spans: int,
    batch_rows: int,
    max_ahead_bytes: int | None = None,
    labels: dict[str, str] | None = None,
) -> Dataset:
    """Read, on nodes with these labels, and cut."""
    configure(DataContext.get_current(), max_ahead_bytes)
    options = {"max_retries": MAX_READ_RETRIES, **_placed(labels)}
    with _free_remote_arguments():
        spans = ray.data.read_datasource(datasource, override_num_blocks=num_spans, ray_remote_args=options)
    return cut(spans, batch_rows)


@contextlib.contextmanager
def _free_remote_arguments() -> Iterator[None]:
    """Ray deprecates free remote arguments from 2.60 on, and has no other way yet to bound restarts and retries."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated")
        yield


def cut(rows: Dataset, batch_rows: int) -> Dataset:
    """Blocks of `batch_rows` rows."""
    return rows.repartition(target_num_rows_per_block=batch_rows, strict=True)


def map_tasks(
    batches: Dataset,
    function: Callable[[pa.Table], pa.Table],
    name: str,
    batch_rows: int,
    num_cpus: float,
    log: CrashLedger | None = None,
    labels: dict[str, str] | None = None,
    pad_to: int | None = None,
) -> Dataset:
    """A function of tables on CPUs, one task per batch, with the name that Ray shows.

    A crash ledger requires READ rows. With `pad_to`, the function gets tables without their filler rows, and its output
    is filled up to this number of rows.
    """
    if log is not None:
        function = journalled(function, log.of(name))
    if pad_to is not None:
        function = padded(function, pad_to)
    with _free_remote_arguments():
        return batches.map_batches(
            named(function, name),
            batch_size=batch_rows,
            batch_format="pyarrow",
            zero_copy_batch=True,
            num_cpus=num_cpus,
            max_calls=MAX_CALLS_PER_WORKER,
            **_placed(labels),
            max_retries=MAX_READ_RETRIES if log is None else MAX_JOURNALLED_RETRIES,
        )


def map_actors(
    batches: Dataset,
    actor: type,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    pool: ActorPool,
    log: CrashLedger | None = None,
    batch_rows: int | None = None,
) -> Dataset:
    """A pool of actors that each hold a model; an actor gets `batch_rows` rows at a time, by default the pool's."""
    if log is not None:
        keywords = {**keywords, "journal": log.of("engine")}
    with _free_remote_arguments():
        return batches.map_batches(
            actor,
            fn_constructor_args=arguments,
            fn_constructor_kwargs=keywords,
            batch_size=batch_rows or pool.batch_rows,
            batch_format="pyarrow",
            zero_copy_batch=True,
            compute=pool_strategy(pool),
            **actor_resources(pool),
            max_restarts=MAX_ACTOR_RESTARTS,
            max_task_retries=MAX_TASK_RETRIES if log is None else MAX_JOURNALLED_RETRIES,
        )


def pool_strategy(pool: ActorPool) -> ActorPoolStrategy:
    """The pool of actors. Batches queue at an actor only if the pool may grow: Ray adds an actor when they do.

    An engine gets several batches at once; another actor works on one while the next is transferred.
    """
    elastic = pool.max_size > pool.min_size
    calls = pool.max_batches_in_flight if isinstance(pool, EnginePool) else 1
    waiting = calls if isinstance(pool, EnginePool) else calls + 1
    return ActorPoolStrategy(
        min_size=pool.min_size,
        max_size=pool.max_size,
        initial_size=pool.initial_size,
        max_tasks_in_flight_per_actor=waiting * (2 if elastic else 1),
        max_concurrent_calls_per_actor=calls,
    )


def actor_resources(pool: ActorPool) -> dict[str, Any]:
    """Ray's remote arguments of one actor; an actor on the CPU reserves none, because its torch threads are set."""
    resources: dict[str, Any] = {"num_cpus": 1 if pool.num_gpus else 0}
    if pool.num_gpus:
        resources["num_gpus"] = pool.num_gpus
    if pool.accelerator_type:
        resources["accelerator_type"] = pool.accelerator_type
    return {**resources, **_placed(pool.label_selector)}


def _placed(labels: dict[str, str] | None) -> dict[str, Any]:
    return {"label_selector": labels} if labels else {}


def named(function: Callable[[pa.Table], pa.Table], name: str) -> Callable[[pa.Table], pa.Table]:
    """The function, which may be a `partial`, under the name that Ray shows for its stage."""

    def stage(table: pa.Table) -> pa.Table:
        return function(table)

    stage.__name__ = stage.__qualname__ = name
    return stage
