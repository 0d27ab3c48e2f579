"""Starts an autoscaling cluster: Ray's autoscaler with its fake node provider, whose nodes are local raylets.

Independent of jobs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID, FakeMultiNodeProvider
from ray.cluster_utils import AutoscalingCluster

from tests.jobs.cluster import free_ports

MARK = "DRAFTFLEET_TEST_FLEET"
"""In the environment of every process of such a cluster."""
START_TIMEOUT_S = 900
IDLE_S = 6.0
MAX_NODES = 3


class PrivateFleet(AutoscalingCluster):  # type: ignore[misc]
    """Ray's own test cluster, without what touches others: its `start` and `shutdown` end every Ray of the machine, and
    its nodes meet at one fixed port.

    With the second version of the autoscaler, as KubeRay runs it: the first one knows nodes by their addresses, which
    are all the same here, and never learns that one came up.
    """

    def __init__(self, folder: Path, worker: dict[str, Any]) -> None:
        self.folder, self.port = folder, free_ports(1)[0]
        super().__init__({"CPU": 0}, {"worker": worker}, autoscaler_v2=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _generate_config(
        self, head_resources: dict[str, Any], worker_node_types: dict[str, Any], **_: Any
    ) -> dict[str, Any]:
        """All of it, and the provider by its class: for the name `fake_multinode` Ray reads an example that its wheels
        lack."""
        head = {"resources": head_resources, "node_config": {}, "max_workers": 0}
        provider = FakeMultiNodeProvider
        return {
            "cluster_name": "fleet",
            "max_workers": MAX_NODES,
            "upscaling_speed": 1.0,
            "idle_timeout_minutes": IDLE_S / 60,
            "provider": {
                "type": "external",
                "module": f"{provider.__module__}.{provider.__name__}",
                "gcs_address": self.address,
                "head_node_id": FAKE_HEAD_NODE_ID,
                "launch_multiple": True,
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
            },
            "available_node_types": {**worker_node_types, "ray.head.default": head},
            "head_node_type": "ray.head.default",
            "auth": {"ssh_user": "nobody"},
            "docker": {},
            "initialization_commands": [],
            "setup_commands": [],
            "head_setup_commands": [],
            "worker_setup_commands": [],
            "head_start_ray_commands": [],
            "worker_start_ray_commands": [],
            "file_mounts": {},
            "cluster_synced_files": [],
            "file_mounts_sync_continuously": False,
            "rsync_exclude": [],
            "rsync_filter": [],
        }

    def start(self, *_: Any, **__: Any) -> None:
        """Start the head; workers come when they are needed."""
        config = self.folder / "fleet.json"
        config.write_text(json.dumps(self._config))
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--disable-usage-stats"),
            *(f"--autoscaling-config={config}", "--node-ip-address=127.0.0.1", f"--port={self.port}", "--num-cpus=0"),
            *("--include-dashboard=false", f"--object-store-memory={128 * 1024**2}", f"--temp-dir={self.folder}/ray"),
            f"--plasma-directory={self.folder}",
        ]
        own = {
            MARK: str(self.folder),
            "RAY_FAKE_CLUSTER": "1",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_enable_autoscaler_v2": "1",
            "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
        }
        subprocess.run(command, env={**os.environ, **own}, check=True, timeout=START_TIMEOUT_S, capture_output=True)

    def shutdown(self) -> None:
        """End all processes of it, and no others."""
        mark = f"{MARK}={self.folder}".encode()
        for _ in range(2):  # the second time whatever was just being started
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    if mark in (process / "environ").read_bytes().split(b"\0"):
                        os.kill(int(process.name), signal.SIGKILL)
                except OSError:
                    continue  # it has ended, or is another user's
            time.sleep(0.2)


class Watcher(threading.Thread):
    """Writes down how many worker nodes and actors there are, whenever that changes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.began_s = time.monotonic()
        self.ended = threading.Event()
        self.line: list[dict[str, float]] = []

    def run(self) -> None:
        while not self.ended.wait(0.25):
            self.look()

    def look(self) -> dict[str, float]:
        nodes = sum(bool(node["Alive"]) and node["Resources"].get("CPU", 0) > 0 for node in ray.nodes())
        counted = (nodes, num_generating())
        if not self.line or counted != (self.line[-1]["num_nodes"], self.line[-1]["num_actors"]):
            now_s = round(time.monotonic() - self.began_s, 1)
            self.line.append({"at_s": now_s, "num_nodes": nodes, "num_actors": counted[1]})
        return self.line[-1]


def num_generating() -> int:
    """Actors of the job that are up."""
    states = ray._private.state.actors().values()
    return sum(state["State"] == "ALIVE" and "MapWorker" in state["ActorClassName"] for state in states)
