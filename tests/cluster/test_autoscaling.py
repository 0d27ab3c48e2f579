"""Tests a job on an autoscaling cluster: it starts on one node, scales to the maximum, and all nodes are removed.

RECORD=1 make test-cluster    # also writes benchmarks/results/autoscaling.json, the time line
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import ray

from tests.chaos import fleet
from tests.cluster.autoscaling import MAX_NODES, PrivateFleet, Watcher
from tests.pipeline.attempts import at_rest, job

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results/autoscaling.json"
NUM_ROWS, BATCH_ROWS, STEP_S = 1200, 10, 0.25
SHRINK_S = 900.0

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


def test_a_job_grows_to_its_maximum_and_its_nodes_go_when_it_has_ended(cluster_folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / "rows.txt").write_text("".join(f"row {row}\n" for row in range(NUM_ROWS)))
    # One logical GPU on each node, and one for each actor: so actors ask for nodes.
    resources = {"CPU": 2, "GPU": 1, "object_store_memory": 128 * 1024**2}
    worker = {"resources": resources, "node_config": {}, "min_workers": 1, "max_workers": MAX_NODES}
    grown = PrivateFleet(cluster_folder, worker)
    config = job(
        {"kind": "text", "path": str(source), "span_max_rows": 100},
        tmp_path / "out",
        pool={
            **{"slots": 8, "batch_rows": BATCH_ROWS, "max_batches_in_flight": 2, "num_gpus": 1.0},
            **{"min_size": 1, "max_size": MAX_NODES},
        },
        sink={"rows_per_file": 400, "max_unsaved_seconds": 0.0},
        job={"progress": False},
    )
    try:
        grown.start()
        ray.init(address=grown.address, log_to_driver=False)
        until_s = time.monotonic() + SHRINK_S
        watcher = Watcher()
        while watcher.look()["num_nodes"] < 1:
            assert time.monotonic() < until_s, "the first node did not come"
            time.sleep(0.2)
        watcher = Watcher()
        watcher.look()
        watcher.start()
        fleet.run(config, fleet.LoadPaced(tmp_path / "admitted", STEP_S))
        done_s = round(time.monotonic() - watcher.began_s, 1)
        until_s = time.monotonic() + SHRINK_S
        while watcher.line[-1]["num_nodes"] > 1 and time.monotonic() < until_s:
            time.sleep(0.2)
        watcher.ended.set()
        watcher.join()
    finally:
        ray.shutdown()
        grown.shutdown()
    values = {"num_rows": NUM_ROWS, "max_nodes": MAX_NODES, "job_done_at_s": done_s, "time_line": watcher.line}
    assert at_rest(tmp_path / "out") == ({f"rows.txt#{row}" for row in range(NUM_ROWS)}, set())
    assert watcher.line[0]["num_nodes"] == 1
    assert max(moment["num_nodes"] for moment in watcher.line) == MAX_NODES
    assert max(moment["num_actors"] for moment in watcher.line) == MAX_NODES
    assert watcher.line[-1] == {"at_s": watcher.line[-1]["at_s"], "num_nodes": 1, "num_actors": 0}
    if "RECORD" in os.environ:
        RESULTS.write_text(json.dumps(values, indent=1) + "\n")
