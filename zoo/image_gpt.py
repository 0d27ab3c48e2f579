"""Training of the image world's GPTs on codes: teacher-forced, one tenth of the conditions left out.

Owns their sizes, the columns and masks of a training batch, and the loop. Knows nothing of pixels beyond asking the VQ
model for codes.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, T5EncoderModel

from models.llamagen.gpt import Gpt
from models.llamagen.shape import GptShape
from models.llamagen.vq import Vq
from zoo.image_text import CONDITION_DIM, NUM_CONDITION_TOKENS, encode_prompts
from zoo.image_vq import VQ_SHAPE, pixels_of
from zoo.world.grain import draw_grainy_scene, render_grainy, write_prompt
from zoo.world.scene import COLOURS, SHAPES, Scene, scene_rng

IMAGE_PX = 96
GRID = IMAGE_PX // VQ_SHAPE.factor
# The share of the conditions that training replaces by "nothing said", for guidance.
DROPPED_SHARE = 0.1
# A class is the colour and the shape of an image's only object.
NUM_CLASSES = len(COLOURS) * len(SHAPES)

_TEXT = {"condition": "text", "num_condition_tokens": NUM_CONDITION_TOKENS, "condition_dim": CONDITION_DIM}
_CLASS = {"condition": "class", "num_condition_tokens": 1, "num_classes": NUM_CLASSES}
_CODES = {"vocab_size": VQ_SHAPE.codebook_size, "grid": GRID}
SHAPES_OF = {
    "target": GptShape(dim=128, num_layers=6, num_heads=4, ffn_dim=384, **_CODES, **_TEXT),
    "drafter": GptShape(dim=64, num_layers=2, num_heads=2, ffn_dim=192, **_CODES, **_TEXT),
    "class_target": GptShape(dim=64, num_layers=4, num_heads=2, ffn_dim=192, **_CODES, **_CLASS),
}


@dataclass(frozen=True)
class Codes:
    """Encoded images: codes [n, 144] and for each its condition, a row of `features` and `mask`, or a label."""

    codes: Tensor
    features: Tensor | None
    mask: Tensor | None
    labels: Tensor | None


def class_of(scene: Scene) -> int:
    """Return the class of a scene with one object."""
    (thing,) = scene.things
    return COLOURS.index(thing.colour) * len(SHAPES) + SHAPES.index(thing.shape)


def draw_scenes(kind: str, split: str, num: int, seed: int, start: int = 0) -> list[Scene]:
    """Return scenes for a condition: `text` has one or two objects, `class` has one."""
    only = 1 if kind == "class" else None
    return [draw_grainy_scene(scene_rng(f"grain/{split}", seed, start + n), split, only) for n in range(num)]


@torch.no_grad()
def encode_scenes(
    kind: str, scenes: list[Scene], vq: Vq, t5: T5EncoderModel | None, tokenizer: PreTrainedTokenizerFast | None
) -> Codes:
    """Render and encode scenes, and with `t5` their prompts."""
    codes = []
    for first in range(0, len(scenes), 50):
        pixels = pixels_of([render_grainy(scene) for scene in scenes[first : first + 50]])
        codes.append(vq.encode(pixels).flatten(1))
    if kind == "class":
        return Codes(torch.cat(codes), None, None, torch.tensor([class_of(scene) for scene in scenes]))
    assert t5 is not None
    assert tokenizer is not None
    parts = [
        encode_prompts(t5, tokenizer, [write_prompt(scene) for scene in scenes[first : first + 500]])
        for first in range(0, len(scenes), 500)
    ]
    return Codes(torch.cat(codes), torch.cat([f for f, _ in parts]), torch.cat([m for _, m in parts]), None)


def attention_mask(mask: Tensor, num_tokens: int) -> Tensor:
    """Return who sees whom, bool [n, 1, L, L], for real columns [n, columns] followed by `num_tokens` columns.

    Causal; pads at the left are seen by nobody but themselves.
    """
    seen = torch.cat([mask, mask.new_ones(len(mask), num_tokens)], dim=1)
    length = seen.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    own = torch.eye(length, dtype=torch.bool)
    return (causal & seen[:, None, :] | own)[:, None]


def code_logits(gpt: Gpt, batch: Codes, dropped: Tensor) -> Tensor:
    """Return the logits [n, 144, V] before each code; rows of `dropped` [n] have their condition left out."""
    if batch.labels is not None:
        labels = torch.where(dropped, gpt.shape.num_classes, batch.labels)
        columns = gpt.condition(labels)[:, None]
        mask = torch.ones(len(labels), 1, dtype=torch.bool)
    else:
        assert batch.features is not None
        assert batch.mask is not None
        mask = batch.mask
        # The null columns stand under the row's own pads, as in the second lane of guidance.
        columns = torch.where(dropped[:, None, None], gpt.null_text(), gpt.embed_text(batch.features))
    inputs = torch.cat([columns, gpt.embed_tokens(batch.codes[:, :-1])], dim=1)
    positions = torch.arange(inputs.shape[1]).expand(len(inputs), -1)
    hidden = gpt(inputs, positions, attention_mask(mask, batch.codes.shape[1] - 1)).last_hidden_state
    logits: Tensor = gpt.output(hidden[:, columns.shape[1] - 1 :])
    return logits


def pick(codes: Codes, rows: Tensor) -> Codes:
    """Return some rows."""
    parts = (codes.features, codes.mask, codes.labels)
    return Codes(codes.codes[rows], *(None if part is None else part[rows] for part in parts))


def build_gpt(role: str, seed: int) -> Gpt:
    """Build an untrained GPT, its weights drawn from a seed."""
    torch.manual_seed(seed)
    gpt = Gpt(SHAPES_OF[role])
    for name, parameter in gpt.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02 if name != "output.weight" else 0.01)
    return gpt


def train_gpt(
    gpt: Gpt,
    codes: Codes,
    num_steps: int,
    batch_size: int,
    lr: float,
    seed: int,
    autosave: Path | None = None,
    report: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> None:
    """Train a GPT in place on encoded images, drawn anew in each pass; `autosave` gets its weights every 250 steps."""
    generator = torch.Generator().manual_seed(seed)
    decayed = [p for name, p in gpt.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in gpt.named_parameters() if not (p.ndim == 2 and "embed" not in name)]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))
    order = torch.empty(0, dtype=torch.long)
    total, started = 0.0, time.monotonic()
    gpt.train()
    for step in range(1, num_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, step / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / num_steps)))
        if len(order) < batch_size:
            order = torch.randperm(len(codes.codes), generator=generator)
        batch, order = pick(codes, order[:batch_size]), order[batch_size:]
        dropped = torch.rand(batch_size, generator=generator) < DROPPED_SHARE
        # bfloat16 products are faster on the CPUs that have them; the weights stay in float32.
        with torch.autocast("cpu", torch.bfloat16):
            logits = code_logits(gpt, batch, dropped)
        loss = cross_entropy(logits.flatten(0, 1).float(), batch.codes.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        total += loss.item()
        if step % 50 == 0:
            rate = step * batch_size / (time.monotonic() - started)
            left_s = (num_steps - step) * batch_size / rate
            report(f"step {step}/{num_steps} loss {total / 50:.4f} {rate:.1f} images/s, {left_s:.0f} s left")
            total = 0.0
        if autosave is not None and step % 250 == 0:
            save_file({name: value.contiguous() for name, value in gpt.state_dict().items()}, autosave)
    gpt.eval()
