"""Computes by how much a target prefers one next token over another, to separate rounding from other differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decoding.noise import Noise, Stream, key_of
from decoding.sampling import RowSampling, perturb, warp
from decoding.types import Request
from models.contract import TargetModel
from models.heads.training.teacher import make_training_sample
from models.kv.lanes import SlotBatch

ROUNDING = {torch.float32: 2.0**-16, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5}
"""Tie tolerance relative to the larger score, by dtype of the target: rounding errors of a decoder, not of one number.
"""


@dataclass(frozen=True)
class Margin:
    """`value` is the score of one token minus that of the other; infinite if sampling filters remove one of them.
    `tolerance` is the largest absolute margin that rounding of the target's dtype explains."""

    value: float
    tolerance: float


@torch.inference_mode()
def margin(target: TargetModel, request: Request, tokens: Sequence[int], one: int, other: int) -> Margin:
    """Compute the margin between two next tokens after the prompt of `request` and its first output `tokens`.

    Scores are what the target takes the maximum of: logits after penalties, temperature and filters, plus the noise of
    the sample at this position if it samples. One prefill, without a KV cache of earlier steps. Raises PromptError.
    """
    assert target.num_lanes == 1, "a text target"
    sampling, device = request.sampling, target.device
    [prompt] = target.encode_lanes(request.prompt, request.images, None, request.videos, request.inputs)
    prefix = make_training_sample(target, prompt, tokens).prefix if tokens else prompt
    slots = SlotBatch(torch.zeros(1, dtype=torch.long, device=device), (0,), (0,))
    lanes = target.lanes(1, 1, prefix.length)
    logits = lanes.logits(lanes.admit(slots, [[prefix]], keep_hidden=False).last)
    seen = torch.zeros(1, target.vocab_size, dtype=torch.bool, device=device)
    seen[0, prefix.token_ids] = True
    is_sampled = sampling.temperature > 0
    rows = RowSampling(
        temperature=torch.tensor([sampling.temperature], device=device),
        top_k=torch.tensor([sampling.top_k], device=device),
        top_p=torch.tensor([sampling.top_p], device=device),
        penalty=torch.tensor([sampling.repetition_penalty], device=device),
        seen=seen,
        any_sampled=is_sampled,
        max_top_k=sampling.top_k if is_sampled else 0,
        any_top_p=is_sampled and sampling.top_p < 1.0,
    )
    draws = None
    if is_sampled:
        key = torch.tensor([key_of(request.seed, request.sample_id, request.replica)], device=device)
        noise = Noise(key, torch.tensor([len(tokens)], device=device))
        draws = noise.gumbel(Stream.TOKEN, torch.zeros(1, dtype=torch.long, device=device), target.vocab_size)
    scores = perturb(warp(logits, rows, None), draws, rows)[0, 0]
    first, second = float(scores[one]), float(scores[other])
    largest = max((abs(score) for score in (first, second) if abs(score) != float("inf")), default=0.0)
    return Margin(first - second, ROUNDING[target.dtype] * max(1.0, largest))
