"""Encodes the whole prompt with the drafter's own model, or removes most of its visual tokens.

Uniform pruning keeps evenly spaced tokens (the baseline of LVSpec). Guided pruning has SpecVLM's two stages: first it
keeps the smallest set of visual tokens that receives a given share of the target's attention from text to visual
tokens, then evenly spaced tokens of the rest. Kept tokens keep their rotary positions, unless `compact` renumbers them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from decoding.contracts import Context, PrefillOutput
from decoding.types import Request
from models.contract import TargetModel
from models.inputs.prefix import Prefix
from models.inputs.processing import PromptError
from models.target import Target


class Full(Context):
    """The whole prompt, images and videos included."""

    lane = 0

    def encodes_whole(self, model: TargetModel) -> bool:
        return True

    def build(self, request: Request, prefill_output: PrefillOutput, model: TargetModel) -> Prefix:
        return model.encode_lanes(request.prompt, request.images, request.condition, request.videos, request.inputs)[
            self.lane
        ]


class Unconditional(Full):
    """The unconditional lane, for drafters of targets with classifier-free guidance."""

    lane = 1


class Pruned(Context):
    """The prompt with the share `1 − ratio` of its visual tokens, at least one."""

    def __init__(
        self,
        ratio: float,
        guidance: Literal["uniform", "attention"] = "uniform",
        attention_share: float = 0.4,
        positions: Literal["original", "compact"] = "original",
    ) -> None:
        self.ratio = ratio
        self.guidance = guidance
        self.attention_share = attention_share
        self.positions = positions
        self.needs_attention = guidance == "attention"

    def encodes_whole(self, model: TargetModel) -> bool:
        return True

    def build(self, request: Request, prefill_output: PrefillOutput, model: Target) -> Prefix:
        prefix = model.encode(request.prompt, request.images, request.videos, request.inputs)
        num_visual = int(prefix.visual.sum())
        num_kept = max(1, int(num_visual * (1.0 - self.ratio) + 1e-6))
        if num_visual == 0:
            return prefix
        if self.guidance == "uniform":
            indices = evenly_spaced(torch.arange(num_visual, device=model.device), num_kept)
        else:
            assert prefill_output.attention is not None, "guided pruning needs the prefill's attention"
            scores = prefill_output.attention[prefill_output.prefix.visual].to(model.device)
            if scores.shape[0] != num_visual:
                raise PromptError(
                    f"guided pruning needs as many visual columns in the drafter ({num_visual}) as in the target "
                    f"({scores.shape[0]}); use guidance: uniform for this pair"
                )
            indices = guided(scores, num_kept, self.attention_share)
        return prune(prefix, indices, self.positions == "compact")


def evenly_spaced(columns: Tensor, num_kept: int) -> Tensor:
    """Return `num_kept` entries of `columns` (n,) at equal distances, including the first and the last."""
    last = columns.shape[0] - 1
    return columns[torch.linspace(0, last, num_kept, dtype=torch.float64, device=columns.device).long()]


def guided(scores: Tensor, num_kept: int, share: float) -> Tensor:
    """Return the sorted indices (num_kept,) of the visual tokens to keep, by SpecVLM's stages over `scores` (n,).

    Stage I keeps the smallest set of tokens with `share` of the attention, stage II evenly spaced tokens of the rest.
    """
    order = scores.argsort(descending=True, stable=True)
    mass = scores[order].cumsum(0) / scores.sum().clamp_min(1e-12)
    num_first = min(int((mass < share).sum()) + 1, num_kept)
    first = order[:num_first]
    rest = torch.ones_like(scores, dtype=torch.bool)
    rest[first] = False
    others = torch.arange(scores.shape[0], device=scores.device)[rest]
    second = evenly_spaced(others, num_kept - num_first) if num_kept > num_first else others[:0]
    return torch.cat([first, second]).sort().values


def prune(prefix: Prefix, indices: Tensor, compact: bool) -> Prefix:
    """Remove all visual tokens except those with the sorted `indices` among the visual tokens; keep all text."""
    visual_columns = prefix.visual.nonzero()[:, 0]
    keep = ~prefix.visual
    keep[visual_columns[indices]] = True
    pruned = prefix.select(keep)
    positions = torch.arange(pruned.length, device=keep.device) if compact else pruned.positions
    return replace(pruned, positions=positions, deepstack=tuple(features[indices] for features in prefix.deepstack))
