"""Clusters that do not answer are refused in one sentence, within a bound."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc
import pytest
from ray._private import services

from configs.load import ConfigError
from configs.pool import JobSectionConfig
from pipeline.cluster import ray_session
from pipeline.resources import gcs


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(services, "get_node_ip_address", lambda address=None: "127.0.0.1")
    monkeypatch.setattr(services, "find_gcs_addresses", frozenset)
    monkeypatch.setattr(services, "find_bootstrap_address", lambda folder: None)


def refusal(address: str, dotted: str = "job.ray_address") -> str:
    with pytest.raises(ConfigError) as caught:
        gcs.check(address, dotted)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@contextmanager
def silent() -> Iterator[str]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def closed_port() -> str:
    with silent() as address:
        return address


def test_a_closed_port_is_refused() -> None:
    address = closed_port()
    assert refusal(address).startswith(f"job.ray_address: {address} cannot be reached: ")
    assert "refused" in refusal(address)
    assert refusal(address, "workers.ray_address").startswith("workers.ray_address: ")


def test_a_port_that_never_answers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs, "ANSWER_S", 0.5)
    with silent() as address:
        assert refusal(address) == f"job.ray_address: {address} cannot be reached: no answer within 0.5 s"


def test_the_bound_leaves_time_for_a_refusal_within_ten_seconds() -> None:
    from pipeline.resources import autoscaler

    assert gcs.ANSWER_S + autoscaler.KUBERNETES_S < 10


def test_an_unknown_host_is_refused() -> None:
    assert refusal("no-such-host.invalid:6379").startswith(
        "job.ray_address: no-such-host.invalid:6379 cannot be reached: "
    )


def test_a_server_of_another_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs, "ANSWER_S", 3.0)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    server.RequestHandlerClass.log_message = lambda *_: None  # type: ignore[method-assign,assignment]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert "cannot be reached: " in refusal(f"127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, "it rejects the token; set RAY_AUTH_MODE=token"),
        (grpc.StatusCode.UNIMPLEMENTED, "it is not the address of a Ray head"),
    ],
)
def test_a_server_that_rejects_the_request_is_refused(code: grpc.StatusCode, message: str) -> None:
    class Refuse(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return grpc.unary_unary_rpc_method_handler(lambda request, context: context.abort(code, "no"))

    server = grpc.server(futures.ThreadPoolExecutor(1), handlers=(Refuse(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert f"127.0.0.1:{port} cannot be reached: {message}" in refusal(f"127.0.0.1:{port}")
    finally:
        server.stop(0).wait()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("auto", "auto cannot be reached: Could not find any running Ray instance"),
        ("head", "head cannot be reached: Invalid address format"),
        ("ray://head:10001", "ray://head:10001 is an address of Ray Client, which a job cannot use"),
    ],
)
def test_an_address_without_a_cluster_is_refused(address: str, message: str) -> None:
    assert refusal(address).startswith(f"job.ray_address: {message}")


def test_auto_is_the_cluster_that_a_submitted_job_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    address = closed_port()
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert refusal("auto").startswith(f"job.ray_address: auto ({address}) cannot be reached: ")


def test_ray_does_not_connect_to_a_cluster_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray was started"))
    with (
        pytest.raises(ConfigError, match=r"^workers\.ray_address: .* cannot be reached: "),
        ray_session.session(JobSectionConfig(ray_address=closed_port()), dotted="workers.ray_address"),
    ):
        pass
