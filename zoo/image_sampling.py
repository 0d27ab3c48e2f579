"""Plain sampling of the zoo's GPTs in batches, for measurements of the recipe.

Uses a cache of transformers and draws the same distribution as the engine.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from models.llamagen.gpt import Gpt
from models.llamagen.vq import Vq
from zoo.image_gpt import Codes, attention_mask, condition_columns
from zoo.image_vq import images_of


@torch.no_grad()
def sample_codes(
    gpt: Gpt,
    batch: Codes,
    seed: int,
    guidance_scale: float = 1.0,
    temperature: float = 1.0,
    top_k: int = 0,
    mass: list[Tensor] | None = None,
) -> Tensor:
    """Draw codes [n, grid²] for the conditions of a batch; temperature 0 takes the likeliest.

    `mass` gets, per code, the n probabilities of the ten likeliest codes before temperature, after guidance, [n, 10].
    """
    generator = torch.Generator().manual_seed(seed)
    guided = guidance_scale > 1
    # The null lane comes second.
    lanes = [condition_columns(gpt, batch, torch.full((len(batch.codes),), lane)) for lane in (False, True)]
    inputs, mask = (torch.cat(parts) for parts in zip(*lanes[: 2 if guided else 1]))
    num_tokens = gpt.shape.num_image_tokens
    whole = attention_mask(mask, num_tokens)
    cache = DynamicCache(config=gpt.config)
    drawn: list[Tensor] = []
    start = 0
    for _ in range(num_tokens):
        end = start + inputs.shape[1]
        positions = torch.arange(start, end).expand(len(inputs), -1)
        hidden = gpt(inputs, positions, whole[:, :, start:end, :end], use_cache=True, past_key_values=cache)
        logits = gpt.output(hidden.last_hidden_state[:, -1]).float()
        if guided:
            conditional, unconditional = logits.chunk(2)
            logits = unconditional + guidance_scale * (conditional - unconditional)
        if mass is not None:
            mass.append(logits.softmax(-1).topk(10).values)
        drawn.append(_draw(logits, temperature, top_k, generator))
        inputs = gpt.embed_tokens(drawn[-1])[:, None].repeat(2 if guided else 1, 1, 1)
        start = end
    return torch.stack(drawn, dim=1)


def _draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def draw_images(vq: Vq, codes: Tensor, grid: int, batch_size: int = 50) -> list[np.ndarray]:
    """Decode codes [n, grid²] to uint8 images."""
    images: list[np.ndarray] = []
    for part in codes.reshape(-1, grid, grid).split(batch_size):
        images += images_of(vq.decode(part))
    return images
