"""Trains the image world's text encoder, a tiny T5, before any image model is trained.

The T5 learns to predict the contents of each cell from the mean of its features. Image tokens of LlamaGen attend to a
prompt through exactly such a mean, because rotary zeros give all its positions the same weight.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, T5EncoderModel

from models.loading.checkpoints import CheckpointRef, load_pretrained, read_config, read_processor
from zoo.pair import build_model, load_tokenizer
from zoo.training import Measured, Recipe, cosine_share, fit_adam, label_loss
from zoo.world.grain import SIZES, draw_grainy_scene, write_prompt
from zoo.world.scene import COLOURS, NUM_CELLS, SHAPES, TONES, Scene, Thing, scene_rng

NUM_CONDITION_TOKENS = 24
CONDITION_DIM = 96
_NOUN_HEADS = {"cell": NUM_CELLS, "size": len(SIZES), "colour": len(COLOURS), "shape": len(SHAPES)}
_CELL_HEADS = {f"{name} {cell}": _NOUN_HEADS[name] + 1 for cell in range(NUM_CELLS) for name in list(_NOUN_HEADS)[1:]}
_HEADS = {**_CELL_HEADS, "tone": len(TONES)}


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


def _values(thing: Thing) -> tuple[int, int, int]:
    return SIZES.index(thing.size), COLOURS.index(thing.colour), SHAPES.index(thing.shape)


def _answers(scenes: list[Scene]) -> Tensor:
    """Return the size, colour and shape of each cell (0: nothing), then the tone, as labels [28, n]."""
    rows = torch.zeros(len(scenes), NUM_CELLS * 3 + 1, dtype=torch.long)
    for row, scene in zip(rows, scenes):
        for thing in scene.things:
            row[thing.cell * 3 : thing.cell * 3 + 3] = torch.tensor(_values(thing)) + 1
        row[-1] = TONES.index(scene.tone)
    return rows.T


class Examiner(nn.Module):
    """Predicts a scene from the mean of a prompt's features, and an object from its noun's feature; for training."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Linear(CONDITION_DIM, 128, bias=False), nn.GELU())
        self.out = nn.Linear(128, sum(_HEADS.values()))
        self.noun = nn.Linear(CONDITION_DIM, sum(_NOUN_HEADS.values()))

    def loss(self, features: Tensor, mask: Tensor, scenes: list[Scene]) -> Measured:
        """Return the loss of features [n, 24, 96] with their mask, and the mean accuracy of the scenes' attributes."""
        weights = mask[:, :, None] / mask.sum(1)[:, None, None]
        logits = self.out((self.each(features) * weights).sum(1))
        loss, right = label_loss(logits, _answers(scenes), _HEADS)
        rows, columns, answers = [], [], []
        for row, scene in enumerate(scenes):
            for index, thing in enumerate(scene.things, start=1):
                # From the prompt's end: `</s>`, three words of ground, then per object four words after its noun.
                rows.append(row)
                columns.append(features.shape[1] - 1 - (4 + 4 + (len(scene.things) - index) * 9))
                answers.append((thing.cell, *_values(thing)))
        noun_loss, _ = label_loss(self.noun(features[rows, columns]), torch.tensor(answers).T, _NOUN_HEADS)
        return loss + noun_loss, {"read": sum(right.values()) / len(right)}


def train_t5(recipe: Recipe, seed: int) -> T5EncoderModel:
    """Train the encoder from a seed."""
    torch.manual_seed(seed)
    tokenizer, t5 = load_tokenizer("image_t5"), build_model("image_t5")
    examiner = Examiner()

    def step_loss(step: int) -> Measured:
        drawn = range(step * recipe.batch, (step + 1) * recipe.batch)
        scenes = [draw_grainy_scene(scene_rng("grain/words", seed, index), "train") for index in drawn]
        return examiner.loss(*encode_prompts(t5, tokenizer, [write_prompt(scene) for scene in scenes]), scenes)

    learned, share = [*t5.parameters(), *examiner.parameters()], cosine_share(recipe.steps, 100, 0.02)
    fit_adam(step_loss, learned, share, recipe.steps, clipped=t5.parameters(), lr=recipe.lr, weight_decay=0.01)
    return t5.eval()


def load_t5(folder: Path) -> tuple[T5EncoderModel, PreTrainedTokenizerFast]:
    """Load the encoder, in float32, and its tokenizer from a folder of checkpoints."""
    ref = CheckpointRef(str(folder / "image_t5"))
    config = read_config(ref)
    t5: Any = load_pretrained(ref, config, T5EncoderModel, "float32", use_safetensors=True)
    return t5, read_processor(ref, config)
