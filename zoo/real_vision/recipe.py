"""Trains the target of the vision pair on a CPU: `python -m zoo.real_vision.recipe`; needs `python -m zoo.real`.

Stages: the vision tower learns patch labels; the projector is fitted to the language model's embeddings of the words of
the patches; low-rank differences of the language model are trained on captions, first with the embeddings of the words
themselves as visual columns, then with those of tower and projector. All three are packed into one file.

A cell is four patches wide and high. The words of its patches describe it in reading order: the first line of patches
of a row of the grid names the row and counts its objects, the second names the objects, the third the ground. So a
pretrained language model reads an image's columns as a text of its own vocabulary.

The captions of a training sequence do not attend to each other, and each continues the positions of the image: losses
are those of separate sequences, but the image's columns are computed once.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, mse_loss
from torch.optim.lr_scheduler import OneCycleLR
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from zoo.real.drafters import LAYERS, SCALE, VISION_TARGET, pack
from zoo.real.model import WEIGHTS_SHA256
from zoo.real_vision.model import (
    CELL,
    IMAGE_PX,
    IMAGE_TOKEN,
    NUM_VISUAL_TOKENS,
    SIDE,
    SYSTEM,
    build_model,
    build_tower,
    load_tokenizer,
)
from zoo.samples import encode_turn, pixels_of, render_like_a_file
from zoo.tower import GROUND_HEADS, THING_HEADS, draw_labelled, label_cells, pretrain_tower
from zoo.training import Measured, fit, fit_adam, report
from zoo.world.dense import GRID, PROMPTS, ROWS, draw_dense, in_row, write_description
from zoo.world.grammar import NUMBERS
from zoo.world.scene import COLOURS, SHAPES, SIZES, TEXTURES, TONES, Scene, scene_rng

SEPARATOR = ","
WORDS = (
    *(*ROWS, "row", "has", *NUMBERS[: GRID + 1]),
    *(*SIZES, *COLOURS, *SHAPES, *TONES, *TEXTURES, "background", SEPARATOR),
)
HEADS = {"filled": 2, **THING_HEADS, **GROUND_HEADS, "count": GRID + 1, "word": len(WORDS)}
"""Labels of a patch and their sizes; `count` is the number of objects in its row of the grid."""
BEFORE = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
TOWER_STEPS, TOWER_BATCH = 6000, 8
PROJECTOR_SCENES, SCENES_PER_DRAW, PROJECTOR_BATCH, PROJECTOR_STEPS, PROJECTOR_LR = 240, 16, 2048, 900, 2e-3
RANK, LR, PROJECTOR_LR_SHARE = 16, 6e-4, 0.3
WORD_STEPS, STEPS, WARMUP_STEPS, COOLDOWN_STEPS = 200, 620, 20, 150
"""Of the language model: steps with words as visual columns, all steps, and those in which the rate rises and falls."""


def words_of(scene: Scene) -> list[list[str]]:
    """Return the words of a scene's patches, 16 lines of 16."""
    lines = []
    for row in range(GRID):
        things = {thing.cell % GRID: thing for thing in in_row(scene, row)}
        header = [ROWS[row], "row", "has", NUMBERS[len(things)]]
        objects, ground = [], [scene.tone, scene.texture, "background", SEPARATOR] * GRID
        for column in range(GRID):
            thing = things.get(column)
            objects += [thing.size, thing.colour, thing.shape, SEPARATOR] if thing else [SEPARATOR] * CELL
        lines += [header + [SEPARATOR] * (SIDE - CELL), objects, ground, [SEPARATOR] * SIDE]
    return lines


def word_numbers(scene: Scene) -> Tensor:
    """Return the places in WORDS of the words of a scene's patches, [16, 16]."""
    return torch.tensor([[WORDS.index(word) for word in line] for line in words_of(scene)])


def label_patches(scene: Scene) -> Tensor:
    """Return the labels of a scene's patches, int64 [8 heads, 256 patches]; attributes of empty cells are ignored."""
    labels = label_cells(scene, SIDE, len(HEADS), lambda _: 1)
    for row in range(GRID):
        labels[6, row * CELL : (row + 1) * CELL] = len(in_row(scene, row))
    labels[7] = word_numbers(scene)
    return labels.flatten(1)


def word_embeddings(table: Tensor, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Return the rows of an embedding table of WORDS, [words, hidden]; a long word has that of its first token."""
    texts = [f" {word}" if word.isalpha() else word for word in WORDS]
    return table[[tokenizer(text, add_special_tokens=False)["input_ids"][0] for text in texts]]


@dataclass(frozen=True)
class Packed:
    """One sequence: ids, loss weights, positions and number of the caption of each token (0: the shared beginning),
    all [L]; the scene and its image, uint8 [256, 256, 3]."""

    ids: Tensor
    weights: Tensor
    positions: Tensor
    captions: Tensor
    scene: Scene
    image: np.ndarray

    @property
    def mask(self) -> Tensor:
        """Return which tokens each token attends to, bool [1, 1, L, L]."""
        shared, same_caption = self.captions[None] == 0, self.captions[:, None] == self.captions[None]
        return torch.tril(shared | same_caption)[None, None]


def draw_packed(seed: int, index: int, tokenizer: PreTrainedTokenizerFast) -> Packed:
    """Draw a training sample: a dense scene with one caption in every phrasing, as the chat template lays them out."""
    rng = scene_rng("train", seed, index)
    scene = draw_dense(rng, "train")
    image = render_like_a_file(scene, rng, IMAGE_PX)
    ids = tokenizer(BEFORE, add_special_tokens=False)["input_ids"]
    ids = ids + [tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)] * NUM_VISUAL_TOKENS
    start, rows = len(ids), [(token, 0.0, position, 0) for position, token in enumerate(ids)]
    for number, (phrasing, prompt) in enumerate(PROMPTS.items(), start=1):
        asked = f"\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        turn = zip(*encode_turn(asked, write_description(scene, phrasing, rng), tokenizer), strict=True)
        rows += [(token, weight, position, number) for position, (token, weight) in enumerate(turn, start=start)]
    encoded = [torch.tensor(part) for part in zip(*rows, strict=True)]
    return Packed(encoded[0], encoded[1], encoded[2], encoded[3], scene, image)


@torch.no_grad()
def draw_features(tower: nn.Module, seed: int, num_scenes: int) -> tuple[Tensor, Tensor]:
    """Return a tower's patch features [patches, width] of drawn scenes and the numbers of their words [patches]."""
    features, words = [], []
    for step in range(1, num_scenes // SCENES_PER_DRAW + 1):
        pixels, labels = draw_labelled(draw_dense, seed, step, label_patches, SCENES_PER_DRAW, IMAGE_PX)
        features.append(tower(pixel_values=pixels).last_hidden_state[:, 1:].flatten(0, 1))
        words.append(labels[-1].flatten())
    return torch.cat(features), torch.cat(words)


def fit_projector(projector: Any, tower: nn.Module, embeddings: Tensor, seed: int, steps: int) -> float:
    """Train a projector in place; return the share of patches whose nearest word is right, on scenes of another seed.

    `embeddings` are those of WORDS.
    """
    torch.manual_seed(seed)
    features, words = draw_features(tower, seed + 3, PROJECTOR_SCENES)
    first, second = projector.linear_1, projector.linear_2
    scale = embeddings.square().mean().sqrt()
    with torch.no_grad():  # the first layer starts on standardised features, the second near the embeddings' size
        mean, deviation = features.mean(0), features.std(0) + 1e-4
        first.weight.div_(deviation)
        first.bias.copy_(-first.weight @ mean)
        second.weight.mul_(scale)
        second.bias.zero_()
    projector.requires_grad_(True)
    optimizer = torch.optim.AdamW(projector.parameters(), lr=PROJECTOR_LR, weight_decay=0.0)
    schedule = OneCycleLR(optimizer, PROJECTOR_LR, total_steps=steps + 1, pct_start=0.1)
    order = torch.Generator().manual_seed(seed)

    def step_loss(step: int) -> Measured:
        chosen = torch.randint(len(features), (PROJECTOR_BATCH,), generator=order)
        return mse_loss(projector(features[chosen]) / scale, embeddings[words[chosen]] / scale), {}

    fit(step_loss, [schedule], projector.parameters(), steps, "projector")
    features, words = draw_features(tower, seed + 4, 4 * SCENES_PER_DRAW)
    with torch.no_grad():
        nearest = torch.cdist(projector(features), embeddings).argmin(-1)
    return float((nearest == words).float().mean())


class LowRankLinear(nn.Module):
    """A frozen linear layer plus `SCALE · up · down`; `down` [rank, in] starts random, `up` [out, rank] at zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.empty(RANK, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, RANK))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the layer's outputs [..., out] for inputs [..., in]."""
        base: Tensor = self.base(inputs)
        return base + SCALE * linear(linear(inputs, self.down), self.up)


def attach(model: nn.Module) -> dict[str, nn.Parameter]:
    """Replace the layers named in LAYERS by low-rank ones; return the new parameters by name.

    A parameter is named after the layer's weight: `….q_proj.weight.down` and `….q_proj.weight.up`.
    """
    parameters: dict[str, nn.Parameter] = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.rsplit(".", 1)[-1] in LAYERS:
            layer = LowRankLinear(module)
            parent, last = name.rsplit(".", 1)
            setattr(model.get_submodule(parent), last, layer)
            parameters |= {f"{name}.weight.down": layer.down, f"{name}.weight.up": layer.up}
    return parameters


class Learner:
    """Learns differences and projector of a LLaVA model, one packed sample a step; all but `parameters` is frozen."""

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
        self.model, self.tokenizer = model.requires_grad_(False), tokenizer
        self.projector = model.model.multi_modal_projector
        added = attach(model.model.language_model)
        self.parameters = {f"model.language_model.{name}": parameter for name, parameter in added.items()}
        for module in model.modules():
            if isinstance(module, LowRankLinear):
                module.base.to(torch.bfloat16)
        self.words = word_embeddings(model.get_input_embeddings().weight.detach(), tokenizer)
        self.vocabulary = model.lm_head.weight.detach().to(torch.bfloat16)

    def visual(self, packed: Packed, as_words: bool) -> Tensor:
        """Return the visual columns of a sample, [256, hidden]."""
        if as_words:
            return self.words[word_numbers(packed.scene).flatten()]
        features: Tensor = self.model.model.get_image_features(pixels_of([packed.image])).pooler_output[0]
        return features.float()

    @torch.autocast("cpu", torch.bfloat16)  # type: ignore[untyped-decorator]
    def losses(self, packed: Packed, as_words: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss, correctness and weight of every token that is learned."""
        embedded = self.model.get_input_embeddings()(packed.ids)
        is_image = packed.ids == self.model.config.image_token_id
        embedded = embedded.masked_scatter(is_image[:, None], self.visual(packed, as_words))
        mask = torch.zeros(packed.mask.shape).masked_fill(~packed.mask, torch.finfo(torch.float32).min)
        hidden = self.model.model.language_model(
            inputs_embeds=embedded[None],
            attention_mask=mask.to(torch.bfloat16),
            position_ids=packed.positions[None],
            use_cache=False,
        ).last_hidden_state[0]
        learned = packed.weights > 0
        logits = linear(hidden[learned.nonzero().flatten() - 1].to(torch.bfloat16), self.vocabulary).float()
        wanted = packed.ids[learned]
        return cross_entropy(logits, wanted, reduction="none"), logits.argmax(-1) == wanted, packed.weights[learned]

    def train(self, word_steps: int, steps: int, cooldown_steps: int, seed: int) -> None:
        """Train with words as visual columns, from step `word_steps` on with the images; the rate falls at the end."""

        def share(step: int) -> float:
            return min(1.0, (step + 1) / WARMUP_STEPS) * min(1.0, (steps - step) / cooldown_steps)

        def step_loss(step: int) -> Measured:
            as_words = step <= word_steps
            self.projector.requires_grad_(not as_words)
            losses, right, weights = self.losses(draw_packed(seed, step - 1, self.tokenizer), as_words)
            return (losses * weights).sum() / weights.sum(), {"right": right.float().mean().item()}

        groups = [{"params": [*self.parameters.values()], "lr": LR}]
        groups += [{"params": [*self.projector.parameters()], "lr": LR * PROJECTOR_LR_SHARE}]
        fit_adam(step_loss, groups, share, steps, "language", betas=(0.9, 0.98), weight_decay=0.0)


def train(path: Path, seed: int) -> None:
    """Train all stages and write the packed file."""
    tower = build_tower(seed)
    label = partial(draw_labelled, draw_dense, seed + 1, label=label_patches, batch=TOWER_BATCH, image_px=IMAGE_PX)
    pretrain_tower(tower, TOWER_STEPS, seed, label, HEADS, torch.bfloat16)
    tokenizer = load_tokenizer()
    model: LlavaForConditionalGeneration = build_model(tokenizer).eval()
    learner = Learner(model, tokenizer)
    model.model.vision_tower.load_state_dict(tower.state_dict())
    right = fit_projector(learner.projector, model.model.vision_tower, learner.words, seed, PROJECTOR_STEPS)
    report(f"nearest word right for {right:.4f} of the patches")
    learner.train(WORD_STEPS, STEPS, COOLDOWN_STEPS, seed)
    rest = {
        name: tensor for name, tensor in model.state_dict().items() if ".vision_tower." in name or "_projector." in name
    }
    packed = {name: parameter.detach() for name, parameter in learner.parameters.items()} | rest
    report(f"{path}: {pack(packed, path, {'weights_sha256': WEIGHTS_SHA256}):,} bytes")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m zoo.real_vision.recipe", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=VISION_TARGET, help="file to write (default: the shipped one)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    train(options.out, options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
