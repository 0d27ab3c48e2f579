"""The node types of autoscalers: of a report in the GCS, of a file on the head, of a RayCluster of KubeRay."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.core.generated import autoscaler_pb2

from pipeline.resources import autoscaler
from pipeline.resources.autoscaler import CLUSTER_CONFIG, NAMESPACE, STATUS, V2_ENABLED, node_types
from pipeline.resources.capacity import UNLIMITED, Node
from tests.pipeline.resources.nodes import node

ROOT = Path(__file__).resolve().parents[3]
HEAD = node(0, cpus=0)


class Store(dict[tuple[str, str], bytes]):
    """A key-value store of a GCS."""

    def read(self, key: str, namespace: str) -> bytes | None:
        return self.get((key, namespace))


def summary(nodes: list[Node] | None) -> list[tuple[str, int, int, float]]:
    assert nodes is not None
    return [(node_type.kind, node_type.count, node_type.gpus, node_type.cpus) for node_type in nodes]


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_CLUSTER_NAME", raising=False)


def test_a_report_in_the_gcs_is_read() -> None:
    groups = [
        autoscaler_pb2.NodeGroupConfig(name="gpu", resources={"CPU": 8, "GPU": 2}, max_count=3),
        autoscaler_pb2.NodeGroupConfig(name="cpu", resources={"CPU": 16}, max_count=-1),
    ]
    report = autoscaler_pb2.ClusterConfig(node_group_configs=groups).SerializeToString()
    store = Store({(CLUSTER_CONFIG, NAMESPACE): report})
    nodes = node_types(store.read, "head:6379", [HEAD, node(2, kind="gpu")])
    assert summary(nodes) == [("gpu", 2, 2, 8), ("cpu", UNLIMITED, 0, 16)]
    assert nodes is not None
    assert {node_type.labels for node_type in nodes} == {None}  # a report has no labels


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[Any]:
    """Start a process with the command line of Ray's monitor."""
    running: list[subprocess.Popen[bytes]] = []

    def start(config: str, address: str) -> None:
        path = tmp_path / "monitor.py"
        path.write_text("import sys; print(flush=True); sys.stdin.read()")
        (tmp_path / "config.yaml").write_text(config)
        options = [f"--gcs-address={address}", f"--autoscaling-config={tmp_path}/config.yaml"]
        command = [sys.executable, str(path), *options]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        running.append(process)
        assert process.stdout is not None
        process.stdout.readline()

    yield start
    for process in running:
        process.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_the_file_of_an_autoscaler_on_this_machine_is_read(monitor: Any) -> None:
    monitor((ROOT / "deploy/cluster.yaml").read_text(), "10.0.0.1:54321")
    assert summary(node_types(Store().read, "127.0.0.1:54321", [HEAD])) == [("cpu", 16, 0, 16), ("gpu", 8, 1, 8)]
    assert node_types(Store().read, "127.0.0.1:54322", [HEAD]) == []  # another cluster's


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
@pytest.mark.parametrize(("version", "labels"), [(b"0", None), (b"1", {"pool": "gpu"})])
def test_labels_of_node_types_are_known_if_the_autoscaler_reads_them(
    version: bytes, labels: dict[str, str] | None, monitor: Any
) -> None:
    monitor("available_node_types: {gpu: {resources: {GPU: 1}, labels: {pool: gpu}, max_workers: 1}}", "h:54324")
    nodes = node_types(Store({(V2_ENABLED, NAMESPACE): version}).read, "h:54324", [HEAD])
    assert nodes is not None
    assert [node_type.labels for node_type in nodes] == [labels]


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
@pytest.mark.parametrize(
    "config",
    [
        "{",
        "- 1",
        "available_node_types: 3",
        "available_node_types: {gpu: {resources: {GPU: some}}}",
        "max_workers: 2\navailable_node_types: {gpu: {node_config: {}}}",
    ],
)
def test_a_file_without_resources_leaves_node_types_unknown(config: str, monitor: Any) -> None:
    monitor(config, "10.0.0.1:54323")
    store = Store({(V2_ENABLED, NAMESPACE): b"1"})
    assert node_types(store.read, "10.0.0.1:54323", [node(0, kind="head")]) is None


def test_the_number_of_workers_bounds_the_types_together() -> None:
    types = {"a": {"resources": {"GPU": 1}, "max_workers": 4}, "b": {"resources": {"GPU": 2}}}
    config = {"max_workers": 5, "head_node_type": "head", "available_node_types": {**types, "head": {"max_workers": 9}}}
    nodes = autoscaler.types_of(config)
    assert nodes is not None
    assert summary(autoscaler.addable(nodes, [HEAD, node(1, kind="a", count=3)], 5)) == [
        ("a", 1, 1, 0),
        ("b", 2, 2, 0),
    ]


def test_the_manifest_of_a_job_on_kubernetes_has_its_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server is replaced, and nothing else: KubeRay's own reading of the resource is Ray's."""
    manifest = yaml.safe_load((ROOT / "deploy/rayjob.yaml").read_text())
    resource = {"metadata": {"name": "job-x", "namespace": "fleet"}, "spec": manifest["spec"]["rayClusterSpec"]}
    for name, text in (("namespace", "fleet\n"), ("token", "t"), ("ca.crt", "c")):
        (tmp_path / name).write_text(text)
    asked: list[tuple[str, float]] = []

    class Reply:
        def raise_for_status(self) -> None: ...

        def json(self) -> Any:
            return resource

    def get(url: str, timeout: float, **_: Any) -> Reply:
        asked.append((url, timeout))
        return Reply()

    import requests
    from ray.autoscaler._private.kuberay import node_provider

    monkeypatch.setenv("RAY_CLUSTER_NAME", "job-x")
    monkeypatch.setattr(autoscaler, "_SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setattr(node_provider, "IN_CLUSTER_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(requests, "get", get)
    nodes = node_types(Store().read, "10.0.0.1:6379", [HEAD, node(0, cpus=8, kind="cpu")])
    assert summary(nodes) == [("cpu", 15, 0, 8), ("gpu", 8, 1, 6)]
    ((url, timeout),) = asked
    assert url.endswith("/apis/ray.io/v1/namespaces/fleet/rayclusters/job-x")
    assert timeout == autoscaler.KUBERNETES_S
    resource["spec"]["enableInTreeAutoscaling"] = False
    assert node_types(Store().read, "10.0.0.1:6379", [HEAD]) == []

    def forbidden(*_: Any, **__: Any) -> Reply:
        raise requests.HTTPError("403")

    monkeypatch.setattr(requests, "get", forbidden)
    store = Store({(V2_ENABLED, NAMESPACE): b"1"})
    assert node_types(store.read, "10.0.0.1:6379", [node(0, kind="headgroup")]) is None


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        ({}, "", []),
        ({}, "headgroup", []),  # KubeRay without an autoscaler
        ({(V2_ENABLED, NAMESPACE): b"0"}, "", []),
        ({(V2_ENABLED, NAMESPACE): b"1"}, "", []),
        ({(V2_ENABLED, NAMESPACE): b"1"}, "headgroup", None),
        ({(STATUS, ""): json.dumps({"autoscaler_report": {"active_nodes": {"node_0af": 1}}}).encode()}, "", []),
        ({(STATUS, ""): json.dumps({"autoscaler_report": {"active_nodes": {"ray.head": 1}}}).encode()}, "", None),
        ({(STATUS, ""): b"{"}, "", []),
    ],
)
def test_an_autoscaler_elsewhere_is_noticed(
    values: dict[tuple[str, str], bytes], kind: str, expected: list[Node] | None
) -> None:
    assert node_types(Store(values).read, "10.0.0.1:6379", [node(0, kind=kind)]) == expected
