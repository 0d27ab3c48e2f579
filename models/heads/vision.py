"""Define the networks of EAGLE heads for targets that read images: ViSpec and MSD.

ViSpec has an adaptor that compresses the tokens of an image to a few. Learned queries attend to the embeddings of an
image. All outputs but the last replace the image in the network's sequence, at the last positions of the image. The
last output is the state of the image, which every later pair reads through `img_fc`. Kang et al. 2025 (arXiv
2509.15235), section 3, and the public code at github.com/KangJialiang/ViSpec.

The prompt of MSD has image embeddings themselves as inputs, without fusion and features; see the public code at
github.com/Lyn-Lucy/MSD. All other pairs are those of EAGLE-1/2. Rotary positions count the pairs, also for targets with
three rotary axes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.heads.eagle import EagleNetwork, EagleShape
from models.inputs.prefix import Prefix, visual_runs

VisionKind = Literal["vispec", "msd"]
FAMILIES = {"llava": "llava", "llava_next": "llava", "qwen2_vl": "qwen2_vl", "qwen2_5_vl": "qwen2_5_vl"}
"""Family of each target's `model_type` for which there are heads. Public configurations do not distinguish the versions
of LLaVA."""


@dataclass(frozen=True)
class VisionShape(EagleShape):
    """Shape of a head which was trained for targets of a `model_type`; `num_queries` are those of ViSpec's adaptor."""

    model_type: str = ""
    num_queries: int = 0

    def is_for(self, model_type: str) -> bool:
        """Return whether the head was trained for targets of the family of `model_type`."""
        return FAMILIES[self.model_type] == FAMILIES.get(model_type)


class ImageAdaptor(nn.Module):
    """Attention of Q learned queries to the embeddings of an image, which have neither order nor positions."""

    def __init__(self, hidden_size: int, num_heads: int, num_queries: int, bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Parameter(torch.zeros(num_queries, num_heads, hidden_size // num_heads))
        width = num_heads * (hidden_size // num_heads)
        self.k_proj = nn.Linear(hidden_size, width, bias=bias)
        self.v_proj = nn.Linear(hidden_size, width, bias=bias)
        self.o_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, embeds: Tensor) -> Tensor:
        """Compress embeddings (n, D) to (Q, D)."""
        keys, values = (
            project(embeds).unflatten(-1, (self.num_heads, -1)).transpose(0, 1)
            for project in (self.k_proj, self.v_proj)
        )
        # A batch axis, because not all kernels of this operation accept three axes.
        mixed = F.scaled_dot_product_attention(self.q.transpose(0, 1)[None], keys[None], values[None])[0]
        out: Tensor = self.o_proj(mixed.transpose(0, 1).flatten(1))
        return out


class VispecNetwork(EagleNetwork):
    """An EAGLE network with an image adaptor of `num_queries` queries; the summary of a prompt is its last image."""

    def __init__(self, shape: EagleShape, num_queries: int) -> None:
        super().__init__(shape)
        self.summary_size = self.hidden_size
        self.imadpt = ImageAdaptor(self.hidden_size, shape.layers.num_attention_heads, num_queries, bias=shape.qkv_bias)
        self.img_fc = nn.Linear(2 * self.hidden_size, self.hidden_size, bias=shape.bias)

    def fuse(self, embeds: Tensor, features: Tensor, summary: Tensor | None = None) -> Tensor:
        """See `FeatureStack.fuse`; `summary` (…, D) is the state of the last image."""
        features = features.to(self.img_fc.weight.dtype)
        summary = torch.zeros_like(features) if summary is None else summary.to(features.dtype)
        return super().fuse(embeds, self.img_fc(torch.cat([features, summary], dim=-1)))

    def pair(self, prompt: Prefix, features: Tensor) -> tuple[Prefix, Tensor]:
        """See `FeatureStack.pair`; an image of n tokens becomes min(n, Q − 1) rows, at its last positions.

        Adjacent visual tokens are one image. Reads the places of visual tokens on the host.
        """
        embeds = prompt.embeds.to(self.fc.weight.dtype)
        kept_rows: list[int] = []  # rows of the prompt
        image_of: list[int] = []  # images before each kept row
        adapted: list[int] = []  # kept rows that are outputs of the adaptor
        rows, states = [embeds[:0]], [embeds.new_zeros(self.hidden_size)]
        start = 0
        for first, end in (*visual_runs(prompt.visual), (prompt.length, prompt.length)):
            num_rows = min(end - first, self.imadpt.q.shape[0] - 1)
            kept_rows += [*range(start, first), *range(end - num_rows, end)]
            image_of += [len(states) - 1] * (len(kept_rows) - len(image_of))
            adapted += range(len(kept_rows) - num_rows, len(kept_rows))
            if first < end:
                outputs = self.imadpt(embeds[first:end])
                rows.append(outputs[:num_rows])
                states.append(outputs[-1])
            start = end
        index = torch.tensor([kept_rows, image_of], device=embeds.device)
        short = prompt.select(index[0])
        inputs = self.fuse(short.embeds, features[index[0]], torch.stack(states)[index[1]])
        inputs = inputs.index_copy(0, torch.tensor(adapted, dtype=torch.long, device=embeds.device), torch.cat(rows))
        return replace(short, embeds=inputs, visual=torch.zeros_like(short.visual)), states[-1]


class MsdNetwork(EagleNetwork):
    """An EAGLE network for targets that read images."""

    def pair(self, prompt: Prefix, features: Tensor) -> tuple[Prefix, Tensor]:
        """See `FeatureStack.pair`; pairs of visual tokens are their embeddings."""
        pairs, summary = super().pair(prompt, features)
        inputs = torch.where(prompt.visual[:, None], prompt.embeds.to(pairs.embeds.dtype), pairs.embeds)
        return replace(pairs, embeds=inputs), summary
