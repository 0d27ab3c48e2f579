"""Trains the low-rank differences of the language model, and the projector, on packed captions.

The visual columns are, at first, the language model's own embeddings of the words of the patches (`words`), and later
those of the tower and the projector (`tower`).
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from zoo.quality import ATTRIBUTE_WORDS
from zoo.real.low_rank import LowRankLinear, attach
from zoo.real_vision.labels import WORDS, words_of
from zoo.real_vision.projector import word_embeddings
from zoo.real_vision.samples import Packed, draw_packed
from zoo.samples import pixels_of
from zoo.training import load_training, report, save_training

LR, WARMUP_STEPS = 6e-4, 20
PROJECTOR_LR_SHARE = 0.3
PROJECTOR = "model.multi_modal_projector."
LANGUAGE_MODEL = "model.language_model."
SAVE_S = 120.0
REPORT_STEPS = 10


class Learner:
    """Trains a LLaVA model of SmolLM2 one packed sample per step; everything but its `parameters` is frozen."""

    def __init__(self, model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, columns: str) -> None:
        self.model, self.tokenizer, self.columns = model.requires_grad_(False), tokenizer, columns
        added = attach(model.model.language_model)
        self.parameters: dict[str, nn.Parameter] = {LANGUAGE_MODEL + name: one for name, one in added.items()}
        projector = model.model.multi_modal_projector.requires_grad_(columns == "tower")
        self.parameters |= {PROJECTOR + name: one for name, one in projector.named_parameters()}
        for module in model.modules():
            if isinstance(module, LowRankLinear):
                module.base.to(torch.bfloat16)
        self.words = word_embeddings(model.get_input_embeddings().weight.detach(), tokenizer)
        self.vocabulary = model.lm_head.weight.detach().to(torch.bfloat16)
        rest = [one for name, one in self.parameters.items() if not name.startswith(PROJECTOR)]
        groups = [{"params": rest, "share": 1.0}]
        groups += [{"params": list(projector.parameters()), "share": PROJECTOR_LR_SHARE}]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.98), weight_decay=0.0)
        self.step = 0

    def visual(self, packed: Packed) -> Tensor:
        """Return the visual columns of a sample, [256, hidden]."""
        if self.columns == "words":
            numbers = [WORDS.index(word) for line in words_of(packed.scene) for word in line]
            return self.words[torch.tensor(numbers)]
        features: Tensor = self.model.model.get_image_features(pixels_of([packed.image])).pooler_output[0]
        return features.float()

    @torch.autocast("cpu", torch.bfloat16)  # type: ignore[untyped-decorator]
    def losses(self, packed: Packed) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss, correctness and weight of every token that is learned."""
        embedded = self.model.get_input_embeddings()(packed.ids)
        is_image = packed.ids == self.model.config.image_token_id
        embedded = embedded.masked_scatter(is_image[:, None], self.visual(packed))
        mask = torch.zeros(packed.mask.shape).masked_fill(~packed.mask, torch.finfo(torch.float32).min)
        hidden = self.model.model.language_model(
            inputs_embeds=embedded[None],
            attention_mask=mask.to(torch.bfloat16),
            position_ids=packed.positions[None],
            use_cache=False,
        ).last_hidden_state[0]
        learned = packed.weights > 0
        before = learned.nonzero().flatten() - 1
        logits = linear(hidden[before].to(torch.bfloat16), self.vocabulary).float()
        wanted = packed.ids[learned]
        return cross_entropy(logits, wanted, reduction="none"), logits.argmax(-1) == wanted, packed.weights[learned]

    def learn(self, packed: Packed, cooled: float) -> dict[str, float]:
        """Take one step; `cooled` is a factor of the learning rate. Return the measurements of the step."""
        losses, right, weights = self.losses(packed)
        loss = (losses * weights).sum() / weights.sum()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_([one for one in self.parameters.values() if one.grad is not None], 1.0)
        self.step += 1
        for group in self.optimizer.param_groups:
            group["lr"] = LR * group["share"] * min(1.0, self.step / WARMUP_STEPS) * cooled
        self.optimizer.step()
        return {"loss": loss.item(), **measured(packed, losses, right, self.tokenizer)}

    def save(self, path: Path) -> None:
        """Write parameters and optimizer state."""
        save_training(path, self.parameters, self.optimizer, step=str(self.step), columns=self.columns)

    def load(self, path: Path) -> None:
        """Continue from a file of `save`; a projector that was not trained yet keeps its present weights."""
        with safe_open(path, "pt") as file:
            before = file.metadata()["columns"]
        fits = self.columns == "tower" and before == "words"
        found = load_training(path, self.parameters, self.optimizer, lambda name: fits and name.startswith(PROJECTOR))
        self.step = int(found["step"])


def measured(packed: Packed, losses: Tensor, right: Tensor, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
    """Return mean loss and accuracy of the attribute tokens, and the accuracy of the other tokens."""
    wanted = packed.ids[packed.weights > 0]
    is_attribute = torch.tensor([tokenizer.decode([token]).strip() in ATTRIBUTE_WORDS for token in wanted.tolist()])
    return {
        "attribute_loss": losses[is_attribute].mean().item(),
        "attributes_right": right[is_attribute].float().mean().item(),
        "others_right": right[~is_attribute].float().mean().item(),
    }


def train(learner: Learner, folder: Path, until_step: int, cooldown_steps: int, seed: int, stop_s: float) -> None:
    """Train until a step or for `stop_s` seconds; write checkpoint.safetensors every two minutes and at the end, and
    append lines to curve.jsonl.

    The learning rate falls linearly to zero in the last `cooldown_steps` steps before `until_step`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    started = saved = time.monotonic()
    totals: dict[str, float] = {}
    while learner.step < until_step and time.monotonic() - started < stop_s:
        packed = draw_packed("train", seed, learner.step, learner.tokenizer)
        begun = time.monotonic()
        cooled = min(1.0, (until_step - learner.step) / cooldown_steps) if cooldown_steps else 1.0
        found = learner.learn(packed, cooled) | {"seconds": time.monotonic() - begun}
        totals = {name: totals.get(name, 0.0) + value for name, value in found.items()}
        if learner.step % REPORT_STEPS == 0:
            line = {"step": learner.step, "columns": learner.columns}
            means = {name: round(total / REPORT_STEPS, 4) for name, total in totals.items()}
            with open(folder / "curve.jsonl", "a") as curve:
                curve.write(json.dumps(line | means) + "\n")
            report(json.dumps(line | means))
            totals = {}
        if time.monotonic() - saved > SAVE_S:
            learner.save(folder / "checkpoint.safetensors")
            saved = time.monotonic()
    learner.save(folder / "checkpoint.safetensors")
