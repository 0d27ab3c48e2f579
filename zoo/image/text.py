"""Trains the image world's text encoder: a tokenizer and a tiny T5 encoder, before any image model is trained.

The T5 learns to predict the contents of each cell from the mean of its features. Image tokens of LlamaGen attend to a
prompt through exactly such a mean, because rotary zeros give all its positions the same weight.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

from models.loading.checkpoints import CheckpointRef, load_pretrained, read_config, read_processor
from zoo.pair import train_tokenizer
from zoo.training import Recipe, cosine_share, fit, label_loss
from zoo.world.grain import SIZES, draw_grainy_scene, write_prompt
from zoo.world.scene import COLOURS, NUM_CELLS, SHAPES, TONES, Scene, Thing, scene_rng

NUM_CONDITION_TOKENS = 24
CONDITION_DIM = 96


def encode_prompts(t5: T5EncoderModel, tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> tuple[Tensor, Tensor]:
    """Return left-padded features [n, 24, 96], zero at padding, and the mask [n, 24] of real positions."""
    tokens = tokenizer(prompts, padding="max_length", truncation=True, return_tensors="pt")
    mask = tokens["attention_mask"].bool()
    features = t5(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).last_hidden_state
    # T5 expects padding at the right; features are then rolled, so that the first image token follows the prompt.
    order = (torch.arange(mask.shape[1]) + mask.sum(1, keepdim=True)) % mask.shape[1]
    mask = mask.gather(1, order)
    features = features.gather(1, order[:, :, None].expand_as(features))
    return features * mask[:, :, None], mask


def _prompts(num: int, seed: int, start: int) -> list[tuple[Scene, str]]:
    scenes = [draw_grainy_scene(scene_rng("grain/words", seed, start + n), "train") for n in range(num)]
    return [(scene, write_prompt(scene)) for scene in scenes]


def _answers(scenes: list[Scene]) -> Tensor:
    """Return the size, colour and shape of each cell (0: nothing), then the tone, as labels [28, n]."""
    rows = torch.zeros(len(scenes), NUM_CELLS * 3 + 1, dtype=torch.long)
    for row, scene in zip(rows, scenes):
        for thing in scene.things:
            row[thing.cell * 3 : thing.cell * 3 + 3] = torch.tensor(_values(thing)) + 1
        row[-1] = TONES.index(scene.tone)
    return rows.T


def _values(thing: Thing) -> tuple[int, int, int]:
    return SIZES.index(thing.size), COLOURS.index(thing.colour), SHAPES.index(thing.shape)


_NOUN_HEADS = {"cell": NUM_CELLS, "size": len(SIZES), "colour": len(COLOURS), "shape": len(SHAPES)}
_CELL_HEADS = {f"{name} {cell}": _NOUN_HEADS[name] + 1 for cell in range(NUM_CELLS) for name in list(_NOUN_HEADS)[1:]}
_HEADS = {**_CELL_HEADS, "tone": len(TONES)}


class Examiner(nn.Module):
    """Predicts a scene from the mean of a prompt's features, and an object from its noun's feature; for training."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Linear(CONDITION_DIM, 128, bias=False), nn.GELU())
        self.out = nn.Linear(128, sum(_HEADS.values()))
        self.noun = nn.Linear(CONDITION_DIM, sum(_NOUN_HEADS.values()))

    def loss(self, features: Tensor, mask: Tensor, scenes: list[Scene]) -> tuple[Tensor, float]:
        """Return the loss of features [n, 24, 96] with their mask, and the mean accuracy of the scenes' attributes."""
        weights = mask[:, :, None] / mask.sum(1)[:, None, None]
        logits = self.out((self.each(features) * weights).sum(1))
        loss, right = label_loss(logits, _answers(scenes), _HEADS)
        rows, columns, answers = [], [], []
        for row, scene in enumerate(scenes):
            for place, thing in enumerate(scene.things, start=1):
                # From the prompt's end: `</s>`, three words of ground, then per object four words after its noun.
                after = 4 + 4 + (len(scene.things) - place) * 9
                rows.append(row)
                columns.append(features.shape[1] - 1 - after)
                answers.append((thing.cell, *_values(thing)))
        noun_loss, _ = label_loss(self.noun(features[rows, columns]), torch.tensor(answers).T, _NOUN_HEADS)
        return loss + noun_loss, sum(right.values()) / len(right)


def train_t5(recipe: Recipe, seed: int) -> tuple[T5EncoderModel, PreTrainedTokenizerFast]:
    """Train the tokenizer and the encoder from a seed."""
    tokenizer = train_tokenizer(
        [prompt for _, prompt in _prompts(1000, 0, 0)],
        ["<pad>", "</s>", "<unk>"],
        layout="$A </s>",
        vocab_size=512,
        lowercase=True,
        unk_token="<unk>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=NUM_CONDITION_TOKENS,
        padding_side="right",
    )
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=CONDITION_DIM,
        d_kv=24,
        d_ff=192,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=16,
        relative_attention_max_distance=32,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    t5 = T5EncoderModel(config)
    examiner = Examiner()
    optimizer = torch.optim.AdamW([*t5.parameters(), *examiner.parameters()], lr=recipe.lr, weight_decay=0.01)
    share = partial(cosine_share, num_steps=recipe.steps, warmup_steps=100, floor=0.02)

    def step_loss(step: int) -> tuple[Tensor, dict[str, float]]:
        scenes, prompts = zip(*_prompts(recipe.batch, seed, step * recipe.batch))
        loss, right = examiner.loss(*encode_prompts(t5, tokenizer, list(prompts)), list(scenes))
        return loss, {"read": right}

    fit(step_loss, [LambdaLR(optimizer, share)], t5.parameters(), recipe.steps, recipe.batch)
    return t5.eval(), tokenizer


def load_t5(folder: Path) -> tuple[T5EncoderModel, PreTrainedTokenizerFast]:
    """Load the encoder, in float32, and its tokenizer from a folder of checkpoints."""
    ref = CheckpointRef(str(folder / "image_t5"))
    config = read_config(ref)
    t5: Any = load_pretrained(ref, config, T5EncoderModel, "float32", use_safetensors=True)
    return t5, read_processor(ref, config)
