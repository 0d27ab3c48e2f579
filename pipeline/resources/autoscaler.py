"""Reads the node types that the autoscaler of a running cluster can add. No call of Ray returns them in general:

- the GCS has a cluster configuration, if the autoscaler reports one;
- the autoscaler of `ray up` and `ray start --autoscaling-config` runs on the head and reads a file there;
- the autoscaler of KubeRay reads the RayCluster resource, which the head's service account may read too.

A driver elsewhere, with an autoscaler that reports nothing, cannot read them.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from pipeline.resources.capacity import UNLIMITED, Node

Read = Callable[[str, str], bytes | None]
"""Reads a value of the GCS's key-value store by its key and namespace."""

NAMESPACE = "__autoscaler"
CLUSTER_CONFIG, V2_ENABLED = "__autoscaler_cluster_config", "__autoscaler_v2_enabled"
STATUS = "__autoscaling_status"
"""Key of the status of the first version of the autoscaler, as JSON."""
MAX_CONFIG_BYTES = 4 * 1024**2
KUBERNETES_S = 3.0
"""Timeout of the request for the RayCluster resource."""
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_READONLY_TYPE = re.compile(r"node_[0-9a-f]+")
"""Node types that Ray makes up for a cluster without an autoscaler."""


def node_types(read: Read, gcs_address: str, nodes: Sequence[Node]) -> list[Node] | None:
    """Return the nodes that can still be added to a cluster with these nodes; an empty list without an autoscaler, None
    if there is one whose node types cannot be read here."""
    if (reported := read(CLUSTER_CONFIG, NAMESPACE)) is not None:
        return addable(_of_report(reported), nodes)
    config = _config_of_head(gcs_address)
    if config is None:
        config = _config_of_kuberay()
    if config is None:
        return None if _has_autoscaler(read, nodes) else []
    try:
        types = types_of(config)
        if types is None:
            return None
        if not _is_second_version(read):  # the first one ignores labels, which nodes may get when they start
            types = [replace(node, labels=None) for node in types]
        return addable(types, nodes, config.get("max_workers"))
    except (AttributeError, TypeError, ValueError):  # not a configuration as Ray reads it
        return None


def addable(types: Iterable[Node], nodes: Sequence[Node], limit: int | None = None) -> list[Node]:
    """Return the types with the number of nodes that are still missing, at most `limit` in all."""
    names = {node.kind for node in types}
    running = {name: sum(node.count for node in nodes if node.kind == name) for name in names}
    remaining = UNLIMITED if limit is None else max(0, limit - sum(running.values()))
    counted = [
        Node(node.resources, node.labels, min(remaining, node.count - running[node.kind]), node.kind, exists=False)
        for node in types
    ]
    return [node for node in counted if node.count > 0]


def _of_report(report: bytes) -> list[Node]:
    from ray.core.generated import autoscaler_pb2

    groups = autoscaler_pb2.ClusterConfig.FromString(report).node_group_configs
    return [
        Node(dict(group.resources), None, UNLIMITED if group.max_count < 0 else group.max_count, group.name)
        for group in groups
    ]


def types_of(config: Mapping[str, Any]) -> list[Node] | None:
    """Return the worker types of a configuration of Ray's cluster launcher; None if one has unknown resources."""
    types = config.get("available_node_types") or {}
    nodes = []
    for name, node_type in types.items():
        most = 0 if name == config.get("head_node_type") else node_type.get("max_workers", config.get("max_workers", 0))
        if most and not node_type.get("resources"):
            return None
        resources = {key: float(value) for key, value in (node_type.get("resources") or {}).items()}
        nodes.append(Node(resources, node_type.get("labels") or {}, most, name))
    return nodes


def _config_of_head(gcs_address: str) -> dict[str, Any] | None:
    """Return the configuration of an autoscaler that runs on this machine for the cluster; None if there is none."""
    port = gcs_address.rpartition(":")[2]
    for arguments in _processes():
        options = dict(option.split("=", 1) for option in arguments if option.startswith("--") and "=" in option)
        address, path = options.get("--gcs-address", ""), options.get("--autoscaling-config", "")
        if path and address.rpartition(":")[2] == port and any(option.endswith("monitor.py") for option in arguments):
            return _read_config(Path(path).expanduser())
    return None


def _processes() -> Iterable[list[str]]:
    """Yield the command lines of the processes of this machine; Linux only."""
    if sys.platform != "linux":
        return
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            yield (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it has ended, or is another user's


def _read_config(path: Path) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            config = yaml.safe_load(file.read(MAX_CONFIG_BYTES))
    except (OSError, yaml.YAMLError):
        return None
    return config if isinstance(config, dict) else None


def _config_of_kuberay() -> dict[str, Any] | None:
    """Return the configuration that KubeRay's autoscaler derives from the RayCluster of this pod; None outside of a
    pod of KubeRay, without an autoscaler, and without the permission to read it."""
    name, namespace = os.environ.get("RAY_CLUSTER_NAME"), _SERVICE_ACCOUNT / "namespace"
    if not name or not namespace.exists():
        return None
    import requests
    from ray.autoscaler._private.kuberay import node_provider

    try:
        url = node_provider.url_from_resource(namespace.read_text().strip(), f"rayclusters/{name}")
        headers, verify, cert = node_provider.load_k8s_secrets()
        reply = requests.get(url, headers=headers, verify=verify, cert=cert, timeout=KUBERNETES_S)
        reply.raise_for_status()
        return derived(reply.json())
    except (requests.RequestException, OSError, ValueError, KeyError, TypeError):
        return None


def derived(ray_cluster: dict[str, Any]) -> dict[str, Any] | None:
    """Return the configuration that KubeRay's autoscaler derives from a RayCluster; None if it has no autoscaler."""
    from ray.autoscaler._private.kuberay import autoscaling_config

    if not ray_cluster["spec"].get("enableInTreeAutoscaling"):
        return None
    config: dict[str, Any] = autoscaling_config._derive_autoscaling_config_from_ray_cr(ray_cluster)
    return config


def _is_second_version(read: Read) -> bool:
    return read(V2_ENABLED, NAMESPACE) == b"1"


def _has_autoscaler(read: Read, nodes: Sequence[Node]) -> bool:
    """Return whether an autoscaler can add nodes: those that it has started carry the name of their type."""
    if _is_second_version(read):
        return any(node.kind for node in nodes)
    status = read(STATUS, "")
    try:
        active = json.loads(status or b"{}").get("autoscaler_report", {}).get("active_nodes", {})
    except ValueError:
        return False
    return any(not _READONLY_TYPE.fullmatch(name) for name in active)
