"""Resources of a job on clusters of local raylets, whose GPUs are declared: they are read without a driver, and the
node types of an autoscaler count before it has started one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from configs.load import ConfigError
from configs.pool import JobSectionConfig
from configs.schema import CaptionJobConfig
from pipeline.cluster.ray_session import session
from pipeline.resources import gcs
from pipeline.resources.resolve import Resources, capacity_of, resolve
from tests.cluster.autoscaling import PrivateFleet
from tests.pipeline.attempts import job

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


def config_for(address: str, **pool: Any) -> CaptionJobConfig:
    return job({"kind": "text", "path": "/in"}, "/out", pool={"slots": 4, **pool}, job={"ray_address": address})


def resolved(address: str, **pool: Any) -> Resources:
    config = config_for(address, **pool)
    return resolve(config, config.job)


def refusal(address: str, **pool: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved(address, **pool)
    return str(caught.value)


@pytest.fixture
def two_gpus(cluster_folder: Path) -> Iterator[str]:
    """A head without CPUs, and two nodes of three CPUs and one GPU each."""
    cluster = Cluster(shutdown_at_exit=False)
    node = {
        "node_ip_address": "127.0.0.1",
        "object_store_memory": 128 * 1024**2,
        "plasma_directory": str(cluster_folder),
        "temp_dir": str(cluster_folder / "ray"),
        "include_dashboard": False,
    }
    try:
        cluster.add_node(num_cpus=0, **node)
        for label in ("a", "b"):
            cluster.add_node(
                num_cpus=3, num_gpus=1, labels={"place": label}, resources={"accelerator_type:T4": 1}, **node
            )
        cluster.wait_for_nodes(900)
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_a_cluster_of_fixed_nodes(two_gpus: str) -> None:
    there = f"the cluster at {two_gpus} has 2 GPUs on 3 nodes, at most 1 on one"
    assert resolved(two_gpus) == Resources({"pool": 1}, ("pool",), there)
    assert resolved(two_gpus, min_size=4, max_size=4).gpus == {"pool": 0.5}
    assert resolved(two_gpus, min_size=2, max_size=2, label_selector={"place": "a"}).gpus == {"pool": 0.5}
    assert resolved(two_gpus, accelerator_type="T4").gpus == {"pool": 1}
    assert not ray.is_initialized()
    assert refusal(two_gpus, num_gpus=2.0) == (
        f"pool.num_gpus: 2 GPUs for each actor, and {there}; leave it out (auto), or lower it"
    )
    assert "at most 2 can run at once" in refusal(two_gpus, num_gpus=1.0, min_size=3, max_size=3)
    assert refusal(two_gpus, accelerator_type="H100").startswith("pool.accelerator_type: H100, and no node of the clu")
    assert "(there: place=a, place=b)" in refusal(two_gpus, label_selector={"place": "c"})
    assert "pool.decode_cpus: one decoding task takes 4 CPUs, and no node of" in refusal(two_gpus, decode_cpus=4.0)
    ray.init(address=two_gpus, log_to_driver=False)
    assert resolved("local").there == there.replace(f"the cluster at {two_gpus}", "this Ray")
    assert refusal("local", num_gpus=2.0).startswith(
        "pool.num_gpus: 2 GPUs for each actor, and this Ray has 2 GPUs on "
    )


def test_tasks_of_a_cluster_see_only_the_gpus_that_they_reserve(two_gpus: str) -> None:
    def visible() -> str | None:
        import os

        return os.environ.get("CUDA_VISIBLE_DEVICES")

    with session(JobSectionConfig(ray_address=two_gpus), log_to_driver=False):
        tasks = [ray.remote(num_cpus=0, num_gpus=number, label_selector={"place": "a"})(visible) for number in (0, 1)]
        assert ray.get([task.remote() for task in tasks]) == ["", "0"]


def test_an_autoscaler_that_has_started_no_node(cluster_folder: Path) -> None:
    resources = {"CPU": 2, "GPU": 1, "object_store_memory": 128 * 1024**2}
    worker = {"resources": resources, "node_config": {}, "min_workers": 0, "max_workers": 3, "labels": {"pool": "gpu"}}
    fleet = PrivateFleet(cluster_folder, worker)
    there = f"the cluster at {fleet.address} has no GPU; its autoscaler can add 3 of type worker (1 GPU)"
    try:
        fleet.start()
        assert resolved(fleet.address) == Resources({"pool": 1}, ("pool",), there)
        assert resolved(fleet.address, num_gpus=1.0, min_size=3, max_size=3, label_selector={"pool": "gpu"}).auto == ()
        assert f", and {there}; leave it out (auto), or lower it" in refusal(fleet.address, num_gpus=2.0)
        assert "at most 3 can run at once" in refusal(fleet.address, num_gpus=1.0, min_size=4, max_size=4)
        assert refusal(fleet.address, label_selector={"pool": "cpu"}).startswith(
            "pool.label_selector: {pool: cpu}, and"
        )
        with gcs.open_gcs(fleet.address, "job.ray_address") as head:
            assert len(head.nodes()) == 1, "a node was started"
        ray.init(address=fleet.address, log_to_driver=False)
        assert str(capacity_of(config_for("local").job, "")) == there.replace(
            f"the cluster at {fleet.address}", "this Ray"
        )
    finally:
        ray.shutdown()
        fleet.shutdown()
