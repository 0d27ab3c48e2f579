"""The Ray graph on fakes: stages are not fused, each task has one block, and crashes do not change the result."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
from ray.data import DataContext, Dataset
from ray.data._internal.logical.optimizers import get_execution_plan

from actors.results import Stamp
from pipeline.rows.schemas import result_schema
from pipeline.run.graph import CUT_CPUS, RESERVED_SHARE, CaptionStages, RunContext, caption_dataset, pool_strategy
from tests.actors.fakes import fake_job
from tests.jobs.stand_ins import LoadFake, RowsInMemory, as_it_is, seven_of_each

STAMP = Stamp("job-1", 1, "f00d")
pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.slow]


def spans_of(num_rows: int, span_rows: int) -> list[list[dict[str, Any]]]:
    rows = [
        {"id": f"s{index:03}", "row_index": index, "grey": index % 256, "text": f"ask {index}"}
        for index in range(num_rows)
    ]
    return [rows[start : start + span_rows] for start in range(0, num_rows, span_rows)]


def dataset_of(spans: list[list[dict[str, Any]]], lease: Path | None = None, **pool: Any) -> Dataset:
    job = fake_job(pool={"slots": 4, "batch_rows": 8, **pool})
    source = RowsInMemory(spans)
    return caption_dataset(
        job, source, len(spans), CaptionStages(as_it_is, result_schema(), LoadFake(lease)), RunContext(STAMP)
    )


def blocks_of(dataset: Dataset) -> list[pa.Table]:
    return ray.get([ref for bundle in dataset.iter_internal_ref_bundles() for ref in bundle.block_refs])


def by_id(blocks: list[pa.Table]) -> list[dict[str, Any]]:
    return pa.concat_tables(blocks).sort_by("sample_id").to_pylist()


def test_no_stage_is_fused_into_another(capsys: pytest.CaptureFixture[str]) -> None:
    dataset_of(spans_of(16, 8)).explain()
    plan = capsys.readouterr().out.split("Physical Plan (Optimized)")[1]
    assert re.findall(r"(\w+)\[", plan) == [
        "ActorPoolMapOperator",
        "TaskPoolMapOperator",
        "TaskPoolMapOperator",
        "StreamingRepartition",
        "TaskPoolMapOperator",
        "InputDataBuffer",
    ]
    assert "->" not in plan


def test_each_batch_is_one_task_and_one_block_whatever_the_spans_are() -> None:
    blocks = blocks_of(dataset_of(spans_of(50, 19)))
    # The two rows that are left over travel with the last batch or alone.
    assert sorted(block.num_rows for block in blocks) in ([2, *[8] * 6], [*[8] * 5, 10])
    assert [row["sample_id"] for row in by_id(blocks)] == [f"s{index:03}" for index in range(50)]


def test_the_result_does_not_depend_on_spans_batches_or_the_number_of_actors() -> None:
    alone = by_id(blocks_of(dataset_of(spans_of(48, 48), batch_rows=48)))
    assert alone[7]["generated_text"] == "user: <image> ask 7 / [126]"
    assert by_id(blocks_of(dataset_of(spans_of(48, 10), min_size=2, max_size=2))) == alone


def test_rows_of_one_sample_are_repartitioned_into_batches_in_order() -> None:
    job = fake_job(
        pool={"slots": 4, "batch_rows": 8}, source={"kind": "videos", "path": "in", "video": {"clip_s": 1.0}}
    )
    source = RowsInMemory(spans_of(5, 2))
    dataset = caption_dataset(
        job, source, 3, CaptionStages(seven_of_each, result_schema(), LoadFake()), RunContext(STAMP)
    )
    blocks = blocks_of(dataset)
    assert max(block.num_rows for block in blocks) <= 16
    ids = [sample_id for block in blocks for sample_id in block["sample_id"].to_pylist()]
    assert sorted(ids) == [f"s{index:03}@{clip}" for index in range(5) for clip in range(7)]
    # Seven rows are in at most two batches of eight. Batches join in the order in which their tasks end.
    runs: Counter[str] = Counter()
    for block in blocks:
        before = ("", 0)
        for sample_id in block["sample_id"].to_pylist():
            sample, clip = sample_id.split("@")
            runs[sample] += before != (sample, int(clip) - 1)
            before = (sample, int(clip))
    assert max(runs.values()) <= 2


def test_an_actor_killed_in_mid_batch_changes_nothing_in_the_result(tmp_path: Path) -> None:
    spans = spans_of(48, 16)
    undisturbed = by_id(blocks_of(dataset_of(spans)))
    lease = tmp_path / "died"
    disturbed = by_id(blocks_of(dataset_of(spans, lease=lease)))
    assert lease.exists()
    assert disturbed == undisturbed


def test_a_batch_that_kills_its_actor_every_time_ends_the_job_instead_of_hanging_it() -> None:
    dataset = dataset_of([[{"id": "poison", "text": "CRASH"}]])
    with pytest.raises(ray.exceptions.RayError):
        blocks_of(dataset)


def remote_arguments(dataset: Dataset) -> dict[str, dict[str, Any]]:
    """Ray's worker options of each stage, by the stage's name in the executed plan."""
    stages: dict[str, dict[str, Any]] = {}
    waiting = [get_execution_plan(dataset._logical_plan)[0].dag]
    while waiting:
        stage = waiting.pop()
        stages[stage.name] = getattr(stage, "_ray_remote_args", {})
        waiting += stage.input_dependencies
    return stages


def test_node_labels_of_decoding_and_models_reach_the_plan_of_ray() -> None:
    pool = {"label_selector": {"zone": "in(a, b)"}, "decode_label_selector": {"pool": "!gpu"}}
    result = remote_arguments(dataset_of(spans_of(8, 8), num_gpus=0.5, accelerator_type="H100", **pool))
    actors = next(arguments for name, arguments in result.items() if "Generate" in name)
    expected = {"num_gpus": 0.5, "accelerator_type": "H100", "label_selector": {"zone": "in(a, b)"}}
    assert {name: actors[name] for name in expected} == expected
    for stage in ("RowsInMemory", "decode"):
        arguments = next(arguments for name, arguments in result.items() if stage in name)
        assert arguments["label_selector"] == {"pool": "!gpu"}
    plain = remote_arguments(dataset_of(spans_of(8, 8)))
    assert [name for name, arguments in plain.items() if "label_selector" in arguments] == []


def test_tasks_that_repartition_blocks_reserve_no_cpus() -> None:
    stages = remote_arguments(dataset_of(spans_of(8, 8)))
    cpus = {name: arguments.get("num_cpus") for name, arguments in stages.items()}
    cut = next(value for name, value in cpus.items() if name.startswith("StreamingRepartition"))
    decode = next(value for name, value in cpus.items() if "decode" in name)
    # As many decoding tasks as CPUs fit beside as many cuts.
    assert cut == CUT_CPUS
    assert decode + cut <= 1.0
    assert DataContext.get_current().op_resource_reservation_ratio == RESERVED_SHARE


def test_a_pool_starts_with_the_requested_number_of_actors() -> None:
    sizes = {"min_size": 1, "max_size": 4, "initial_size": 3}
    strategy = pool_strategy(fake_job(pool=sizes).pool)
    assert (strategy.min_size, strategy.max_size, strategy.initial_size) == (1, 4, 3)
    assert pool_strategy(fake_job(pool={"min_size": 2, "max_size": 4}).pool).initial_size == 2


def test_nodes_that_fit_their_conditions_run_every_stage() -> None:
    selectors = {"label_selector": {"pool": "!tpu"}, "decode_label_selector": {"pool": "!gpu"}}
    rows_by_id = by_id(blocks_of(dataset_of(spans_of(20, 10), **selectors)))
    assert [row["sample_id"] for row in rows_by_id] == [f"s{index:03}" for index in range(20)]
