"""The image world's text encoder: a tokenizer and a tiny T5 encoder, trained to read prompts before any image is drawn.

The T5's training predicts the contents of each cell from the mean of its features. Image tokens of LlamaGen attend to a
prompt through exactly such a mean, because rotary zeros give all its positions the same weight.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, PreTrainedTokenizerFast, T5Config, T5EncoderModel

from zoo.world.grain import SIZES, draw_grainy_scene, write_prompt
from zoo.world.scene import COLOURS, NUM_CELLS, SHAPES, TONES, Scene, scene_rng

NUM_CONDITION_TOKENS = 24
CONDITION_DIM = 96
_SPECIALS = {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"}


def build_prompt_tokenizer() -> PreTrainedTokenizerFast:
    """Train the byte-level BPE tokenizer: every word of a prompt is one token, any other text falls into bytes."""
    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=list(_SPECIALS.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator([prompt for _, prompt in _prompts(1000, 0, 0)], trainer)
    eos = _SPECIALS["eos"]
    core.post_processor = processors.TemplateProcessing(
        single=f"$A {eos}", pair=f"$A {eos} $B {eos}", special_tokens=[(eos, core.token_to_id(eos))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token=_SPECIALS["unk"],
        eos_token=_SPECIALS["eos"],
        pad_token=_SPECIALS["pad"],
        model_max_length=NUM_CONDITION_TOKENS,
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )


def build_t5(tokenizer: PreTrainedTokenizerFast, seed: int) -> T5EncoderModel:
    """Build the untrained encoder, its weights drawn from a seed."""
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
    return T5EncoderModel(config)


def encode_prompts(t5: T5EncoderModel, tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> tuple[Tensor, Tensor]:
    """Return left-padded features [n, 24, 96], zero at padding, and the mask [n, 24] of real positions."""
    tokens = tokenizer(prompts, padding="max_length", truncation=True, return_tensors="pt")
    mask = tokens["attention_mask"].bool()
    features = t5(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).last_hidden_state
    # Encoded as a T5 is used to, pads at the right; then rolled, so that the first image token follows the prompt.
    order = (torch.arange(mask.shape[1]) + mask.sum(1, keepdim=True)) % mask.shape[1]
    mask = mask.gather(1, order)
    features = features.gather(1, order[:, :, None].expand_as(features))
    return features * mask[:, :, None], mask


def _prompts(num: int, seed: int, start: int) -> list[tuple[Scene, str]]:
    scenes = [draw_grainy_scene(scene_rng("grain/words", seed, start + n), "train") for n in range(num)]
    return [(scene, write_prompt(scene)) for scene in scenes]


def _answers(scenes: list[Scene]) -> Tensor:
    """Return per scene and cell the size, colour and shape (0: nothing), then the tone, [n, 28]."""
    rows = torch.zeros(len(scenes), NUM_CELLS * 3 + 1, dtype=torch.long)
    for row, scene in zip(rows, scenes):
        for thing in scene.things:
            values = (SIZES.index(thing.size), COLOURS.index(thing.colour), SHAPES.index(thing.shape))
            row[thing.cell * 3 : thing.cell * 3 + 3] = torch.tensor(values) + 1
        row[-1] = TONES.index(scene.tone)
    return rows


class Examiner(nn.Module):
    """Reads a scene from the mean of a prompt's features, and an object from the feature of its noun; for training."""

    WIDTHS = (len(SIZES) + 1, len(COLOURS) + 1, len(SHAPES) + 1) * NUM_CELLS + (len(TONES),)
    NOUN_WIDTHS = (NUM_CELLS, len(SIZES), len(COLOURS), len(SHAPES))

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Linear(CONDITION_DIM, 128, bias=False), nn.GELU())
        self.out = nn.Linear(128, sum(self.WIDTHS))
        self.noun = nn.Linear(CONDITION_DIM, sum(self.NOUN_WIDTHS))

    def forward(self, features: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        """Features [n, 24, 96] and their mask → one row of logits per answer."""
        weights = mask[:, :, None] / mask.sum(1)[:, None, None]
        return self.out((self.each(features) * weights).sum(1)).split(self.WIDTHS, dim=-1)

    def noun_loss(self, features: Tensor, scenes: list[Scene]) -> Tensor:
        """Return the loss of predicting each object's cell, size, colour and shape from the feature of its noun."""
        rows, columns, answers = [], [], []
        for row, scene in enumerate(scenes):
            ends = len(scene.things)
            for place, thing in enumerate(scene.things):
                # From the prompt's end: `</s>`, three words of ground, then per object four words after its noun.
                after = 4 + 4 + (ends - 1 - place) * 9
                rows.append(row)
                columns.append(features.shape[1] - 1 - after)
                values = (SIZES.index(thing.size), COLOURS.index(thing.colour), SHAPES.index(thing.shape))
                answers.append((thing.cell, *values))
        logits = self.noun(features[rows, columns]).split(self.NOUN_WIDTHS, dim=-1)
        wanted = torch.tensor(answers)
        return torch.stack([cross_entropy(part, wanted[:, n]) for n, part in enumerate(logits)]).sum()


def train_t5(
    num_steps: int,
    batch_size: int,
    lr: float,
    seed: int,
    report: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> tuple[T5EncoderModel, PreTrainedTokenizerFast]:
    """Train the tokenizer and the encoder from a seed."""
    tokenizer = build_prompt_tokenizer()
    t5 = build_t5(tokenizer, seed)
    examiner = Examiner()
    optimizer = torch.optim.AdamW([*t5.parameters(), *examiner.parameters()], lr=lr, weight_decay=0.01)
    total, right, started = 0.0, 0.0, time.monotonic()
    for step in range(1, num_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, step / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / num_steps)))
        drawn = _prompts(batch_size, seed, step * batch_size)
        answers = _answers([scene for scene, _ in drawn])
        features, mask = encode_prompts(t5, tokenizer, [prompt for _, prompt in drawn])
        logits = examiner(features, mask)
        loss = torch.stack([cross_entropy(part, answers[:, n]) for n, part in enumerate(logits)]).sum()
        loss = loss + examiner.noun_loss(features, [scene for scene, _ in drawn])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(t5.parameters(), 1.0)
        optimizer.step()
        total += loss.item()
        said = torch.stack([part.argmax(-1) for part in logits], dim=1)
        right += (said == answers).all(1).float().mean().item()
        if step % 50 == 0:
            rate = step * batch_size / (time.monotonic() - started)
            left_s = (num_steps - step) * batch_size / rate
            report(f"step {step}/{num_steps} loss {total / 50:.4f} read {right / 50:.3f} {left_s:.0f} s left")
            total = right = 0.0
    return t5.eval(), tokenizer


def load_t5(folder: Path) -> tuple[T5EncoderModel, PreTrainedTokenizerFast]:
    """Load the encoder, in float32, and its tokenizer from a folder of checkpoints."""
    path = folder / "image_t5"
    return T5EncoderModel.from_pretrained(path, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(path)


def save_t5(t5: T5EncoderModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save the encoder, turned into bfloat16, with its tokenizer; the Auto classes load the folder."""
    t5.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
