"""Defines the zoo's LlamaGen GPTs: sizes, and training on VQ codes with a tenth of the conditions dropped."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from transformers import T5EncoderModel

from models.llamagen.checkpoints import read_gpt_shape
from models.llamagen.gpt import Gpt
from models.llamagen.vq import Vq
from models.loading.checkpoints import CheckpointRef
from zoo.image.text import encode_prompts
from zoo.image.vq import VQ_SHAPE, pixels_of
from zoo.pair import CHECKPOINTS
from zoo.training import Measured, Recipe, fit, label_loss
from zoo.world.grain import SIZES, draw_grainy_scene, render_grainy, write_prompt
from zoo.world.scene import COLOURS, SHAPES, TONES, Scene, scene_rng
from zoo.world.scene import GRID as CELLS

IMAGE_PX = 96
GRID = IMAGE_PX // VQ_SHAPE.factor
# Share of conditions that training replaces by the empty condition, for classifier-free guidance.
DROPPED_SHARE = 0.1
MUON_LR = 0.02
EXAM_WEIGHT = 0.3
EXAM_HEADS = {"size": len(SIZES) + 1, "colour": len(COLOURS) + 1, "shape": len(SHAPES) + 1, "tone": len(TONES)}
# Loss weight of codes in cells with a requested object. It depends on the prompt alone, so the learned distribution
# stays that of the images; without it, the unpredictable grain dominates the loss.
ASKED_WEIGHT = 6.0
# A class is the colour and the shape of an image's only object.
NUM_CLASSES = len(COLOURS) * len(SHAPES)


@dataclass(frozen=True)
class Codes:
    """Encoded images: codes [n, 144] and the condition of each, a row of `features` and `mask`, or a label.

    `asked` [n, 144, 4] are the attributes of the condition at each code's position: size, colour and shape of the
    object in its cell (0: none), and the tone. Used only in training.
    """

    codes: Tensor
    features: Tensor | None
    mask: Tensor | None
    labels: Tensor | None
    asked: Tensor | None = None


def class_of(scene: Scene) -> int:
    """Return the class of a scene with one object."""
    (thing,) = scene.things
    return COLOURS.index(thing.colour) * len(SHAPES) + SHAPES.index(thing.shape)


def draw_scenes(kind: str, split: str, num: int, seed: int, start: int = 0) -> list[Scene]:
    """Return scenes for a condition: `text` has one or two objects, `class` has one."""
    only = 1 if kind == "class" else None
    return [draw_grainy_scene(scene_rng(f"grain/{split}", seed, start + n), split, only) for n in range(num)]


def asked_places(kind: str, scenes: list[Scene]) -> Tensor:
    """Return the attributes of conditions at each code's position, [n, 144, 4]; see `Codes`."""
    side = torch.arange(GRID) * CELLS // GRID
    cells = (side[:, None] * CELLS + side).flatten()
    asked = torch.zeros(len(scenes), CELLS * CELLS, 4, dtype=torch.long)
    for row, scene in zip(asked, scenes):
        for thing in scene.things:
            colour, shape = COLOURS.index(thing.colour) + 1, SHAPES.index(thing.shape) + 1
            if kind == "class":
                row[:, 1:3] = torch.tensor([colour, shape])
            else:
                row[thing.cell, :3] = torch.tensor([SIZES.index(thing.size) + 1, colour, shape])
        if kind == "text":
            row[:, 3] = TONES.index(scene.tone)
    return asked[:, cells]


@torch.no_grad()
def encode_scenes(
    kind: str, scenes: list[Scene], vq: Vq, t5: T5EncoderModel | None = None, tokenizer: Any = None
) -> Codes:
    """Render scenes and encode them to codes, and with `t5` encode their prompts."""
    parts = [scenes[first : first + 50] for first in range(0, len(scenes), 50)]
    codes = torch.cat([vq.encode(pixels_of([render_grainy(scene) for scene in part])).flatten(1) for part in parts])
    asked = asked_places(kind, scenes)
    if t5 is None:
        return Codes(codes, None, None, torch.tensor([class_of(scene) for scene in scenes]), asked)
    encoded = [encode_prompts(t5, tokenizer, [write_prompt(scene) for scene in part]) for part in parts]
    features, mask = (torch.cat(both) for both in zip(*encoded))
    return Codes(codes, features, mask, None, asked)


def attention_mask(mask: Tensor, num_tokens: int) -> Tensor:
    """Return the causal attention mask, bool [n, 1, L, L], of real condition positions [n, columns] and `num_tokens`
    codes; padded condition positions are masked, but each position attends to itself."""
    visible = torch.cat([mask, mask.new_ones(len(mask), num_tokens)], dim=1)
    length = visible.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    diagonal = torch.eye(length, dtype=torch.bool)
    return (causal & visible[:, None, :] | diagonal)[:, None]


def code_states(gpt: Gpt, batch: Codes, dropped: Tensor) -> Tensor:
    """Return the hidden states [n, 144, D] that predict the codes; rows of `dropped` [n] have no condition."""
    if batch.labels is not None:
        columns = gpt.condition(torch.where(dropped, gpt.shape.num_classes, batch.labels))[:, None]  # [n, columns, D]
        mask = torch.ones(len(columns), 1, dtype=torch.bool)
    else:
        assert batch.features is not None
        assert batch.mask is not None
        # The null embeddings are at the row's own padding, as in the second lane of guidance.
        columns = torch.where(dropped[:, None, None], gpt.null_text(), gpt.embed_text(batch.features))
        mask = batch.mask
    inputs = torch.cat([columns, gpt.embed_tokens(batch.codes[:, :-1])], dim=1)
    positions = torch.arange(inputs.shape[1]).expand(len(inputs), -1)
    hidden: Tensor = gpt(inputs, positions, attention_mask(mask, batch.codes.shape[1] - 1)).last_hidden_state
    return hidden[:, columns.shape[1] - 1 :]


def build_gpt(name: str, seed: int, codebook: Tensor) -> Gpt:
    """Build an untrained GPT of a shipped shape, its weights drawn from a seed; similar codes of a codebook [V, dim]
    get similar input and output embeddings: learning 4,096 codes one by one takes longer than all other training."""
    torch.manual_seed(seed)
    gpt = Gpt(read_gpt_shape(CheckpointRef(str(CHECKPOINTS / name))))
    for name, parameter in gpt.named_parameters():
        if parameter.ndim == 2:
            # Layers output zero at first, so that the first steps use the similarity of codes.
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=0.0 if adds else parameter.shape[1] ** -0.5)
    features = smooth_features(codebook, gpt.shape.dim)
    gpt.embed_tokens.weight.data = 0.5 * features
    gpt.output.weight.data = 0.04 * features
    return gpt


def smooth_features(directions: Tensor, num_features: int) -> Tensor:
    """Return random Fourier features [n, num_features] of directions [n, dim], for a kernel of two widths."""
    widths = torch.where(torch.arange(num_features) % 2 == 0, 0.45, 0.9)
    turns = torch.randn(directions.shape[1], num_features) / widths
    waves = (directions @ turns + 2 * math.pi * torch.rand(num_features)).cos() * 2**0.5
    return waves - waves.mean(0)


def train_gpt(gpt: Gpt, codes: Codes, recipe: Recipe, seed: int) -> None:
    """Train a GPT in place on encoded images, in random order in each pass.

    A linear examiner predicts the attributes of the condition at each position from the GPT's states: because of the
    grain, codes are a noisy training signal of conditions, and attributes have no noise.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    examiner = nn.Linear(gpt.shape.dim, sum(EXAM_HEADS.values()))
    matrices = [p for p in gpt.layers.parameters() if p.ndim == 2]
    rest = [p for p in gpt.parameters() if not any(p is matrix for matrix in matrices)]
    optimizers = (
        torch.optim.Muon(matrices, lr=MUON_LR, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW([*rest, *examiner.parameters()], lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0),
    )
    order = torch.empty(0, dtype=torch.long)
    gpt.train()

    def share(step: int) -> float:
        """Return the learning-rate factor: linear warm-up, constant, then linear decay to zero over the second half."""
        return min(1.0, (step + 1) / 30, (recipe.steps - step) / (0.5 * recipe.steps))

    def step_loss(step: int) -> Measured:
        nonlocal order
        if len(order) < recipe.batch:
            order = torch.randperm(len(codes.codes), generator=generator)
        rows, order = order[: recipe.batch], order[recipe.batch :]
        others = (codes.features, codes.mask, codes.labels, codes.asked)
        batch = Codes(codes.codes[rows], *(None if part is None else part[rows] for part in others))
        assert batch.asked is not None
        dropped = torch.rand(recipe.batch, generator=generator) < DROPPED_SHARE
        # bfloat16 GEMMs are faster on CPUs with bfloat16 instructions; the weights stay in float32.
        with torch.autocast("cpu", torch.bfloat16):
            states = code_states(gpt, batch, dropped)
            logits = gpt.output(states)
            attributes = batch.asked[~dropped].movedim(-1, 0)
            exam_loss, _ = label_loss(examiner(states[~dropped]).float(), attributes, EXAM_HEADS)
        losses = cross_entropy(logits.flatten(0, 1).float(), batch.codes.flatten(), reduction="none")
        weights = torch.ones_like(losses)
        if batch.labels is None:
            weights[((batch.asked[..., 0] > 0) & ~dropped[:, None]).flatten()] = ASKED_WEIGHT
        loss = (losses * weights).sum() / weights.sum() + EXAM_WEIGHT * exam_loss
        return loss, {"code": losses.detach().mean().item(), "exam": exam_loss.item()}

    schedules = [LambdaLR(optimizer, share) for optimizer in optimizers]
    fit(step_loss, schedules, gpt.parameters(), recipe.steps)
    gpt.eval()
