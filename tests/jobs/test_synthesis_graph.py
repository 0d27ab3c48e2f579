"""The Ray graph of a synthesis job on fakes: stages are not fused, and crashes of either actor change nothing."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray
from numpy.typing import NDArray
from ray.data import Dataset

from actors.results import Stamp
from configs.synthesis import ImageFileConfig, SynthesizeJobConfig
from pipeline.run.graph import ImageStages, RunContext, synthesis_dataset
from pipeline.synthesis.files import encode_table
from pipeline.synthesis.rows import coded_schema, painted_schema, result_schema
from tests.actors.image_fakes import FakeImageEngine, FakeImagePair, FakePainter, image_job, prepared_table
from tests.jobs.stand_ins import Mortal, RowsInMemory, as_it_is

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.slow]


class MortalEngine(Mortal, FakeImageEngine):
    """An image engine that dies once."""


class MortalPair(FakeImagePair):
    """Gives engines that die once in the life of the file `lease`."""

    def __init__(self, lease: Path) -> None:
        super().__init__()
        self.lease = lease

    def engine(self, slots: int) -> FakeImageEngine:
        return MortalEngine(slots, self.lease)


class MortalPainter(FakePainter):
    """Dies with its process, once, at its second batch."""

    def __init__(self, lease: Path) -> None:
        super().__init__()
        self.lease = lease

    def paint(self, codes: NDArray[np.int32]) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        if len(self.batches) == 1 and not self.lease.exists():
            self.lease.touch()
            os._exit(1)
        return super().paint(codes)


def load_pair(config: SynthesizeJobConfig, num_threads: int | None, lease: Path | None = None) -> FakeImagePair:
    return FakeImagePair() if lease is None else MortalPair(lease)


def load_painter(config: SynthesizeJobConfig, num_threads: int | None, lease: Path | None = None) -> FakePainter:
    return FakePainter() if lease is None else MortalPainter(lease)


def dataset_of(
    num_prompts: int, span_rows: int, engine: Path | None = None, painter: Path | None = None, **sections: Any
) -> Dataset:
    rows = [{"id": f"p{index:03}", "prompt": f"word {index}", "seed": index} for index in range(num_prompts)]
    rows[3] = {"id": "p003", "error": "empty_prompt"}
    spans = [rows[start : start + span_rows] for start in range(0, num_prompts, span_rows)]
    job = image_job(**{"sampling": {"num_images_per_prompt": 2}, "pool": {"slots": 4, "batch_rows": 3}, **sections})
    stages = ImageStages(
        as_it_is,
        functools.partial(encode_table, file=ImageFileConfig(), keep_codes=True),
        coded_schema(),
        painted_schema(),
        load=functools.partial(load_pair, lease=engine),
        load_painter=functools.partial(load_painter, lease=painter),
    )
    context = RunContext(Stamp("job-1", 1, "f00d"))
    return synthesis_dataset(job, RowsInMemory(spans, prepared_table), len(spans), stages, context)


def blocks_of(dataset: Dataset) -> list[pa.Table]:
    return ray.get([ref for bundle in dataset.iter_internal_ref_bundles() for ref in bundle.block_refs])


def by_id(blocks: list[pa.Table]) -> dict[str, dict[str, Any]]:
    rows = pa.concat_tables(blocks).to_pylist()
    rows_by_id = {row["sample_id"]: {**row, "row_index": None} for row in rows}
    assert len(rows_by_id) == len(rows)
    return rows_by_id


@pytest.fixture(scope="module")
def undisturbed(local_ray: None) -> dict[str, dict[str, Any]]:
    blocks = blocks_of(dataset_of(18, 7))
    assert {block.schema for block in blocks} == {result_schema()}
    # Two rows that are left over travel with the last batch or alone.
    assert sorted(block.num_rows for block in blocks) in ([4] * 9, [2, *[4] * 7, 6])
    return by_id(blocks)


def test_no_stage_is_fused_into_another(capsys: pytest.CaptureFixture[str]) -> None:
    dataset_of(8, 4).explain()
    plan = capsys.readouterr().out.split("Physical Plan (Optimized)")[1]
    assert re.findall(r"(\w+)\[", plan) == [
        "TaskPoolMapOperator",
        "ActorPoolMapOperator",
        "TaskPoolMapOperator",
        "StreamingRepartition",
        "ActorPoolMapOperator",
        "TaskPoolMapOperator",
        "TaskPoolMapOperator",
        "StreamingRepartition",
        "TaskPoolMapOperator",
        "InputDataBuffer",
    ]
    assert "->" not in plan


def test_every_prompt_has_its_images_once_and_an_error_as_many_rows(undisturbed: dict[str, dict[str, Any]]) -> None:
    assert sorted(undisturbed) == [f"p{index:03}#{replica}" for index in range(18) for replica in (0, 1)]
    assert {name: row["error_type"] for name, row in undisturbed.items() if row["error_type"]} == {
        "p003#0": "empty_prompt",
        "p003#1": "empty_prompt",
        "p013#0": "non_finite_pixels",
        "p013#1": "non_finite_pixels",
    }
    assert undisturbed["p005#1"]["codes"][:2] == [5, 1]
    assert undisturbed["p005#1"]["image"]["path"] == "p005#1.png"


def test_the_result_does_not_depend_on_spans_or_batches(undisturbed: dict[str, dict[str, Any]]) -> None:
    pools = {"pool": {"slots": 3, "batch_rows": 5, "min_size": 2, "max_size": 2}, "vq": {"batch_rows": 7}}
    assert by_id(blocks_of(dataset_of(18, 18, **pools))) == undisturbed


@pytest.mark.parametrize("who", ["engine", "painter"])
def test_an_actor_that_dies_in_the_middle_changes_nothing(
    who: str, undisturbed: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    lease = tmp_path / "died"
    assert by_id(blocks_of(dataset_of(18, 7, **{who: lease}))) == undisturbed
    assert lease.exists()


def test_without_images_the_graph_ends_at_the_codes(capsys: pytest.CaptureFixture[str]) -> None:
    dataset = dataset_of(8, 4, sink={"path": "out", "images": False})
    dataset.explain()
    plan = capsys.readouterr().out.split("Physical Plan (Optimized)")[1]
    assert plan.count("ActorPoolMapOperator") == plan.count("StreamingRepartition") == 1
    assert "->" not in plan
    assert {block.schema for block in blocks_of(dataset)} == {coded_schema()}
