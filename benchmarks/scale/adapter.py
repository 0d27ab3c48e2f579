"""Makes the code before the data plane (commit 9688187e) answer the calls of `benchmarks.scale`, which then runs there.

`install` is called before `driver`, `planner` and `writer` are imported, in a process that imports the packages of that
commit. Only signatures are adapted; arguments that the older code has no equivalent for are dropped.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

COMMIT = "9688187e57"
"""The last commit before full files were published in parallel tasks."""


def install() -> None:
    """Replace the functions whose signature has changed, and add the modules that the older code lacks."""
    _add_module("pipeline.cluster.partitions", IN_PROCESS=None, Workers=lambda job=None: nullcontext())
    _add_module("pipeline.run.batches", MOST_BATCH_ROWS=512, MOST_BATCH_IMAGES=128)
    pool: Any = import_module("configs.pool")
    pool.Job = import_module("configs.schema").Job
    rows: Any = import_module("pipeline.rows.schemas")
    rows.IMAGE_ROWS_PER_GROUP = import_module("pipeline.synthesis.rows").ROWS_PER_GROUP
    _adapt_planning()
    _adapt_graph()
    _adapt_writer()


def _add_module(name: str, **contents: Any) -> None:
    module = ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module


def _adapt_planning() -> None:
    """Drop the workers of planning: it ran in the calling process; every inventory read all files."""
    manifest: Any = import_module("pipeline.source.manifest")
    inventory: Any = import_module("pipeline.output.inventory")
    files: Any = import_module("pipeline.output.files")
    freeze_for, survey_files, take_inventory = manifest.freeze_for, manifest.survey_files, inventory.take_inventory
    manifest.freeze_for = lambda needs, workers=None: freeze_for(needs)
    manifest.survey_files = lambda filesystem, root, listed, needs, workers=None: survey_files(
        filesystem, root, listed, needs
    )
    manifest.Manifest.counts = property(import_module("pipeline.source.manifest_parts").counts_of)

    def take(output: Any, frozen: Any, rows_per_sample: Any, fingerprints: Any, **unknown: Any) -> Any:
        found = take_inventory(output, frozen, rows_per_sample, fingerprints)
        found.num_files_read = sum(len(files.list_published(output, folder)) for folder in ("data", "errors"))
        return found

    inventory.take_inventory = take
    load: Any = import_module("benchmarks.scale.planner")
    load.num_files_read_again = lambda case: case.num_files


def _adapt_graph() -> None:
    execution: Any = import_module("pipeline.run.execution")
    plan: Any = import_module("pipeline.run.plan")
    run_graph, checked = execution.run_graph, plan.checked

    def run(planned: Any, build: Any) -> Any:
        wall_s, waits, publisher = run_graph(planned, build)
        return SimpleNamespace(wall_s=wall_s, waits=waits, publisher=publisher)

    execution.run_graph = run
    plan.checked = lambda planned, gone, workers, probe_output: checked(planned, gone, probe_output)


def _adapt_writer() -> None:
    """All rows passed through spool files, which one chain of tasks read again and published, file by file."""
    output: Any = import_module("pipeline.output.writer")
    writer, call_in_ray = output.Writer, output.call_in_ray

    def make(*arguments: Any, max_tasks: int) -> Any:
        assert max_tasks == 1, "the writer ran one task at a time"
        return writer(*arguments)

    output.Writer, output.calls_in_ray = make, lambda: call_in_ray
    load: Any = import_module("benchmarks.scale.writer")

    def publish_file(publisher: Any, number: int, rows: Any) -> None:
        spooled = publisher.spool(number, [rows])
        publisher.publish("data", number, spooled)
        for one in spooled:
            publisher.remove(one.relative)

    load.publish_file = publish_file
    import_module("ray.cloudpickle").register_pickle_by_value(load)  # workers cannot import it: they are not adapted
