"""Compares partitions that run as Ray tasks with those that run in the calling process; ends with an error if they
differ.

    python -m tests.pipeline.cluster.ray_partitions FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
import ray

from configs.load import ConfigError
from configs.schema import PromptConfig
from configs.source import SourceConfig
from pipeline.cluster import partitions
from pipeline.cluster.partitions import Workers
from pipeline.manifest import freezing, survey
from pipeline.prompts.row_options import PromptOptions
from tests.pipeline.cluster.test_partitions import JOB, parts
from tests.pipeline.formats.shards import write_parquet


def running(folder: str, number: int) -> int:
    """Count the calls that have begun but whose results are not consumed."""
    Path(folder, str(number)).touch()
    return len(os.listdir(folder))


def failing(number: int) -> int:
    if number == 1:
        raise ConfigError(f"source.path: {number}.txt is bad")
    return number


def dying(folder: str, number: int) -> int:
    if number == 1:
        Path(folder, f"{len(os.listdir(folder))}").touch()
        os._exit(1)
    return number


def write_sources(folder: Path) -> dict[str, SourceConfig]:
    """Write sources in two formats, with a file that is cut into ranges, and repeated ids in several files."""
    for number in range(12):
        ids = [f"{number}-{row}" if row % 5 else f"repeated-{row}" for row in range(20)]
        write_parquet(folder / f"parquet/{number:02d}.parquet", {"k": ids, "n": [number] * 20}, row_group_size=7)
        (folder / "jsonl").mkdir(exist_ok=True)
        text = "".join(json.dumps({"k": sample_id, "n": 1}) + "\n\n" for sample_id in ids)
        (folder / f"jsonl/{number:02d}.jsonl").write_text(text * (1 + number % 3))
    (folder / "parquet/05.parquet").write_bytes(b"torn")
    return {kind: SourceConfig(kind=kind, path=str(folder / kind), id_column="k") for kind in ("parquet", "jsonl")}


def main(folder: Path) -> None:
    sources = write_sources(folder / "in")
    survey.PARTITION_FILES, survey.PARTITION_IDS, survey.RANGE_BYTES = 2, 25, 300
    needs = {
        kind: freezing.needs_of(source, PromptOptions(PromptConfig(text="{n}")), ("n",))
        for kind, source in sources.items()
    }
    expected = {kind: freezing.freeze_for(source) for kind, source in needs.items()}
    assert expected["jsonl"].files["num_samples"].to_pylist() == [20, 40, 60] * 4
    assert expected["parquet"].files["num_samples"].to_pylist()[5] is None
    repeated = [len(rows) for rows in expected["parquet"].files["repeated_rows"].to_pylist()]
    assert repeated == [0, 4, 4, 4, 4, 0, 4, 4, 4, 4, 4, 4]
    partitions.MIN_RAY_S = 0.0
    with Workers(JOB) as workers:
        for kind, source in needs.items():
            frozen = freezing.freeze_for(source, workers)
            assert frozen.files.equals(expected[kind].files)
            assert frozen.keep == expected[kind].keep
        assert ray.is_initialized()
        check_errors(workers, folder)
    assert not ray.is_initialized()


def check_errors(workers: Workers, folder: Path) -> None:
    """Check errors and bounds of Ray tasks in the session that is open."""
    with pytest.raises(ConfigError, match=r"^source\.path: 1\.txt is bad$"):
        list(workers.map(failing, parts(3), 1e9, "survey"))
    (folder / "deaths").mkdir()
    died = r"^sink\.path: the inventory of the files 10\.txt to 19\.txt ended its process 4 times \(.*\); remove or"
    with pytest.raises(ConfigError, match=died):
        list(workers.map(partial(dying, str(folder / "deaths")), parts(3), 1e9, "inventory", "sink.path"))
    assert len(os.listdir(folder / "deaths")) == partitions.MAX_RETRIES + 1
    (folder / "calls").mkdir()
    results = workers.map(partial(running, str(folder / "calls")), parts(40), 1e9, "survey")
    in_flight = 4  # two per CPU
    for consumed in range(1, 41):
        assert next(results) <= consumed + in_flight - 1
    table = pa.table({"path": [f"{number:09d}" for number in range(1_000_000)]})
    reference = ray.put(table.slice(3, 2))
    assert ray.experimental.get_object_locations([reference])[reference]["object_size"] < 100_000


if __name__ == "__main__":
    main(Path(sys.argv[1]))
