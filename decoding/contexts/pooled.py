"""Encodes the whole prompt with visual features averaged over 2×2 blocks (context P of TABED).

For LLaVA-1.5, features are averaged before the projector, as in the paper. For models whose rotary positions contain
the image grid (Qwen) and for videos of LLaVA-OneVision, features are averaged after the projector.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.contracts import Context, PrefillOutput
from decoding.types import Request
from models.inputs.prefix import Prefix
from models.inputs.processing import PromptError
from models.target import Target

SIDE_FACTOR = 2


class Pooled(Context):
    """The prompt with a quarter of the visual tokens, each the mean of four. Supports drafters whose prompts contain
    the grid of their features: LLaVA-1.5, the Qwen vision families, and LLaVA-OneVision for videos."""

    def encodes_whole(self, model: Target) -> bool:
        return _architecture(model) != "llava"

    def build(self, request: Request, prefill_output: PrefillOutput, model: Target) -> Prefix:
        parts = request.prompt, request.images, request.videos, request.inputs
        if _architecture(model) == "llava" and request.num_images:
            return self._before_projector(model.process(*parts), model)
        prefix = model.encode(*parts)
        if not (request.num_images or request.num_frames):
            return prefix
        if prefix.positions.dim() == 2:
            return merge_columns(prefix, blocks_by_position(prefix))
        if _architecture(model) == "llava_onevision" and not request.num_images:
            return merge_columns(prefix, blocks_by_frame(prefix, list(request.num_frames)))
        raise PromptError(
            "the context 'pooled' needs a drafter of the LLaVA-1.5 architecture or one with rotary positions in three "
            "axes; of LLaVA-OneVision it pools videos only"
        )

    def _before_projector(self, inputs: dict[str, Tensor], model: Target) -> Prefix:
        inner: Any = getattr(model.model, "model", model.model)
        inputs["input_ids"] = self._shorten(inputs["input_ids"][0], model)[None]
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        projector = inner.multi_modal_projector
        handle = projector.register_forward_pre_hook(lambda _module, args: (pool(args[0]), *args[1:]))
        try:
            return model.prefix(inputs)
        finally:
            handle.remove()

    @staticmethod
    def _shorten(ids: Tensor, model: Target) -> Tensor:
        """Keep every fourth visual placeholder; the model uses only their number."""
        visual = torch.isin(ids, torch.tensor(sorted(model.visual_ids), device=ids.device))
        keep = ~visual | (visual.cumsum(0) % SIDE_FACTOR**2 == 0)
        return ids[keep]


def _architecture(model: Target) -> str:
    return str(model.model.config.model_type)  # type: ignore[union-attr]


def pool(features: Tensor) -> Tensor:
    """Average features (images, n, D) of a square grid over 2×2 blocks; return (images, n / 4, D)."""
    num_images, n, width = features.shape
    side = math.isqrt(n)
    if side * side != n or side % SIDE_FACTOR:
        raise PromptError(f"{n} image features make no square grid with an even side, so they cannot be pooled 2×2")
    grid = features.transpose(1, 2).reshape(num_images, width, side, side)
    return F.avg_pool2d(grid, SIDE_FACTOR).flatten(2).transpose(1, 2)


def blocks_by_position(prefix: Prefix) -> Tensor:
    """Return the 2×2 block index (n,) of each visual token, from the positions (3, L) of time, height and width.

    Blocks at an odd edge are smaller. Each image and each frame is a separate grid.
    """
    columns = prefix.visual.nonzero()[:, 0]
    run = (columns.diff(prepend=columns[:1]) != 1).cumsum(0)  # adjacent visual tokens form one run
    time, height, width = prefix.positions[:, columns]
    first = columns.new_full((int(run.max()) + 1,), int(prefix.positions.max()) + 1)
    top = first.scatter_reduce(0, run, height, "amin")[run]
    left = first.scatter_reduce(0, run, width, "amin")[run]
    block = torch.stack([run, time, (height - top) // SIDE_FACTOR, (width - left) // SIDE_FACTOR], dim=1)
    numbers: Tensor = torch.unique(block, dim=0, return_inverse=True)[1]
    return numbers


def blocks_by_frame(prefix: Prefix, num_frames: list[int]) -> Tensor:
    """Return the 2×2 block index (n,) of each visual token of videos with square frames and one extra last token."""
    num_visual = int(prefix.visual.sum())
    num_features, left_over = divmod(num_visual - len(num_frames), sum(num_frames))
    side = math.isqrt(num_features)
    if left_over or side * side != num_features:
        raise PromptError(f"{num_visual} visual columns are no square frames, so they cannot be pooled 2×2")
    half = -(-side // SIDE_FACTOR)
    index = torch.arange(side) // SIDE_FACTOR
    frame = (index[:, None] * half + index).flatten()
    blocks: list[Tensor] = []
    start = 0
    for count in num_frames:
        for _ in range(count):
            blocks.append(frame + start)
            start += half * half
        blocks.append(torch.tensor([start]))
        start += 1
    return torch.cat(blocks).to(prefix.visual.device)


def merge_columns(prefix: Prefix, block: Tensor) -> Prefix:
    """Replace the visual tokens of each `block` (n,) by their mean, at the position of the block's first token."""
    columns = prefix.visual.nonzero()[:, 0]
    num_blocks = int(block.max()) + 1
    first = columns.new_full((num_blocks,), prefix.length).scatter_reduce(0, block, columns, "amin")
    size = block.bincount(minlength=num_blocks).float()

    def mean(features: Tensor) -> Tensor:
        summed = torch.zeros(num_blocks, features.shape[1], device=features.device)
        return (summed.index_add(0, block, features.float()) / size[:, None]).to(features.dtype)

    embeds = prefix.embeds.clone()
    embeds[first] = mean(prefix.embeds[columns])
    keep = ~prefix.visual
    keep[first] = True
    order = first.argsort()
    deepstack = tuple(mean(features)[order] for features in prefix.deepstack)
    return replace(prefix, embeds=embeds, deepstack=deepstack).select(keep)
