"""Trains heads for the caption and video targets on the targets' own states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actors.training.learner import save_head
from models.heads.files import keep_as_safetensors
from models.heads.training.block_loss import fresh_block
from models.heads.training.eagle3_loss import fresh_eagle3
from models.heads.training.losses import HeadTask, fresh_eagle, fresh_medusa
from models.heads.training.teacher import TrainingSample
from models.heads.training.trainer import Pace, Trainer
from models.loading.checkpoints import CheckpointRef
from models.target import Target
from zoo import pair, samples, video
from zoo.samples import Batch
from zoo.training import Recipe, report

NUM_MEDUSA_HEADS, BLOCK = 4, 8
PARTS: dict[str, tuple[Callable[[int, int], Iterator[Batch]], str, Callable[[], list[str]]]] = {
    "caption": (samples.draw_batches, "<unk>", samples.grammar_texts),
    "video": (video.draw_batches, "<|image_pad|>", video.grammar_texts),
}
"""Part of the zoo → its batches, the token that represents masks (no answer has it, and its embedding is not zero), and
texts in which every word of its answers occurs."""
HEADS: dict[str, tuple[int, torch.dtype, Callable[[Target, int, str], HeadTask]]] = {
    "eagle": (7, torch.float32, lambda target, seed, _: fresh_eagle(target, seed)),
    "medusa": (8, torch.float32, lambda target, seed, _: fresh_medusa(target, seed, NUM_MEDUSA_HEADS)),
    "eagle3": (9, torch.bfloat16, lambda target, seed, part: fresh_eagle3(target, seed, token_ids=words(target, part))),
    "block": (10, torch.bfloat16, lambda target, seed, part: fresh_block(target, seed, mask(target, part), BLOCK, 1)),
}
"""Kind of head → what is added to the seed of its conversations, the type of its GEMMs, and its constructor."""


def build_head(name: str, recipe: Recipe, seed: int, folder: Path) -> None:
    """Train one head for the target of its part (`caption`, `video`), and save it in `folder`; the target is the one in
    `folder`, or else the shipped one."""
    part, kind = name.split("_")
    target_folder = folder / f"{part}_target"
    path = target_folder if target_folder.is_dir() else pair.CHECKPOINTS / target_folder.name
    target = Target.load(CheckpointRef(str(path)), "float32", "cpu")
    seed_offset, dtype, make_head = HEADS[kind]
    options: Any = {"schedule": "cosine", "clip": "norm", "clip_limit": 1.0, "noise_tokens": None}
    pace = Pace(recipe.steps, recipe.lr, seed, warmup_steps=recipe.steps // 10, **options)
    batches = (training_samples(batch, target) for batch in PARTS[part][0](seed + seed_offset, recipe.batch))
    head = make_head(target, seed, part)
    trainer = Trainer(target, head, pace, dtype=dtype)
    for step, taught in enumerate(islice(batches, recipe.steps), start=1):
        loss = trainer.learn(list(enumerate(taught, start=(step - 1) * len(taught))))
        if step % 100 == 0 or step == recipe.steps:
            report(f"step {step}/{recipe.steps} loss {loss or 0.0:.4f}")
    save_head(head, target, folder / name, torch.bfloat16, name=f"{part}_target", own_embedding=False)
    keep_as_safetensors(folder / name)


def mask(target: Target, part: str) -> int:
    """Return the id of the token that represents masks."""
    token_id: int = target.front_end.tokenizer.convert_tokens_to_ids(PARTS[part][1])
    return token_id


def words(target: Target, part: str) -> list[int]:
    """Return the ids of the tokens of a part's texts, and of the end of an answer."""
    tokenizer = target.front_end.tokenizer
    return sorted({token for text in PARTS[part][2]() for token in tokenizer(text)["input_ids"]} | set(target.eos_ids))


def training_samples(batch: Batch, target: Target) -> list[TrainingSample]:
    """Return the conversations of a batch one by one, without padding."""
    samples = []
    for row, (size, media) in enumerate(zip(batch.mask.sum(dim=1).tolist(), media_inputs(batch, target), strict=True)):
        inputs = {"input_ids": batch.ids[row, :size][None], "attention_mask": torch.ones(1, size, dtype=torch.long)}
        if "mm_token_type_ids" in batch.inputs:
            inputs["mm_token_type_ids"] = batch.inputs["mm_token_type_ids"][row : row + 1, :size]
        samples.append(TrainingSample(target.prefix(inputs | media), batch.weights[row, :size] > 0))
    return samples


def media_inputs(batch: Batch, target: Target) -> list[dict[str, Tensor]]:
    """Return each row's pixels, or the patches, grid and frame distance of its clip; nothing without images."""
    if (grids := batch.inputs.get("video_grid_thw")) is None:
        config: Any = target.model.config
        counts = (batch.ids == config.image_token_id).sum(dim=1) // pair.NUM_VISUAL_TOKENS
        pixels = torch.split(batch.inputs.get("pixel_values", torch.empty(0)), counts.tolist())
        return [{"pixel_values": part} if len(part) else {} for part in pixels]
    patches = torch.split(batch.inputs["pixel_values_videos"], grids.prod(dim=1).tolist())
    seconds = batch.inputs["second_per_grid_ts"][:, None]
    names = ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts")
    return [dict(zip(names, clip, strict=True)) for clip in zip(patches, grids[:, None], seconds, strict=True)]
