"""Functions shared by the zoo's trainings: recipes, the training loop, schedules and losses."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel

from zoo.samples import Batch
from zoo.world.grammar import FILLER_ODDS

REPORT_STEPS = 50
IGNORED = -100
"""Label of a position that does not contribute to the loss."""


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

    def shorten(self, share: float) -> Recipe:
        """Return the recipe of a quick run, with `share` of the steps and images."""
        counts = {name: getattr(self, name) for name in vars(self) if name.endswith("steps") or name == "num_images"}
        return replace(self, **{name: max(1, round(share * count)) for name, count in counts.items() if count})


def lr_share(step: int, num_steps: int, warmup_steps: int) -> float:
    """Return the factor of the learning rate at a step: linear warm-up, then cosine decay to 0.02."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    return 0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * done))


def cosine_share(step: int, num_steps: int, warmup_steps: int, floor: float) -> float:
    """Return the factor of the learning rate: cosine decay to `floor` over all steps, times a linear warm-up."""
    cosine = 0.5 * (1 + math.cos(math.pi * (step + 1) / num_steps))
    return min(1.0, (step + 1) / warmup_steps) * (floor + (1 - floor) * cosine)


def fit(
    step_loss: Callable[[int], tuple[Tensor, Mapping[str, float]]],
    schedules: Sequence[LRScheduler],
    clipped: Iterable[Tensor],
    num_steps: int,
    batch_size: int,
    name: str = "step",
    done_steps: int = 0,
    after_step: Callable[[int], None] | None = None,
) -> None:
    """Train with the optimizers of `schedules`; the gradient norm of `clipped` is limited to 1.

    `step_loss` returns the loss of a step, counted from 1, and numbers whose means are printed with the loss. A resumed
    training begins after `done_steps`; `after_step` is called with the number of every finished step.
    """
    clipped = list(clipped)
    started, totals = time.monotonic(), Counter[str]()
    for step in range(done_steps + 1, num_steps + 1):
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
            rate = (step - done_steps) * batch_size / (time.monotonic() - started)
            left_s = (num_steps - step) * batch_size / rate
            report(f"{name} {step}/{num_steps} {means} {rate:.1f} samples/s, {left_s:.0f} s left")
            totals.clear()
        if after_step:
            after_step(step)


def save_training(path: Path, parameters: Mapping[str, Tensor], optimizer: Optimizer, **notes: str) -> None:
    """Write parameters and the state of AdamW as one safetensors file with `notes`, replacing an older one."""
    tensors = {name: one.detach().clone() for name, one in parameters.items()}
    for name, one in parameters.items():
        for part, value in optimizer.state.get(one, {}).items():
            tensors[f"optimizer/{name}/{part}"] = value.detach().clone()
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    save_file(tensors, partial, notes)
    os.replace(partial, path)


def load_training(
    path: Path, parameters: Mapping[str, Tensor], optimizer: Optimizer, skip: Callable[[str], bool] = lambda _: False
) -> dict[str, str]:
    """Read a file of `save_training` into parameters and optimizer; return its notes. Parameters of a name for which
    `skip` returns true keep their values. Raises SafetensorError if a parameter is missing."""
    with safe_open(path, "pt") as file, torch.no_grad():
        names = set(file.keys())
        for name, one in parameters.items():
            if skip(name):
                continue
            one.copy_(file.get_tensor(name))
            parts = {part: f"optimizer/{name}/{part}" for part in ("step", "exp_avg", "exp_avg_sq")}
            if names.issuperset(parts.values()):
                optimizer.state[one] = {part: file.get_tensor(key) for part, key in parts.items()}
        return dict(file.metadata())


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
