"""A job on four raylets, of which one is killed with an actor and a decoding task on it, ends as if nothing was."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
from ray.cluster_utils import Cluster

from configs.schema import CaptionJob
from pipeline.media import decode_missing
from tests.chaos import fleet
from tests.chaos.deaths import children_of, num_saved
from tests.pipeline.attempts import at_rest, job, rows_in

NUM_FILES, ROWS_PER_FILE, BATCH_ROWS = 2, 200, 10
STEP_S, DECODE_S = 0.05, 0.2
PATIENCE_S = 120.0
WORKERS = {"place": "worker"}
EVERY = {f"{file}.txt#{row}" for file in range(NUM_FILES) for row in range(ROWS_PER_FILE)}
MAX_COST_ROWS = 2 * 2 * 2 * BATCH_ROWS
"""Batches in two actors, and as many that were finished and nowhere but on the node."""

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]


@contextmanager
def four_raylets(folder: Path) -> Iterator[Cluster]:
    """A head that holds the driver and no work, and three nodes with a CPU each, joined while the block runs."""
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
            cluster.add_node(wait=False, num_cpus=1, labels=WORKERS, **node)
        cluster.wait_for_nodes(PATIENCE_S)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def config_in(folder: Path, output: str) -> CaptionJob:
    source = folder / "in"
    source.mkdir(exist_ok=True)
    for file in range(NUM_FILES):
        (source / f"{file}.txt").write_text("".join(f"row {row} of {file}\n" for row in range(ROWS_PER_FILE)))
    return job(
        {"kind": "text", "path": str(source), "span_max_rows": 50},
        folder / output,
        pool={
            **{"slots": 4, "batch_rows": BATCH_ROWS, "max_batches_in_flight": 2, "min_size": 2, "max_size": 2},
            **{"label_selector": WORKERS, "decode_label_selector": WORKERS},
        },
        sink={"rows_per_file": 100, "max_unsaved_seconds": 0.0},
        job={"progress": False},
    )


def decode_slowly(table: pa.Table, *options: Any) -> pa.Table:
    """As a job decodes, and long enough to be found at it."""
    time.sleep(DECODE_S)
    return decode_missing(table, *options)


class Hunter(threading.Thread):
    """Kills the raylet that holds an actor and a decoding task, and what runs under it, once the job has saved rows."""

    def __init__(self, cluster: Cluster, folder: Path, admitted: Path) -> None:
        super().__init__(daemon=True)
        self.raylets = {node.all_processes["raylet"][0].process.pid for node in cluster.worker_nodes}
        self.folder, self.admitted = folder, admitted
        self.ended = threading.Event()
        self.killed: list[int] = []
        self.num_admitted = 0

    def run(self) -> None:
        while not self.killed and not self.ended.is_set():
            for raylet in self.raylets if num_saved(self.folder) else ():
                held = children_of(raylet)
                if all(any(name in told for told in held.values()) for name in ("Generate", "decode")):
                    self.num_admitted = self.admitted.stat().st_size
                    # The machine goes: workers that outlive their raylet hand in what they have first.
                    for process in (raylet, *held):
                        with suppress(ProcessLookupError):
                            os.kill(process, signal.SIGKILL)
                    self.killed = [raylet]
                    return
            time.sleep(0.01)


def test_a_raylet_killed_with_an_actor_and_a_decoding_task_costs_no_row(cluster_folder: Path, tmp_path: Path) -> None:
    with four_raylets(cluster_folder) as cluster:
        undisturbed = config_in(tmp_path, "whole")
        fleet.run(undisturbed, fleet.LoadPaced(tmp_path / "whole.admitted", 0.0))
        (tmp_path / "disturbed").mkdir()
        disturbed = config_in(tmp_path, "disturbed/out")
        hunter = Hunter(cluster, tmp_path / "disturbed", tmp_path / "admitted")
        hunter.start()
        load = fleet.LoadPaced(tmp_path / "admitted", STEP_S)
        fleet.run(disturbed, load, decode_slowly)
        hunter.ended.set()
        hunter.join()
        assert len(hunter.killed) == 1, "no raylet held both before the job was done"
        num_alive = sum(node["Alive"] for node in ray.nodes())
    assert num_alive == 3
    assert at_rest(tmp_path / "disturbed/out") == at_rest(tmp_path / "whole") == (EVERY, set())
    found, expected = rows_in(tmp_path / "disturbed/out/data"), rows_in(tmp_path / "whole/data")
    different = [own for own, row in found.items() if comparable(row) != comparable(expected[own])]
    assert different == []
    assert hunter.num_admitted < len(EVERY), "the job had nothing left to do"
    num_admitted = (tmp_path / "admitted").stat().st_size
    assert len(EVERY) <= num_admitted <= len(EVERY) + MAX_COST_ROWS


def comparable(row: dict[str, Any]) -> dict[str, Any]:
    """Without what names the job and takes time; both are the first attempt of their job."""
    told = {name: value for name, value in row.items() if name not in ("job_id", "config_fingerprint")}
    return {**told, "telemetry": {name: value for name, value in row["telemetry"].items() if not name.endswith("_ms")}}
