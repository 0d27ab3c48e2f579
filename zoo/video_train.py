"""Training of one model of the video pair: its vision tower on labels of the cells, then the whole on captions."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import Qwen2_5_VLForConditionalGeneration

from zoo.train import lr_share
from zoo.video_samples import HEADS, IGNORED, VideoBatch

Report = Callable[[str], None]
LABEL_WEIGHT = 0.2
"""Of the labels in the second stage: enough that the tower forgets nothing while the language model learns to read."""


def to_stderr(line: str) -> None:
    """The default report."""
    print(line, file=sys.stderr, flush=True)


def label_loss(features: Tensor, head: nn.Module, labels: Tensor) -> tuple[Tensor, list[float]]:
    """Cross-entropy of all labels [6, tokens] from features [tokens, D], and the accuracy of each."""
    loss, right = features.new_zeros(()), []
    for wanted, logits in zip(labels, head(features.float()).split(list(HEADS.values()), dim=-1), strict=True):
        loss = loss + cross_entropy(logits, wanted, ignore_index=IGNORED)
        known = wanted != IGNORED
        right.append(float((logits.argmax(-1) == wanted)[known].float().mean()))
    return loss, right


def text_loss(model: Qwen2_5_VLForConditionalGeneration, batch: VideoBatch) -> Tensor:
    """Weighted next-token loss; logits are computed only where a token is to be learned."""
    is_video = batch.ids == model.config.video_token_id
    hidden = model.model(
        input_ids=batch.ids,
        attention_mask=batch.mask,
        pixel_values_videos=batch.patches,
        video_grid_thw=batch.grids,
        second_per_grid_ts=batch.seconds,
        mm_token_type_ids=is_video.long() * 2,
        use_cache=False,
    ).last_hidden_state
    weights = batch.weights[:, 1:]
    wanted = weights > 0
    logits = model.lm_head(hidden[:, :-1][wanted]).float()
    losses = cross_entropy(logits, batch.ids[:, 1:][wanted], reduction="none")
    return (losses * weights[wanted]).sum() / weights.sum()


def train_video_model(
    model: Qwen2_5_VLForConditionalGeneration,
    batches: Iterator[VideoBatch],
    tower_steps: int,
    steps: int,
    lr: float,
    seed: int,
    autosave: Path | None = None,
    report: Report = to_stderr,
) -> None:
    """Train a model in place: `tower_steps` on labels alone, then `steps` on captions and, lightly, labels."""
    torch.manual_seed(seed)
    tower = model.model.visual
    head = nn.Sequential(nn.LayerNorm(model.config.text_config.hidden_size), nn.LazyLinear(sum(HEADS.values())))
    head(torch.zeros(1, model.config.text_config.hidden_size))
    model.train()
    for stage, num_steps in (("tower", tower_steps), ("whole", steps)):
        learned = [*(tower.parameters() if stage == "tower" else model.parameters()), *head.parameters()]
        optimizer = torch.optim.AdamW(learned, lr=lr, weight_decay=0.02, betas=(0.9, 0.98))
        warmup = min(100, num_steps // 10 + 1)
        share = functools.partial(lr_share, num_steps=num_steps, warmup_steps=warmup)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
        started, total = time.monotonic(), 0.0
        for step in range(1, num_steps + 1):
            batch = next(batches)
            with torch.autocast("cpu", torch.bfloat16):
                features = tower(batch.patches, grid_thw=batch.grids).pooler_output
                loss, right = label_loss(features, head, batch.labels)
                if stage == "whole":
                    loss = text_loss(model, batch) + LABEL_WEIGHT * loss
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(learned, 1.0)
            optimizer.step()
            schedule.step()
            total += loss.item()
            if step % 50 == 0 or step == num_steps:
                rate = step / (time.monotonic() - started)
                shares = " ".join(f"{name} {share:.2f}" for name, share in zip(HEADS, right))
                left_s = (num_steps - step) / rate
                report(
                    f"{stage} {step}/{num_steps} loss {total / 50:.4f} {shares} {rate:.2f} steps/s, {left_s:.0f} s left"
                )
                total = 0.0
            if autosave is not None and step % 300 == 0:
                save_file({name: value.contiguous() for name, value in model.state_dict().items()}, autosave)
    model.eval()
