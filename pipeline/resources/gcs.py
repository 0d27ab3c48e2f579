"""Queries a running Ray cluster by its address, within seconds, without connecting to it as a driver.

Ray's own client waits for minutes for a cluster that does not answer, and may end the process.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from configs.load import ConfigError
from pipeline.resources.capacity import Node
from pipeline.storage import access

ANSWER_S = 5.0
"""Longest time for all answers of a cluster."""
NODE_GROUP = "ray.io/node-group"
"""Label with the name of a node's type."""
TOKEN_ADVICE = "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to the token of the cluster (`ray get-auth-token`)"


@dataclass(frozen=True)
class Gcs:
    """An open connection to the GCS (the head process) of a cluster."""

    address: str
    _channel: Any
    _until_s: float

    @property
    def left_s(self) -> float:
        return max(0.1, self._until_s - time.monotonic())

    def nodes(self) -> list[Node]:
        """Return the nodes that are alive."""
        return [node_of(state.total_resources, state.labels, state.ray_node_type_name) for state in self._node_states()]

    def _node_states(self) -> list[Any]:
        from ray.core.generated import autoscaler_pb2, autoscaler_pb2_grpc

        stub = autoscaler_pb2_grpc.AutoscalerStateServiceStub(self._channel)
        reply = stub.GetClusterStatus(autoscaler_pb2.GetClusterStatusRequest(), timeout=self.left_s)
        states = reply.cluster_resource_state.node_states
        return [state for state in states if state.status != autoscaler_pb2.NodeStatus.DEAD]

    def value(self, key: str, namespace: str = "") -> bytes | None:
        """Return a value of the internal key-value store; None if there is none."""
        from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

        request = gcs_service_pb2.InternalKVGetRequest(namespace=namespace.encode(), key=key.encode())
        reply = gcs_service_pb2_grpc.InternalKVGcsServiceStub(self._channel).InternalKVGet(request, timeout=self.left_s)
        return reply.value or None


def node_of(resources: Mapping[str, float], labels: Mapping[str, str], kind: str = "") -> Node:
    return Node(dict(resources), dict(labels), kind=kind or labels.get(NODE_GROUP, ""))


def value_of_connected(key: str, namespace: str = "") -> bytes | None:
    """Return a value as `Gcs.value`, of the cluster that this process is connected to."""
    from ray.experimental.internal_kv import _internal_kv_get

    value: bytes | None = _internal_kv_get(key, namespace=namespace.encode())
    return value


@contextlib.contextmanager
def open_gcs(ray_address: str, dotted: str) -> Iterator[Gcs]:
    """Yield a connection to a cluster; `ray_address` is `auto` or an address, and `dotted` its path in the job file.

    Raises:
        ConfigError: there is no cluster, it does not answer within `ANSWER_S`, it rejects the token, or this machine is
            none of its nodes, so that Ray could not connect a driver.
    """
    import grpc
    from ray._private.gcs_utils import create_gcs_channel

    address = _resolved(ray_address, dotted)
    channel = None
    try:
        channel = create_gcs_channel(address)
        gcs = Gcs(address, channel, time.monotonic() + ANSWER_S)
        _refuse_foreign(gcs, dotted)
        yield gcs
    except grpc.RpcError as error:
        label = ray_address if ray_address == address else f"{ray_address} ({address})"
        raise ConfigError(f"{dotted}: {label} cannot be reached: {_reason(error)}") from None
    finally:
        if channel is not None:
            channel.close()


def check(ray_address: str, dotted: str) -> None:
    """Raise ConfigError if a driver on this machine cannot connect to a cluster; see `open_gcs`."""
    with open_gcs(ray_address, dotted):
        return


def _resolved(ray_address: str, dotted: str) -> str:
    """Return the address as Ray resolves it: `auto` is that of the submitted job, or of a Ray on this machine."""
    from ray._private import services

    if ray_address.startswith("ray://"):
        raise ConfigError(
            f"{dotted}: {ray_address} is an address of Ray Client, which a job cannot use; submit the job with "
            "jobs.submit, or give the address of the head (HOST:6379) on a node of the cluster"
        )
    try:
        address: str | None = services.canonicalize_bootstrap_address(ray_address)
    except (ValueError, ConnectionError, OSError) as error:
        raise ConfigError(f"{dotted}: {ray_address} cannot be reached: {access.reason_of(error)}") from None
    if address is None:  # RAY_ADDRESS is `local`
        raise ConfigError(f"{dotted}: {ray_address} cannot be reached: RAY_ADDRESS is that of no cluster")
    return address


def _refuse_foreign(gcs: Gcs, dotted: str) -> None:
    """Raise ConfigError if no node of the cluster runs on this machine; Ray would look for one for a minute."""
    from ray._private import services

    node_ids = services.find_node_ids()
    if not any(state.node_id.hex() in node_ids for state in gcs._node_states()):
        raise ConfigError(
            f"{dotted}: {gcs.address} answers, but this machine is not a node of that cluster, and a driver has to be "
            "on one: submit the job with jobs.submit"
        )


def _reason(error: Any) -> str:
    import grpc

    code = error.code()
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer within {ANSWER_S:g} s"
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return f"it rejects the token; {TOKEN_ADVICE}"
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return "it is not the address of a Ray head"
    return access.cut(" ".join(str(error.details()).split()), access.MAX_REASON_CHARS)
