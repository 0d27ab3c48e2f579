"""The training loop that the zoo's recipes share, its schedules and its losses."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import PreTrainedModel

from zoo.samples import Batch
from zoo.world.grammar import FILLER_ODDS

REPORT_STEPS = 50
IGNORED = -100
"""Label of a position that does not contribute to the loss."""
Measured = tuple[Tensor, Mapping[str, float]]
"""The loss of a step, and numbers whose means are printed with it."""


@dataclass(frozen=True)
class Recipe:
    """Steps, samples per step and learning rate of one model; the other fields apply to some models only."""

    steps: int
    batch: int
    lr: float
    tower_steps: int = 0
    tuned_tower_lr: float = 0.0
    """Learning rate of the tower while the whole model is trained."""
    sharpen_steps: int = 0
    polish_steps: int = 0
    num_images: int = 0
    """Images of a GPT, encoded once."""
    rounds: int = 1
    """How often a video model repeats its caption training with warm-up."""
    filler_odds: tuple[float, ...] = FILLER_ODDS


def lr_share(num_steps: int, warmup_steps: int) -> Callable[[int], float]:
    """Return the factor of the learning rate by step: linear warm-up, then cosine decay to 0.02."""

    def share(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        done = (step - warmup_steps) / max(1, num_steps - warmup_steps)
        return 0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * done))

    return share


def cosine_share(num_steps: int, warmup_steps: int, floor: float) -> Callable[[int], float]:
    """Return the factor of the learning rate by step: cosine decay to `floor`, times a linear warm-up."""

    def share(step: int) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * (step + 1) / num_steps))
        return min(1.0, (step + 1) / warmup_steps) * (floor + (1 - floor) * cosine)

    return share


def fit(
    step_loss: Callable[[int], Measured],
    schedules: Sequence[LRScheduler],
    clipped: Iterable[Tensor],
    num_steps: int,
    name: str = "step",
) -> None:
    """Train with the optimizers of `schedules`; the gradient norm of `clipped` is limited to 1. Steps count from 1."""
    clipped, started, totals = list(clipped), time.monotonic(), Counter[str]()
    for step in range(1, num_steps + 1):
        loss, measured = step_loss(step)
        for schedule in schedules:
            schedule.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(clipped, 1.0)
        for schedule in schedules:
            schedule.optimizer.step()
            schedule.step()
        totals.update({"loss": loss.item(), **measured})
        if step % REPORT_STEPS == 0 or step == num_steps:
            count = step % REPORT_STEPS or REPORT_STEPS
            means = " ".join(f"{key} {total / count:.4f}" for key, total in totals.items())
            left_s = (num_steps - step) * (time.monotonic() - started) / step
            report(f"{name} {step}/{num_steps} {means}, {left_s:.0f} s left")
            totals.clear()


def fit_adam(
    step_loss: Callable[[int], Measured],
    learned: Any,
    share: Callable[[int], float],
    num_steps: int,
    name: str = "step",
    clipped: Iterable[Tensor] | None = None,
    **options: Any,
) -> None:
    """Train `learned`, parameters or groups of them, with AdamW of these options, its learning rate times `share`."""
    optimizer = torch.optim.AdamW(learned, **options)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    fit(step_loss, [LambdaLR(optimizer, share)], parameters if clipped is None else clipped, num_steps, name)


def report(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


def next_token_loss(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Return the weighted next-token loss of a batch; logits are computed only for tokens with a weight."""
    inputs = {"input_ids": batch.ids, "attention_mask": batch.mask, "use_cache": False, **batch.inputs}
    hidden = model.model(**inputs).last_hidden_state  # [b, L, hidden]
    weights = batch.weights[:, 1:]
    learned = weights > 0
    logits = model.lm_head(hidden[:, :-1][learned]).float()  # [learned tokens, V]
    losses = cross_entropy(logits, batch.ids[:, 1:][learned], reduction="none")
    return (losses * weights[learned]).sum() / weights.sum()


def label_loss(logits: Tensor, labels: Tensor, heads: Mapping[str, int]) -> tuple[Tensor, dict[str, float]]:
    """Return the cross-entropy, summed over heads, of logits [..., sum of sizes] and labels [heads, ...], and the
    accuracy by head."""
    loss, right = logits.new_zeros(()), {}
    parts = torch.split(logits, list(heads.values()), dim=-1)
    for name, wanted, part in zip(heads, labels, parts, strict=True):
        loss = loss + cross_entropy(part.flatten(0, -2), wanted.flatten(), ignore_index=IGNORED)
        known = wanted != IGNORED
        right[name] = float((part.argmax(-1) == wanted)[known].float().mean())
    return loss, right
