"""A real cluster of one node, started by `ray start` as an administrator would, that touches no other Ray.

Every port is a free one of the loopback, HOME and the temporary folder are its own, a token is in its HOME, so that
`ray start` switches tokens on by itself; and only the processes that it started are ended.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT_S = 900
METRICS_TIMEOUT_S = 600
MARK = "DRAFTFLEET_TEST_CLUSTER"
"""In the environment of every process of such a cluster."""


@dataclass(frozen=True)
class LocalCluster:
    """What a client needs to know of it."""

    address: str
    token: str
    metrics_url: str
    folder: Path

    @property
    def home(self) -> Path:
        """Of the cluster's processes; its `.ray/auth_token` holds the token."""
        return self.folder / "home"

    def metrics(self, prefix: str, until: str) -> dict[tuple[str, str], float]:
        """Values of the metrics `ray_<prefix>…`, by name and own label, as soon as there is one named `until`."""
        deadline_s = time.monotonic() + METRICS_TIMEOUT_S
        while True:
            with urllib.request.urlopen(self.metrics_url, timeout=300) as answer:
                text = answer.read().decode()
            metrics = {}
            for name, labels, value in re.findall(rf"^(ray_{prefix}\w+){{(.*)}} (\S+)$", text, re.MULTILINE):
                own = re.search(r'\b(?:status|code|phase|le)="([^"]*)"', labels)
                metrics[name, own[1] if own else ""] = float(value)
            if any(name == until for name, _ in metrics):
                return metrics
            assert time.monotonic() < deadline_s, f"{until} is not among the metrics"
            time.sleep(0.2)

    def log(self) -> str:
        """The last lines of its processes' logs, for the analysis of a failure."""
        logs = self.folder / "ray" / "session_latest" / "logs"
        names = ("raylet.out", "gcs_server.out", "dashboard.log", "dashboard_agent.log")
        tails = {name: (logs / name).read_text(errors="replace")[-2000:] for name in names if (logs / name).exists()}
        return "\n".join(f"--- {name}\n{tail}" for name, tail in tails.items())


@contextmanager
def local_cluster(python: str = sys.executable) -> Iterator[LocalCluster]:
    """A head on the loopback with two logical CPUs, run by `python`, its dashboard up, as long as the block runs."""
    folder = Path(tempfile.mkdtemp(prefix="df-c", dir="/tmp"))  # sockets below it: paths must be short
    dashboard, metrics, client = free_ports(3)
    cluster = LocalCluster(
        f"http://127.0.0.1:{dashboard}", secrets.token_hex(32), f"http://127.0.0.1:{metrics}/metrics", folder
    )
    _write_token(cluster)
    command = [
        *(python, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
        *("--node-ip-address=127.0.0.1", "--port=0", f"--ray-client-server-port={client}"),
        *("--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", f"--metrics-export-port={metrics}"),
        *("--dashboard-agent-listen-port=0", "--num-cpus=2", f"--object-store-memory={256 * 1024**2}"),
        *(f"--temp-dir={folder}/ray", f"--plasma-directory={folder}"),
    ]
    with (folder / "start.log").open("wb") as log:
        # A session of its own, so that what it starts can be ended together, and nothing else with it.
        node = subprocess.Popen(
            command, cwd=folder, env=_environment(cluster, python), stdout=log, stderr=log, start_new_session=True
        )
    try:
        _wait_until_up(cluster, node)
        yield cluster
    finally:
        _end(node, cluster)
        shutil.rmtree(folder, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    """Free ports of the loopback interface."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [opened.getsockname()[1] for opened in sockets]
    finally:
        for opened in sockets:
            opened.close()


def _write_token(cluster: LocalCluster) -> None:
    path = cluster.home / ".ray" / "auth_token"
    path.parent.mkdir(parents=True)
    path.write_text(cluster.token)
    path.chmod(0o600)


def _environment(cluster: LocalCluster, python: str) -> dict[str, str]:
    """Nothing of this machine's own Ray, and no path to this checkout: a job brings its code with it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHONPATH"))}
    return {
        **kept,
        MARK: str(cluster.folder),
        "HOME": str(cluster.home),
        "PATH": os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", "")]),
        "OMP_NUM_THREADS": "1",
        "RAY_TMPDIR": str(cluster.folder),
        "RAY_metrics_report_interval_ms": "500",
        # A machine that runs other tests beside this one is slow, and not broken.
        "RAY_agent_register_timeout_ms": "240000",
        "RAY_worker_register_timeout_seconds": "240",
        "RAY_health_check_failure_threshold": "60",
    }


def _wait_until_up(cluster: LocalCluster, node: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    request = urllib.request.Request(
        f"{cluster.address}/api/jobs/", headers={"Authorization": f"Bearer {cluster.token}"}
    )
    while True:
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                assert answer.status == 200
                return
        except (OSError, urllib.error.URLError):
            if node.poll() is not None or time.monotonic() > deadline_s:
                log = (cluster.folder / "start.log").read_text(errors="replace")
                raise AssertionError(f"the cluster did not come up: {log}") from None
            time.sleep(0.2)


def _end(node: subprocess.Popen[bytes], cluster: LocalCluster) -> None:
    """Kill all processes of the cluster at once.

    Drivers of submitted jobs have sessions of their own, so the environment identifies the cluster of a process.
    """
    mark = f"{MARK}={cluster.folder}".encode()
    for _ in range(2):  # the second time whatever was just being started
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)
            except OSError:
                continue  # it has ended, or is another user's
        node.kill()
        node.wait()
