"""The whole prompt with image features averaged 2×2 before the projector (context P of TABED)."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.contracts import Probe
from decoding.types import Request
from models.front_end import PromptError
from models.prefix import Prefix
from models.target import Target

SIDE_FACTOR = 2


class Pooled:
    """A quarter of the visual columns, each the mean of four. For drafters of the LLaVA-1.5 kind: a square grid of
    features and a module named `multi_modal_projector`."""

    needs_attention = False

    def build(self, request: Request, probe: Probe, model: Target) -> Prefix:
        inputs = model.front_end.encode(request.prompt, request.images, request.videos)
        if not (request.images or request.videos):
            return model.prefix(inputs)
        inner: Any = getattr(model.model, "model", model.model)
        projector = getattr(inner, "multi_modal_projector", None)
        if projector is None or model.model.config.model_type != "llava":  # type: ignore[union-attr]
            raise PromptError("the context 'pooled' needs a drafter of the LLaVA-1.5 architecture")
        inputs["input_ids"] = self._shorten(inputs["input_ids"][0], model)[None]
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        handle = projector.register_forward_pre_hook(lambda _module, args: (pool(args[0]), *args[1:]))
        try:
            return model.prefix(inputs)
        finally:
            handle.remove()

    @staticmethod
    def _shorten(ids: Tensor, model: Target) -> Tensor:
        """Keep every fourth placeholder: their number is all that the model looks at."""
        visual = torch.zeros_like(ids, dtype=torch.bool)
        for token in model.visual_ids:
            visual |= ids == token
        keep = ~visual | (visual.cumsum(0) % SIDE_FACTOR**2 == 0)
        return ids[keep]


def pool(features: Tensor) -> Tensor:
    """Features (images, n, D) of a square grid → (images, n / 4, D), the mean of each 2×2 block.

    Raises:
        PromptError: n is no square of an even number.
    """
    num_images, n, width = features.shape
    side = math.isqrt(n)
    if side * side != n or side % SIDE_FACTOR:
        raise PromptError(f"{n} image features make no square grid with an even side, so they cannot be pooled 2×2")
    grid = features.transpose(1, 2).reshape(num_images, width, side, side)
    return F.avg_pool2d(grid, SIDE_FACTOR).flatten(2).transpose(1, 2)
