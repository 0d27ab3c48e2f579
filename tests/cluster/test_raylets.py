"""Tests that killing one of four raylets, with an actor and a decoding task on it, does not change a job's result."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
from ray.cluster_utils import Cluster

from pipeline.media.image_decoding import decode_table
from tests.chaos import fleet
from tests.chaos.deaths import children_of, num_saved
from tests.cluster.raylets import EVERY, MAX_COST_ROWS, comparable, config_in, four_raylets
from tests.pipeline.attempts import at_rest, rows_in

STEP_S, DECODE_S = 0.05, 0.2

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


def decode_slowly(table: pa.Table, *options: Any) -> pa.Table:
    """As a job decodes, and long enough to be found at it."""
    time.sleep(DECODE_S)
    return decode_table(table, *options)


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
                if all(any(name in result for result in held.values()) for name in ("Generate", "decode")):
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
    rows, expected = rows_in(tmp_path / "disturbed/out/data"), rows_in(tmp_path / "whole/data")
    different = [own for own, row in rows.items() if comparable(row) != comparable(expected[own])]
    assert different == []
    assert hunter.num_admitted < len(EVERY), "the job had nothing left to do"
    num_admitted = (tmp_path / "admitted").stat().st_size
    assert len(EVERY) <= num_admitted <= len(EVERY) + MAX_COST_ROWS
