"""Requests that a Ray can never give are refused with the path, the value, what there is and what to do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from configs.load import ConfigError
from pipeline.resources.capacity import Capacity, Node
from pipeline.resources.gpu_shares import share_gpus
from pipeline.resources.refusals import refuse_cpus, refuse_gpus, refuse_unknown_nodes
from pipeline.resources.requests import READ_CPUS, Actors, Tasks
from tests.pipeline.resources.nodes import cluster, decoders, engines, machine, node, workers

READING = Tasks("reading", READ_CPUS)


def refuse(capacity: Capacity, pools: Sequence[Actors], *tasks: Tasks) -> str:
    """The refusal; empty if there is none."""
    try:
        refuse_unknown_nodes(pools, tasks, capacity)
        shares = share_gpus(pools, capacity)
        refuse_gpus(pools, shares, capacity)
        refuse_cpus(pools, tasks, shares, capacity, "job.num_cpus" if capacity.is_private else "job.ray_address")
    except ConfigError as error:
        return str(error)
    return ""


LOCAL = [
    (
        machine(0),
        [engines(1.0)],
        "pool.num_gpus: 1 GPU for each actor, and this machine has no GPU; leave it out (auto) to run on the CPU, or "
        "run where there are GPUs",
    ),
    (
        machine(1),
        [engines(2.0)],
        "pool.num_gpus: 2 GPUs for each actor, and this machine has 1 GPU; leave it out (auto), or lower it",
    ),
    (
        machine(1),
        [engines(1.0, count=2)],
        "pool.num_gpus: 1 GPU for each of 2 actors (pool.min_size), and this machine has 1 GPU; at most 1 can run at "
        "once; lower pool.min_size or pool.num_gpus",
    ),
    (
        machine(1),
        [engines(0.6, count=3, counted_by="initial_size")],
        "pool.num_gpus: 0.6 GPU for each of 3 actors (pool.initial_size), and this machine has 1 GPU; at most 1 can "
        "run at once; lower pool.initial_size or pool.num_gpus",
    ),
    (
        machine(1),
        [engines(1.0), decoders(0.1)],
        "vq.num_gpus: the job starts 1 actor of 1 (pool.num_gpus) and 1 actor of 0.1 (vq.num_gpus) at the same time, "
        "and this machine has 1 GPU; leave both out (auto), or lower them",
    ),
    (
        machine(2),
        [engines(0.7, count=2), decoders(0.4)],  # 1.8 GPUs, and no GPU has 0.4 left
        "vq.num_gpus: the job starts 2 actors of 0.7 (pool.num_gpus) and 1 actor of 0.4 (vq.num_gpus) at the same "
        "time, and this machine has 2 GPUs; leave both out (auto), or lower them",
    ),
    (
        machine(1),
        [workers(2)],
        "workers.num_gpus: 1 GPU (auto) for each of 2 actors (workers.count), and this machine has 1 GPU; at most 1 "
        "can run at once; lower workers.count, or set workers.num_gpus to 0",
    ),
    (
        machine(0),
        [engines(devices={"model.target.device": "auto", "model.drafter.device": "cuda:1"})],
        "model.drafter.device: 'cuda:1', and pool.num_gpus (auto) is 0, because this machine has no GPU; set it to "
        "auto or cpu",
    ),
    (
        machine(1),
        [engines(0.0, devices={"model.target.device": "cuda"})],
        "model.target.device: 'cuda', and pool.num_gpus is 0; set it to auto or cpu",
    ),
    (
        Capacity("this machine", (Node({"CPU": 8, "GPU": 1, "accelerator_type:A100": 1}, {}),), is_private=True),
        [engines(1.0, accelerator_type="H100")],
        "pool.accelerator_type: H100, and no Ray on this machine has it (there: A100); leave it out, or run where "
        "there is one",
    ),
    (
        machine(1),
        [engines(labels={"pool": "gpu", "zone": "!in(a, b)"})],
        "pool.label_selector: {pool: gpu, zone: !in(a, b)}, and no Ray on this machine has these labels (there: "
        "none); leave it out, or start nodes with them",
    ),
]


@pytest.mark.parametrize(("capacity", "pools", "message"), LOCAL)
def test_pools_that_exceed_this_machine_are_refused(capacity: Capacity, pools: list[Actors], message: str) -> None:
    assert refuse(capacity, pools) == message


TASKS = [
    (
        machine(0, cpus=2),
        [engines()],
        Tasks("decoding", 4.0, "pool.decode_cpus"),
        "pool.decode_cpus: one decoding task takes 4 CPUs, and a Ray on this machine has 2; lower it, or set "
        "job.num_cpus to 4 or more",
    ),
    (
        machine(1, cpus=4),
        [engines()],
        Tasks("encoding", 4.0, "image.encode_cpus"),
        "image.encode_cpus: one encoding task takes 4 CPUs, and a Ray on this machine has 4, of which the job's actors "
        "reserve 1; lower it, or set job.num_cpus to 5 or more",
    ),
    (
        machine(1, cpus=2),
        [engines(), decoders()],
        READING,
        "job.num_cpus: one reading task takes 1 CPU, and a Ray on this machine has 2, of which the job's actors "
        "reserve 2; set job.num_cpus to 3 or more",
    ),
    (
        machine(0, cpus=2),
        [engines()],
        Tasks("decoding", 0.9, "pool.decode_cpus", {"pool": "cpu"}, "pool.decode_label_selector"),
        "pool.decode_label_selector: {pool: cpu}, and no Ray on this machine has these labels (there: none); leave it "
        "out, or start nodes with them",
    ),
    (
        machine(1, cpus=1),
        [engines(0.5, count=2)],
        READING,
        "job.num_cpus: one reading task takes 1 CPU, and a Ray on this machine has 1, of which the job's actors "
        "reserve 2; set job.num_cpus to 3 or more",
    ),
    (
        cluster(node(0, cpus=0), node(1, cpus=4, count=3, pool="gpu")),
        [engines()],
        Tasks("decoding", 8.0, "pool.decode_cpus"),
        "pool.decode_cpus: one decoding task takes 8 CPUs, and no node of the cluster at head:6379 has them (at most "
        "4); lower it, or start nodes with more CPUs",
    ),
    (
        cluster(node(1, cpus=1)),
        [engines()],
        READING,
        "job.ray_address: one reading task takes 1 CPU, and the cluster at head:6379 has 1, of which the job's actors "
        "reserve 1; start nodes with more CPUs",
    ),
    (
        cluster(node(0, cpus=2)),
        [workers(4)],
        Tasks("reading", 0.0),
        "job.ray_address: its actors need CPUs, and the cluster at head:6379 has 2, of which the job's actors reserve "
        "4; start nodes with more CPUs",
    ),
]


@pytest.mark.parametrize(("capacity", "pools", "task", "message"), TASKS)
def test_tasks_that_fit_on_no_node_are_refused(
    capacity: Capacity, pools: list[Actors], task: Tasks, message: str
) -> None:
    assert refuse(capacity, pools, task) == message


GPU_TYPE = node(1, cpus=8, count=3, exists=False, kind="gpu")


def test_pools_that_exceed_a_cluster_are_refused() -> None:
    small = cluster(node(0, cpus=0), node(1, count=2))
    assert refuse(small, [engines(2.0)], READING) == (
        "pool.num_gpus: 2 GPUs for each actor, and the cluster at head:6379 has 2 GPUs on 3 nodes, at most 1 on "
        "one; leave it out (auto), or lower it"
    )
    grown = cluster(node(0, cpus=0), node(0), GPU_TYPE)
    assert refuse(grown, [engines(2.0)], READING) == (
        "pool.num_gpus: 2 GPUs for each actor, and the cluster at head:6379 has no GPU; its autoscaler can add 3 of "
        "type gpu (1 GPU); leave it out (auto), or lower it"
    )
    assert refuse(grown, [engines(1.0, count=4)], READING).endswith(
        "at most 3 can run at once; lower pool.min_size or pool.num_gpus"
    )
    assert refuse(cluster(node(2, cpus=0), node(0)), [engines(1.0)], READING) == (
        "pool.num_gpus: 1 GPU for each actor, and the cluster at head:6379 has 2 GPUs on 2 nodes, at most 2 on one, "
        "but not the CPU beside it that each of these actors reserves; start nodes with more CPUs, or set "
        "pool.num_gpus to 0"
    )


def test_requests_that_nodes_can_meet_are_accepted() -> None:
    for capacity, pools in (
        (machine(0, cpus=1), [engines()]),
        (machine(1, cpus=2), [engines(1.0, most=4)]),
        (machine(1, cpus=3), [engines(), decoders()]),
        (machine(1, cpus=3), [engines(0.5), decoders(0.5)]),
        (cluster(node(0, cpus=0), GPU_TYPE), [engines(1.0, count=3)]),
        (cluster(node(4, cpus=16)), [engines(2.0, count=2)]),
        (cluster(node(1, place="a"), node(1, place="b")), [engines(1.0, count=2, labels={"place": "in(a, b)"})]),
    ):
        assert refuse(capacity, pools, READING) == ""


def test_unknown_node_types_exclude_nothing() -> None:
    unknown = cluster(node(0, cpus=1), is_open=True)
    pools = [engines(4.0, count=8, labels={"pool": "gpu"}, accelerator_type="H100")]
    assert refuse(unknown, pools, Tasks("decoding", 16.0, "pool.decode_cpus")) == ""


def test_a_node_type_without_known_labels_may_have_any() -> None:
    unlabelled = Node({"CPU": 8, "GPU": 1}, None, 2, "gpu", exists=False)
    assert refuse(cluster(node(0), unlabelled), [engines(1.0, labels={"pool": "gpu"})], READING) == ""
    named = Node({"CPU": 8, "GPU": 1}, {"pool": "gpu"}, 2, "gpu", exists=False)
    assert refuse(cluster(node(0), named), [engines(1.0, labels={"ray.io/node-group": "gpu"})], READING) == ""
    assert "label_selector" in refuse(cluster(node(0), named), [engines(1.0, labels={"pool": "cpu"})], READING)


@pytest.mark.parametrize(
    ("condition", "labels", "expected"),
    [
        ("a", {"zone": "a"}, True),
        ("a", {"zone": "b"}, False),
        ("a", {}, False),
        ("!a", {"zone": "b"}, True),
        ("!a", {}, True),
        ("!a", {"zone": "a"}, False),
        ("in(a, b)", {"zone": "b"}, True),
        ("in(a,b)", {"zone": "c"}, False),
        ("!in(a, b)", {"zone": "c"}, True),
        ("!in(a, b)", {}, True),
        ("!in(a, b)", {"zone": "a"}, False),
    ],
)
def test_labels_match_as_in_ray(condition: str, labels: dict[str, str], expected: bool) -> None:
    assert Node({}, labels).has_labels({"zone": condition}) is expected
