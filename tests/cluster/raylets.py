"""Starts four local raylets and a job on them, for tests in which a node is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from configs.schema import CaptionJobConfig
from decoding.types import Request
from tests.actors.fakes import FakeEngine
from tests.chaos import fleet
from tests.pipeline.attempts import job

NUM_FILES, ROWS_PER_FILE, BATCH_ROWS = 2, 200, 10
PATIENCE_S = 900.0
WORKERS = {"place": "worker"}
EVERY = {f"{file}.txt#{row}" for file in range(NUM_FILES) for row in range(ROWS_PER_FILE)}
MAX_COST_ROWS = 2 * 2 * 2 * BATCH_ROWS
"""Batches in two actors, and as many finished ones that exist only on the node."""


@contextmanager
def four_raylets(folder: Path, num_cpus: int = 1, num_gpus: int = 0) -> Iterator[Cluster]:
    """A head that holds the driver and no work, and three nodes with so much each, joined while the block runs."""
    cluster = Cluster(shutdown_at_exit=False)
    node = {
        "node_ip_address": "127.0.0.1",
        "object_store_memory": 128 * 1024**2,
        "plasma_directory": str(folder),
        "temp_dir": str(folder / "ray"),
        "include_dashboard": False,
    }
    try:
        cluster.add_node(num_cpus=0, **node)
        for _ in range(3):
            cluster.add_node(wait=False, num_cpus=num_cpus, num_gpus=num_gpus, labels=WORKERS, **node)
        cluster.wait_for_nodes(PATIENCE_S)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def config_in(folder: Path, output: str, num_gpus: float = 0.0, padding: str = "", **sink: Any) -> CaptionJobConfig:
    """Rows of text in two files, two batches at a time in each of two actors on two of the three nodes."""
    source = folder / "in"
    source.mkdir(exist_ok=True)
    for file in range(NUM_FILES):
        (source / f"{file}.txt").write_text("".join(f"row {row} of {file}{padding}\n" for row in range(ROWS_PER_FILE)))
    return job(
        {"kind": "text", "path": str(source), "span_max_rows": 50},
        folder / output,
        pool={
            **{"slots": 4, "batch_rows": BATCH_ROWS, "max_batches_in_flight": 2, "min_size": 2, "max_size": 2},
            **{"label_selector": WORKERS, "decode_label_selector": WORKERS, "num_gpus": num_gpus},
        },
        sink={"rows_per_file": 100, "max_unsaved_seconds": 0.0, **sink},
        job={"progress": False},
    )


def comparable(row: dict[str, Any]) -> dict[str, Any]:
    """Without what names the job and takes time; both are the first attempt of their job."""
    values = {name: value for name, value in row.items() if name not in ("job_id", "config_fingerprint")}
    return {
        **values,
        "telemetry": {name: value for name, value in row["telemetry"].items() if not name.endswith("_ms")},
    }


class NotedEngine(fleet.PacedEngine):
    """Also notes, in a file of its node's name, when it is given a row."""

    def submit(self, request: Request) -> None:
        with (self.admitted.parent / f"on-{ray.get_runtime_context().get_node_id()}").open("a") as file:
            file.write(f"{time.time()}\n")
        super().submit(request)


class NotedPair(fleet.PacedPair):
    """Gives such engines."""

    def engine(self, slots: int) -> FakeEngine:
        return NotedEngine(slots, self.admitted, self.step_s)


class LoadNoted(fleet.LoadPaced):
    """Travels to the actors."""

    def __call__(self, config: CaptionJobConfig, num_threads: int | None) -> NotedPair:
        return NotedPair(self.admitted, self.step_s)


def admissions(folder: Path, node: str) -> list[float]:
    """When engines on this node were given a row, in seconds since 1970."""
    noted = folder / f"on-{node}"
    return [float(line) for line in noted.read_text().split()] if noted.exists() else []
