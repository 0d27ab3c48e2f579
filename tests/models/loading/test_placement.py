"""Tests one model over several devices: the plan, and that no operation of a forward mixes tensors of two devices.

The suite needs no machine with two devices. Fake tensors without data have a device and cannot be mixed; values are
compared with all layers on the CPU.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from models.kv.lanes import LaneModel
from models.loading.checkpoints import CheckpointError, CheckpointRef
from models.loading.placement import balance, spread
from models.target import Target
from tests import toys
from tests.models.two_devices import run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")


# --- the plan ------------------------------------------------------------------------------------------------------


def loads(first_bytes: int, layer_bytes: list[int], devices: tuple[int, ...], num_devices: int) -> list[int]:
    held = [first_bytes] + [0] * (num_devices - 1)
    for num_bytes, device in zip(layer_bytes, devices, strict=True):
        held[device] += num_bytes
    return held


def test_the_first_gpu_gets_fewer_layers_because_it_holds_the_embeddings_and_the_drafter() -> None:
    # 80 layers of 1.7 GB, and 7 GB of embeddings, head and vision, with a drafter of 15 GB.
    devices = balance(22_000, [1_700] * 80, 2)
    assert [devices.count(device) for device in range(2)] == [34, 46]
    assert devices == tuple(sorted(devices))
    assert [balance(7_000, [1_700] * 80, 4).count(device) for device in range(4)] == [17, 21, 21, 21]


@example(5, [1], 3)
@example(0, [4, 4, 4, 4], 2)
@given(st.integers(0, 30), st.lists(st.integers(1, 12), min_size=1, max_size=7), st.integers(1, 3))
def test_the_partition_minimises_the_memory_of_the_fullest_device(
    first: int, layers: list[int], num_devices: int
) -> None:
    def cuts(left: int, devices: int) -> Iterator[tuple[int, ...]]:
        if devices == 1:
            yield (left,)
            return
        for own in range(left + 1):
            yield from ((own, *rest) for rest in cuts(left - own, devices - 1))

    others = [
        tuple(device for device, count in enumerate(cut) for _ in range(count))
        for cut in cuts(len(layers), num_devices)
    ]
    largest = max(loads(first, layers, balance(first, layers, num_devices), num_devices))
    assert largest == min(max(loads(first, layers, devices, num_devices)) for devices in others)


def test_layers_go_to_their_devices_and_everything_else_to_the_first() -> None:
    model = copy.deepcopy(toys.llama(seed=1))
    names = [name for name, _ in model.named_parameters()]
    spread(model, model.model, (CPU, torch.device("meta")))
    assert [name for name, _ in model.named_parameters()] == names
    there = {name for name, parameter in model.named_parameters() if parameter.device.type == "meta"}
    assert there == {name for name in names if name.startswith("model.layers.1.")}


# --- a forward -----------------------------------------------------------------------------------------------------


def run_pretended(how: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.models.two_devices", how]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900)


def test_a_forward_over_two_devices_mixes_no_tensors_of_both_and_ends_where_it_began() -> None:
    done = run_pretended("connected")
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_model_placed_on_one_device_gives_the_same_results() -> None:
    with torch.no_grad():
        whole, parted = copy.deepcopy(toys.llama(seed=2)), copy.deepcopy(toys.llama(seed=2))
        spread(parted, parted.model, (CPU, CPU))
        results = [run(LaneModel(model.model, model.lm_head, 3, 1, 64), CPU) for model in (whole, parted)]
    for expected, result in zip(*results, strict=True):
        assert torch.equal(expected, result)


def test_more_gpus_than_there_are_is_refused(tmp_path: Path) -> None:
    toys.save("llama", tmp_path)
    with pytest.raises(CheckpointError, match=r"7 GPUs are configured, and \d are visible$"):
        Target.load(CheckpointRef(str(tmp_path)), num_devices=7)
