"""Training of one model of the pair on the mixture of conversations: the loop and the schedule."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from zoo.samples import Batch, draw_batches
from zoo.world.grammar import FILLER_ODDS


def loss_of(model: LlavaForConditionalGeneration, batch: Batch) -> torch.Tensor:
    """Return the weighted next-token loss of a batch; logits are computed only where a token is to be learned."""
    hidden = model.model(
        input_ids=batch.ids, attention_mask=batch.mask, pixel_values=batch.pixels, use_cache=False
    ).last_hidden_state  # [b, L, hidden]
    weights = batch.weights[:, 1:]
    wanted = weights > 0
    logits = model.lm_head(hidden[:, :-1][wanted]).float()  # [learned tokens, V]
    losses = cross_entropy(logits, batch.ids[:, 1:][wanted], reduction="none")
    return (losses * weights[wanted]).sum() / weights.sum()


def lr_share(step: int, num_steps: int, warmup_steps: int) -> float:
    """The part of the learning rate that holds at a step: a linear rise, then half a cosine down to a fiftieth."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    return 0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * done))


def train_model(
    model: LlavaForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    num_steps: int,
    batch_size: int,
    lr: float,
    tower_lr: float,
    seed: int,
    autosave: Path | None = None,
    odds: Sequence[float] = FILLER_ODDS,
    report: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> None:
    """Train a model in place; `odds` are those of its fillers, and `autosave` gets its weights every 500 steps."""
    torch.manual_seed(seed)
    tower = list(model.model.vision_tower.parameters())
    rest = [p for name, p in model.named_parameters() if not name.startswith("model.vision_tower.")]
    groups = [{"params": tower, "lr": tower_lr}, {"params": rest, "lr": lr}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.02, betas=(0.9, 0.98))
    warmup_steps = min(200, num_steps // 10 + 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_share(step, num_steps, warmup_steps))
    started, total = time.monotonic(), 0.0
    model.train()
    for step, batch in enumerate(draw_batches("train", seed, batch_size, tokenizer, odds=odds), start=1):
        batch = batch.to(model.device)
        # bfloat16 GEMMs are twice as fast on CPUs with bfloat16 instructions; the weights stay in float32.
        with torch.autocast(model.device.type, torch.bfloat16):
            loss = loss_of(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        total += loss.item()
        if step % 50 == 0:
            rate = step * batch_size / (time.monotonic() - started)
            left_s = (num_steps - step) * batch_size / rate
            report(f"step {step}/{num_steps} loss {total / 50:.4f} {rate:.1f} samples/s, {left_s:.0f} s left")
            total = 0.0
        if autosave is not None and step % 500 == 0:
            save_file({name: value.contiguous() for name, value in model.state_dict().items()}, autosave)
        if step == num_steps:
            return
