"""ViSpec and MSD heads of toy targets, and slow versions of them that read one pair after the other."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from models.heads.eagle import EagleNetwork, EagleShape, FeatureStack
from models.heads.vision import MsdNetwork, VispecNetwork

NUM_QUERIES = 3


def msd(network: EagleNetwork) -> MsdNetwork:
    """An MSD head with the weights of an EAGLE head."""
    made = MsdNetwork(replace(network.shape, layers=copy.deepcopy(network.shape.layers)))
    made.load_state_dict(network.state_dict())
    return made.requires_grad_(False)


def qwen_msd(network: EagleNetwork) -> MsdNetwork:
    """The same with the norm and the biases of a Qwen layer."""
    shape = replace(network.shape, layers=copy.deepcopy(network.shape.layers), qkv_bias=True, input_norm=True)
    made = MsdNetwork(shape)
    made.load_state_dict(made.state_dict() | network.state_dict())
    return made.requires_grad_(False)


def resized(**sizes: int) -> VispecNetwork:
    """A random ViSpec head with other sizes than the toy targets."""
    data = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    return VispecNetwork(EagleShape.of(data | sizes, "a toy"), NUM_QUERIES)


def vispec(network: EagleNetwork) -> VispecNetwork:
    """A ViSpec head with the weights of an EAGLE head, and a random adaptor, which changes drafts a little."""
    made = VispecNetwork(replace(network.shape, layers=copy.deepcopy(network.shape.layers)), NUM_QUERIES)
    generator = torch.Generator().manual_seed(8)
    own = {
        name: torch.randn(value.shape, generator=generator) * 0.2
        for name, value in made.state_dict().items()
        if name.startswith("imadpt.")
    }
    width = network.hidden_size
    own["imadpt.q"] *= 10
    mixed = 0.1 * torch.randn(width, width, generator=generator)
    own |= {"img_fc.weight": torch.cat([torch.eye(width), mixed], dim=1), "img_fc.bias": torch.zeros(width)}
    made.load_state_dict(network.state_dict() | own)
    return made.requires_grad_(False)


@dataclass
class Inputs:
    """Inputs (C, D) of a head's layers, their rotary positions (C,) or (3, C), and the state (D,) of the last image."""

    rows: Tensor
    positions: Tensor
    state: Tensor

    def then(self, network: FeatureStack, embed: Tensor, feature: Tensor) -> Inputs:
        """Append a drafted token with its embedding (D,) and the output (D,) before it, at the next position."""
        row = fuse(network, embed, feature, self.state)
        positions = torch.cat([self.positions, self.positions[..., -1:] + 1], dim=-1)
        return Inputs(torch.cat([self.rows, row[None]]), positions, self.state)


def fuse(network: FeatureStack, embed: Tensor, feature: Tensor, state: Tensor) -> Tensor:
    """The input of the layers for one pair (D,) of text."""
    if not isinstance(network, VispecNetwork):
        return network.fuse(embed, feature)
    img_fc, fc = network.img_fc, network.fc
    mixed = F.linear(torch.cat([feature, state]), img_fc.weight, img_fc.bias)
    return F.linear(torch.cat([embed, mixed]), fc.weight, fc.bias)


def inputs_of(network: FeatureStack, embeds: Tensor, states: Tensor, visual: list[bool], positions: Tensor) -> Inputs:
    """The inputs of a head for pairs of `embeds` and `states` (L, D), some of which are `visual`."""
    rows: list[Tensor] = []
    indices: list[int] = []
    state = torch.zeros(network.hidden_size)
    image: list[Tensor] = []
    for index, is_visual in enumerate(visual):
        if is_visual and isinstance(network, VispecNetwork):
            image.append(embeds[index])
            if index + 1 == len(visual) or not visual[index + 1]:
                outputs = compressed(network, torch.stack(image))
                count = min(len(image), NUM_QUERIES - 1)
                rows += outputs[:count]
                indices += range(index + 1 - count, index + 1)
                state, image = outputs[-1], []
            continue
        direct = is_visual and isinstance(network, MsdNetwork)
        rows.append(embeds[index] if direct else fuse(network, embeds[index], states[index], state))
        indices.append(index)
    return Inputs(torch.stack(rows), positions[..., indices], state)


def compressed(network: VispecNetwork, image: Tensor) -> Tensor:
    """The adaptor's outputs (Q, D) for the embeddings (n, D) of an image, one query and one head at a time."""
    adaptor = network.imadpt
    keys = F.linear(image, adaptor.k_proj.weight, adaptor.k_proj.bias).chunk(adaptor.num_heads, dim=-1)
    values = F.linear(image, adaptor.v_proj.weight, adaptor.v_proj.bias).chunk(adaptor.num_heads, dim=-1)
    outputs = []
    for query in adaptor.q:
        mixed = []
        for head, (key, value) in enumerate(zip(keys, values, strict=True)):
            weights = (key @ query[head] / len(query[head]) ** 0.5).softmax(dim=0)
            mixed.append(weights @ value)
        outputs.append(F.linear(torch.cat(mixed), adaptor.o_proj.weight))
    return torch.stack(outputs)
