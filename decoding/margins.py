"""Computes by how much a target prefers one next token over another, to separate rounding from other differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decoding.contracts import StepNoise
from decoding.noise import Stream
from decoding.sampling import perturb, process_logits
from decoding.scheduling.slots import RequestState, SlotTable
from decoding.types import Request
from models.contract import TargetModel
from models.heads.training.teacher import make_training_sample

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
def margin(target: TargetModel, request: Request, tokens: Sequence[int], token: int, other: int) -> Margin:
    """Compute the margin between two next tokens after the prompt of `request` and its first output `tokens`.

    Scores are what the target takes the maximum of: logits after penalties, temperature and filters, plus the noise of
    the sample at this position if it samples. One prefill, without a KV cache of earlier steps. Raises PromptError.
    """
    assert target.num_lanes == 1, "a text target"
    device = target.device
    [prompt] = target.encode_lanes(request.prompt, request.images, None, request.videos, request.inputs)
    prefix = make_training_sample(target, prompt, tokens).prefix if tokens else prompt
    table = SlotTable(1, target.vocab_size, device, target.eos_ids)
    table.occupy([0], [RequestState(request, prompt.num_kept, 0)], [prompt])
    slots = table.batch([0])
    if tokens:
        table.advance(slots, torch.tensor([tokens], device=device), torch.tensor([len(tokens)], device=device))
    lanes = target.lanes(1, 1, prefix.length)
    logits = lanes.logits(lanes.admit(slots, [[prefix]], keep_hidden=False).last)
    rows, draws = table.sampling(slots), None
    if rows.any_sampled:
        draws = StepNoise(table.noise(slots), 1, target.vocab_size).gumbel(Stream.TOKEN)
    scores = perturb(process_logits(logits, rows), draws, rows)[0, 0]
    first, second = float(scores[token]), float(scores[other])
    largest = max((abs(score) for score in (first, second) if abs(score) != float("inf")), default=0.0)
    return Margin(first - second, ROUNDING[target.dtype] * max(1.0, largest))
