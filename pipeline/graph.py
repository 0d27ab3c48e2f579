"""The Ray Data graph of a job: read spans → cut into batches → decode media → generate → write.

When an actor dies, Ray keeps the blocks that a task had already reported and drops those of its retry by index, unread.
So every task makes one block, rows in input order, or the very same blocks again. Ray's cutting of blocks by bytes is
switched off for that, and rows bound the size of a block instead:

    read      one span of the manifest, still encoded: `source.span_max_rows` rows or `source.span_max_bytes`
    cut       slices of `pool.batch_rows` rows, still encoded: the driver decides where, so a retry cuts there again
    decode    those rows as RGB, one block; `source.max_side_px` bounds it further
    generate  those rows as text, one block
    write     what the sink asks for

No stage is fused into another: Ray fuses nothing with a cut, and decoding asks for other resources than the actors do.
So decoding runs ahead of them, in other processes. Knows no file format, no torch and no console.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import ray.data
from ray.data import ActorPoolStrategy, DataContext, Dataset, Datasource

from actors.generate import Generate, LoadPair, load_pair
from actors.results import Stamp, Tally
from configs.schema import CaptionJob, Pool

MAX_ACTOR_RESTARTS = 100
"""Of one actor over the whole job; losing its machine counts too."""
MAX_TASK_RETRIES = 3
"""Of one batch. Ray Data retries for ever by default, so a row that kills its actor would hang the job: here the job
fails at the fourth death that the batch is in."""
MAX_CALLS_PER_DECODER = 64
"""Tasks of one decoding process before Ray starts a fresh one: native decoders leak."""


def configure(context: DataContext) -> None:
    """Set what the graph relies on; see the module's first paragraph."""
    context.target_max_block_size = None
    context.enable_progress_bars = False  # the job draws its own
    # Advice on `memory=` for every actor that holds a model, at WARNING level; a pool's size is the user's choice here.
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
) -> Dataset:
    """The lazy dataset of results: everything but the write. `decode` maps a READ table to a DECODED table."""
    configure(DataContext.get_current())
    pool = config.pool
    rows = ray.data.read_datasource(datasource, override_num_blocks=num_spans)
    batches = rows.repartition(target_num_rows_per_block=pool.batch_rows, strict=True)
    decoded = batches.map_batches(
        named(decode, "decode"),
        batch_size=pool.batch_rows,
        batch_format="pyarrow",
        zero_copy_batch=True,
        num_cpus=pool.decode_cpus,
        max_calls=MAX_CALLS_PER_DECODER,
    )
    with warnings.catch_warnings():
        # Ray 2.60 means to drop free remote arguments in 2.64, and has no other way yet to bound restarts and retries.
        warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated")
        return decoded.map_batches(
            Generate,
            fn_constructor_args=(config, schema, stamp),
            fn_constructor_kwargs={"load": load, "tally": tally},
            batch_size=pool.batch_rows,
            batch_format="pyarrow",
            zero_copy_batch=True,
            compute=pool_strategy(pool),
            **actor_resources(pool),
        )


def pool_strategy(pool: Pool) -> ActorPoolStrategy:
    """The pool of actors. Batches queue at an actor only where the pool may grow: Ray adds an actor when they do."""
    elastic = pool.max_size > pool.min_size
    return ActorPoolStrategy(
        min_size=pool.min_size,
        max_size=pool.max_size,
        max_tasks_in_flight_per_actor=pool.max_batches_in_flight * (2 if elastic else 1),
        max_concurrent_calls_per_actor=pool.max_batches_in_flight,
    )


def actor_resources(pool: Pool) -> dict[str, Any]:
    """Ray's remote arguments of one actor; one on the CPU reserves none, because its torch threads are set by us."""
    resources: dict[str, Any] = {
        "num_cpus": 1 if pool.num_gpus else 0,
        "max_restarts": MAX_ACTOR_RESTARTS,
        "max_task_retries": MAX_TASK_RETRIES,
    }
    if pool.num_gpus:
        resources["num_gpus"] = pool.num_gpus
    if pool.accelerator_type:
        resources["accelerator_type"] = pool.accelerator_type
    return resources


def named(function: Callable[[pa.Table], pa.Table], name: str) -> Callable[[pa.Table], pa.Table]:
    """The function under the name that Ray shows for its stage; keyword options may be bound with `partial`."""

    def stage(table: pa.Table) -> pa.Table:
        return function(table)

    functools.update_wrapper(stage, stage)
    stage.__name__ = stage.__qualname__ = name
    return stage
