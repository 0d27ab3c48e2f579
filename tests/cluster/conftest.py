"""Prepares the environment of a private cluster; fails if another Ray is running."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray._private import services

from tests.cluster.other_ray import rays_running, refusal

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cluster_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a short path for a cluster's own files, and an environment that refers to nothing else."""
    if result := refusal(rays_running()):
        pytest.exit(result, returncode=2)
    folder = Path(tempfile.mkdtemp(prefix="df-k", dir="/tmp"))  # sockets below it
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "HOME": str(folder),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        # Set explicitly: a token in the user's home would enable tokens for the nodes but not for this process.
        "RAY_AUTH_MODE": "disabled",
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
        # A process that was killed refuses connections at once; one on a busy machine is slow, and not dead.
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_failure_threshold": "10",
        "RAY_agent_register_timeout_ms": "240000",
        "RAY_worker_register_timeout_seconds": "240",
    }.items():
        monkeypatch.setenv(name, value)
    # Ray takes a loopback address for this machine's outer one, where these nodes do not listen.
    monkeypatch.setattr(services, "get_node_ip_address", lambda address=None: "127.0.0.1")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
