"""Trains heads for the shipped caption and video targets on the targets' own states."""

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
from zoo import pair, samples
from zoo.samples import Batch
from zoo.training import Recipe, report
from zoo.video import pair as video_pair
from zoo.video import samples as video_samples

NUM_MEDUSA_HEADS, BLOCK_SIZE = 4, 8
MASKS = {"caption": "<unk>", "video": "<|image_pad|>"}
"""Part of the zoo → the token that represents masks: no answer has it, and its embedding is not zero."""
TEXTS: dict[str, Callable[[], list[str]]] = {
    "caption": lambda: pair.grammar_texts(800, 0),
    "video": lambda: video_pair.grammar_texts(800),
}
"""Part of the zoo → texts in which every word of its answers occurs."""
HEADS: dict[str, tuple[int, torch.dtype, Callable[[Target, int, str], HeadTask]]] = {
    "eagle": (7, torch.float32, lambda target, seed, _: fresh_eagle(target, seed)),
    "medusa": (8, torch.float32, lambda target, seed, _: fresh_medusa(target, seed, NUM_MEDUSA_HEADS)),
    "eagle3": (
        9,
        torch.bfloat16,
        lambda target, seed, part: fresh_eagle3(target, seed, token_ids=drafted_words(target, TEXTS[part]())),
    ),
    "block": (
        10,
        torch.bfloat16,
        lambda target, seed, part: fresh_block(target, seed, mask_of(target, part), BLOCK_SIZE, num_layers=1),
    ),
}
"""Kind of head → what is added to the seed of its conversations, the type of its GEMMs, and its constructor."""


def build_head(part: str, kind: str, recipe: Recipe, seed: int, folder: Path) -> None:
    """Train one head for the target of a part (`caption`, `video`), and save it in `folder`; the target is the one in
    `folder`, or else the shipped one."""
    own = folder / f"{part}_target"
    path = own if own.is_dir() else pair.CHECKPOINTS / own.name
    target = Target.load(CheckpointRef(str(path)), "float32", "cpu")
    seed_offset, dtype, make_head = HEADS[kind]
    batches = draw_samples(part, seed + seed_offset, recipe.batch, target)
    pace = Pace(
        recipe.steps,
        recipe.lr,
        seed,
        warmup_steps=recipe.steps // 10,
        schedule="cosine",
        clip="norm",
        clip_limit=1.0,
        noise_tokens=None,
    )
    head = make_head(target, seed, part)
    trainer, total = Trainer(target, head, pace, dtype=dtype), 0.0
    for step, taught in enumerate(islice(batches, recipe.steps), start=1):
        total += trainer.learn(list(enumerate(taught, start=(step - 1) * len(taught)))) or 0.0
        if step % 100 == 0 or step == recipe.steps:
            report(f"step {step}/{recipe.steps} loss {total / (step % 100 or 100):.4f}")
            total = 0.0
    out = folder / f"{part}_{kind}"
    save_head(head, target, out, torch.bfloat16, name=f"{part}_target", own_embedding=False)
    keep_as_safetensors(out)


def mask_of(target: Target, part: str) -> int:
    """Return the id of the token that represents masks."""
    token_id: int = target.front_end.tokenizer.convert_tokens_to_ids(MASKS[part])
    return token_id


def drafted_words(target: Target, texts: list[str]) -> list[int]:
    """Return the token ids of texts, and of the end of an answer."""
    tokenizer = target.front_end.tokenizer
    used = {token for text in texts for token in tokenizer(text)["input_ids"]}
    return sorted(used | set(target.eos_ids))


def draw_samples(part: str, seed: int, batch_size: int, target: Target) -> Iterator[list[TrainingSample]]:
    """Yield batches of training samples of a part without end."""
    if part == "caption":
        batches = samples.draw_batches("train", seed, batch_size, pair.build_tokenizer())
        return (training_samples_of(batch, target, image_inputs(batch, target)) for batch in batches)
    tokenizer = video_pair.build_tokenizer()
    videos = video_pair.build_processor(tokenizer).video_processor
    batches = video_samples.draw_batches("train", seed, batch_size, tokenizer, videos)
    return (training_samples_of(batch, target, video_inputs(batch)) for batch in batches)


def training_samples_of(batch: Batch, target: Target, media: list[dict[str, Tensor]]) -> list[TrainingSample]:
    """Return the conversations of a batch one by one, without padding; `media` has the other inputs of each row."""
    taught = []
    for row, size in enumerate(batch.mask.sum(dim=1).tolist()):
        inputs = {"input_ids": batch.ids[row, :size][None], "attention_mask": torch.ones(1, size, dtype=torch.long)}
        taught.append(TrainingSample(target.prefix(inputs | media[row]), batch.weights[row, :size] > 0))
    return taught


def image_inputs(batch: Batch, target: Target) -> list[dict[str, Tensor]]:
    """Return the pixels of each row's images; rows without images have none."""
    config: Any = target.model.config
    counts = (batch.ids == config.image_token_id).sum(dim=1) // pair.NUM_VISUAL_TOKENS
    pixels = torch.split(batch.inputs.get("pixel_values", torch.empty(0)), counts.tolist())
    return [{"pixel_values": one} if len(one) else {} for one in pixels]


def video_inputs(batch: Batch) -> list[dict[str, Tensor]]:
    """Return the patches, the grid, the frame distance and the token types of each row's clip."""
    grids, types = batch.inputs["video_grid_thw"], batch.inputs["mm_token_type_ids"]
    patches = torch.split(batch.inputs["pixel_values_videos"], grids.prod(dim=1).tolist())
    sizes = batch.mask.sum(dim=1).tolist()
    return [
        {
            "pixel_values_videos": patches[row],
            "video_grid_thw": grids[row : row + 1],
            "second_per_grid_ts": batch.inputs["second_per_grid_ts"][row : row + 1],
            "mm_token_type_ids": types[row : row + 1, :size],
        }
        for row, size in enumerate(sizes)
    ]
