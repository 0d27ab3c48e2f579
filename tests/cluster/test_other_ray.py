"""Tests that cluster tests refuse to start beside another Ray, and only then."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.other_ray import rays_running, refusal


def test_only_the_core_processes_of_a_ray_are_seen(tmp_path: Path) -> None:
    started = {
        "11": b"/x/ray/core/src/ray/raylet/raylet\0--raylet_socket_name=/tmp/a\0",
        "12": b"/x/ray/core/src/ray/gcs/gcs_server\0--log_dir=/tmp/a\0",
        "13": b"grep\0/raylet/raylet\0",
        "14": b"",
    }
    for name, result in started.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cmdline").write_bytes(result)
    (tmp_path / "15").mkdir()  # ended while one looked
    assert set(rays_running(tmp_path)) == {11, 12}


def test_a_refusal_names_the_processes_and_what_to_do() -> None:
    assert refusal([]) == ""
    result = refusal([12, 11])
    assert "11, 12" in result
    assert "ray stop" in result
