"""Tests that a drained node loses no work: its actor finishes its rows, which are saved before the node is removed.

The node is drained by the command of docs/guides/resume.md and killed at the deadline, as in a cloud.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.scripts.scripts import cli

from tests.chaos import fleet
from tests.chaos.deaths import children_of
from tests.cluster.raylets import BATCH_ROWS, EVERY, LoadNoted, admissions, comparable, config_in, four_raylets
from tests.pipeline.attempts import at_rest, rows_in

STEP_S, NOTICE_S = 0.25, 30
MAX_GIVEN_ROWS = 2 * 2 * BATCH_ROWS
"""What the node may still be given after its notice: the batches on their way to the actor, and as many before the
driver has seen that it drains. An actor that stays works off four times as many in that time."""

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


class Reclaimer(threading.Thread):
    """Gives notice to a node that holds an actor at work, and kills all of it when the time is up."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        super().__init__(daemon=True)
        self.cluster, self.folder = cluster, folder
        self.ended = threading.Event()
        self.node = ""
        self.told_s = self.killed_s = 0.0
        self.num_admitted = 0

    def run(self) -> None:
        raylets = {node._node_id: node.all_processes["raylet"][0].process.pid for node in self.cluster.worker_nodes}
        while not self.node and not self.ended.wait(0.01):
            at_work = [node for node in raylets if len(admissions(self.folder, node)) > 2 * BATCH_ROWS]
            self.node = at_work[0] if at_work else ""
        if not self.node:
            return
        command = [
            *("drain-node", f"--address={self.cluster.address}", f"--node-id={self.node}"),
            *("--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot"),
            f"--deadline-remaining-seconds={NOTICE_S}",
        ]
        cli.main(command, standalone_mode=False)  # in this process, which knows where these nodes listen
        self.told_s = time.time()
        self.ended.wait(NOTICE_S)
        self.num_admitted = (self.folder / "admitted").stat().st_size
        for process in (raylets[self.node], *children_of(raylets[self.node])):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.killed_s = time.time()


def test_a_node_that_is_drained_in_mid_job_costs_no_row_and_repeats_none(
    cluster_folder: Path, tmp_path: Path, capfd: Any
) -> None:
    # Nothing is saved before the end but for the drain. Each actor is on a node of its own, with a logical GPU, and
    # blocks stay there: Ray hands those of less than 100 KB to the driver at once.
    options: dict[str, Any] = {"num_gpus": 1.0, "padding": 20_000 * "x", "keep_columns": ["text"]}
    options |= {"rows_per_file": 1000, "max_unsaved_seconds": 300.0}
    with four_raylets(cluster_folder, num_cpus=2, num_gpus=1) as cluster:
        undisturbed = config_in(tmp_path, "whole", **options)
        fleet.run(undisturbed, fleet.LoadPaced(tmp_path / "whole.admitted", 0.0))
        (tmp_path / "drained").mkdir()
        reclaimer = Reclaimer(cluster, tmp_path / "drained")
        reclaimer.start()
        fleet.run(config_in(tmp_path, "drained/out", **options), LoadNoted(tmp_path / "drained/admitted", STEP_S))
        ended_s = time.time()
        reclaimer.ended.set()
        reclaimer.join()
        alive = {node["NodeID"]: node for node in ray.nodes()}
    assert reclaimer.told_s, "no node was drained"
    assert reclaimer.killed_s < ended_s, "the job had ended when the node went"
    assert reclaimer.num_admitted < len(EVERY), "the job had nothing left to do when the node went"
    assert not alive[reclaimer.node]["Alive"]
    assert f"node {reclaimer.node[:12]} drains, gone in" in capfd.readouterr().err
    given = [when for when in admissions(tmp_path / "drained", reclaimer.node) if when > reclaimer.told_s]
    assert len(given) <= MAX_GIVEN_ROWS, "the node was given rows as if it stayed"
    assert at_rest(tmp_path / "drained/out") == at_rest(tmp_path / "whole") == (EVERY, set())
    rows, expected = rows_in(tmp_path / "drained/out/data"), rows_in(tmp_path / "whole/data")
    different = [own for own, row in rows.items() if comparable(row) != comparable(expected[own])]
    assert different == []
    assert (tmp_path / "drained/admitted").stat().st_size == len(EVERY), "rows were made twice"
