"""A process with two fake devices: tensors have a device, cannot be mixed, and hold no data.

`python -m tests.models.two_devices` runs a model with layers on the second device; a separate process,
because torch cannot unregister a device. Exits with an error when one operation gets tensors of both devices.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import LlamaForCausalLM

from models.backends.attention import AttentionStep
from models.backends.cache import RaggedCache
from models.inputs.prefix import Prefix
from models.kv.lanes import LaneModel, SlotBatch
from models.loading.placement import connect
from tests import toys

real_tensor = torch.tensor


class SameDevice(TorchFunctionMode):
    """Refuses indices from another device, as real devices do, and tensors without numbers do not."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            for index in indices:
                if isinstance(index, torch.Tensor) and index.device != args[0].device:
                    raise AssertionError(f"an index on {index.device} into a tensor on {args[0].device}")
        return function(*args, **(kwargs or {}))


def placed_tensor(data: Any, *, device: torch.device | None = None, **options: Any) -> torch.Tensor:
    """`torch.tensor`, which makes numbers that no pretended device can hold."""
    made = real_tensor(data, **options)
    return made if device is None else torch.empty(made.shape, dtype=made.dtype, device=device)


def run(lanes: LaneModel, device: torch.device, probe: bool = False) -> list[torch.Tensor]:
    """Prompts of two lengths, a tree, a commit with a gather, another tree, and a slot filled again."""

    def prefix(length: int) -> Prefix:
        embeds = torch.linspace(-1, 1, length * 32, device=device).reshape(length, 32)
        ids = torch.arange(length, device=device)
        return Prefix(ids, embeds, ids, ids == 1)

    def slots(*ids: int) -> SlotBatch:
        return SlotBatch(torch.tensor(ids, device=device), ids, (1,) * len(ids))

    both = slots(0, 2)
    filled = lanes.admit(both, [[prefix(5)], [prefix(5 if probe else 3)]], probe)
    tokens = torch.tensor([[3, 4, 5], [6, 7, 8]], device=device)
    depth = torch.tensor([[0, 1, 1]] * 2, device=device)
    visible = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]] * 2, dtype=torch.bool, device=device)
    drafted = lanes.forward(both, tokens, depth, visible)
    lanes.commit(both, torch.tensor([[0, 2], [0, 1]], device=device), torch.tensor([2, 1], device=device))
    some = lanes.forward(both, tokens, depth, visible, 0, lanes.of_layers([1]))
    after = lanes.forward(both, tokens, depth, visible)
    again = lanes.admit(slots(0), [[prefix(4)]])
    results = [filled.last, drafted, some, lanes.logits(after), again.hidden]
    return [*results, *filled.received]


def model_on(first: torch.device, second: torch.device, connected: bool) -> LaneModel:
    """A model with its second and third layer on the second device."""
    config = copy.deepcopy(toys.text_config())
    config.num_hidden_layers = 3
    model = LlamaForCausalLM(config).eval()
    others = set(model.model.layers[1:].modules())
    for module in model.modules():
        device = second if module in others else first
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty_like(buffer, device=device))
    if connected:
        connect(model.model.layers, [first, second, second], first)
    return LaneModel(model.model, model.lm_head, num_slots=3, num_lanes=1, capacity=64)


def main(connected: bool) -> None:
    """Run forwards, and look where everything is."""
    _setup_privateuseone_for_python_backend("pretended")
    torch.tensor = placed_tensor  # type: ignore[assignment]
    first, second = torch.device("pretended:0"), torch.device("pretended:1")
    with FakeTensorMode(), SameDevice(), torch.no_grad():
        for probe in (False, True):
            lanes = model_on(first, second, connected)
            assert {result.device for result in run(lanes, first, probe)} == {first}
            for memories in (lanes.cache.keys, lanes.cache.values):
                assert [memory.device for memory in memories if memory is not None] == [first, second, second]
            assert lanes.cache.lens.device == first
        rows = torch.arange(2, device=first)
        cache = RaggedCache(2, 8, 4, first)
        step = AttentionStep(cache, rows, rows[:, None], rows[:, None, None, None] == 0, 8, 2)
        other = step.on(second)
        assert step.on(first) is step
        assert step.on(second) is other, "a step is moved once for all layers of a device"
        assert {part.device for part in (other.rows, other.columns, other.mask) if part is not None} == {second}
        assert other.cache is cache


if __name__ == "__main__":
    main(sys.argv[1] == "connected")
