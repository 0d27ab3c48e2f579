"""The GPUs of this machine are counted as a local Ray counts them, without starting one."""

from __future__ import annotations

import pytest
import torch
from ray._private.accelerators import nvidia_gpu

from configs.load import ConfigError
from pipeline.resources.machine import num_listed, this_machine


@pytest.fixture(autouse=True)
def _four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = nvidia_gpu.NvidiaGPUAcceleratorManager
    monkeypatch.delenv("RAY_OVERRIDE_RESOURCES", raising=False)
    monkeypatch.setattr(manager, "get_current_node_num_accelerators", staticmethod(lambda: 4))
    monkeypatch.setattr(manager, "get_current_node_accelerator_type", staticmethod(lambda: "H100"))


@pytest.mark.parametrize(
    ("visible", "number"),
    [(None, 4), ("", 0), ("0,1", 2), ("3", 1), ("-1", 0), ("0,-1,1", 1), ("NoDevFiles", 0), ("GPU-a,GPU-b", 2)],
)
def test_only_visible_gpus_count(visible: str | None, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nodes = this_machine(8)
    assert (nodes.num_gpus, nodes.nodes[0].cpus) == (number, 8)
    assert nodes.has_cuda
    assert str(nodes) == f"this machine has {f'{number} GPU' if number else 'no GPU'}{'s' if number > 1 else ''}"
    assert not torch.cuda.is_initialized()


def test_the_type_of_gpus_is_that_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nodes = this_machine(2)
    assert nodes.accelerators == ["H100"]
    assert nodes.nodes[0].labels == {"ray.io/accelerator-type": "H100"}


def test_resources_that_the_environment_gives_to_ray_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"GPU": 2, "CPU": 5}')
    assert this_machine(8).nodes[0].resources["GPU"] == 2
    assert this_machine(8).nodes[0].cpus == 5
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match=r"^job\.ray_address: a local Ray cannot start: .*2 GPU"):
        this_machine(8)


def test_a_list_of_devices_ends_at_the_first_that_is_none() -> None:
    assert [num_listed(ids) for ids in ("", " 0 , 1 ", "0,,1", "0,1,-1,2")] == [0, 2, 1, 2]
