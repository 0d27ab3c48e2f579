"""Drafters cut from a target: a copy of the target with some of its decoder layers, trained on its distributions.

Such a drafter is a model of its own, which reads the same prompts, images and videos included, and is written as a
transformers checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.heads.training.chunks import sum_in_chunks
from models.heads.training.losses import HeadTask, width_of
from models.heads.training.teacher import States
from models.loading.inspection import parts_of
from models.target import Target


class LayerCutTask(HeadTask):
    """Distillation loss: cross-entropy of the drafter's distribution of each token with the target's, at temperature 1.

    Its gradient is that of the KL divergence. Position t of `module`, a transformers model with an output layer,
    predicts token t + 1; `target_head` is the output layer of the target. Embeddings of visual tokens are those that
    the target receives, so `module` must make the same ones.
    """

    def __init__(self, module: nn.Module, target_head: nn.Module) -> None:
        self.module = module
        self.decoder, self.head = parts_of(module, "the drafter")
        self._target_head = target_head

    def counts(self, wanted: Tensor) -> list[int]:
        return [int(wanted[1:].sum())]

    def sums(self, states: States, noise: Tensor) -> Tensor:
        """See `HeadTask.sums`; no features are read, so `noise` is not used."""
        use = states.wanted[:, 1:]
        dtype = next(self._target_head.parameters()).dtype

        def tokens(mine: Tensor, true: Tensor) -> Tensor:
            with torch.no_grad():
                probs = self._target_head(true.to(dtype)).float().softmax(dim=-1)
            return F.cross_entropy(self.head(mine).float(), probs, reduction="sum")[None]

        given = [self._run(states)[:, :-1][use]]
        weights = list(self.head.parameters())
        return sum_in_chunks(tokens, given, [states.hidden[:, :-1][use]], weights, width_of(self._target_head))

    def logits(self, states: States) -> Tensor:
        logits: Tensor = self.head(self._run(states)[:, 1:-1])
        return logits.float()

    def _run(self, states: States) -> Tensor:
        """Return the drafter's last hidden states (b, L, D'); padding on the right is behind all tokens."""
        # An engine may have replaced the implementation.
        self.decoder.set_attn_implementation("sdpa")  # type: ignore[operator]
        visual = states.visual
        embeds: Tensor = self.decoder.get_input_embeddings()(states.tokens.masked_fill(visual, 0))  # type: ignore[operator]
        hidden: Tensor = self.decoder(
            inputs_embeds=torch.where(visual[..., None], states.received.to(embeds.dtype), embeds),
            # Without a mask, transformers takes rotary positions that are not consecutive for several sequences.
            attention_mask=torch.ones_like(states.tokens),
            position_ids=states.positions,
            use_cache=False,
        ).last_hidden_state
        return hidden


def cut_layers(target: Target, layers: Sequence[int], freeze_embeddings: bool) -> LayerCutTask:
    """Create a drafter in fp32 with copies of the target's decoder `layers`, in this order, and of all its other parts.

    Parts that make visual embeddings are not trained; with `freeze_embeddings`, neither are the token embedding and the
    output layer.
    """
    config: Any = copy.deepcopy(target.model.config)
    text = config.get_text_config()
    text.num_hidden_layers = len(layers)
    if types := getattr(text, "layer_types", None):
        text.layer_types = [types[layer] for layer in layers]
    config.dtype, config._attn_implementation = torch.float32, "sdpa"
    with torch.random.fork_rng(devices=[]):
        model: Any = type(target.model)(config).float().to(target.device)
    decoder, head = parts_of(model, "the drafter")
    prefix = next(name for name, module in model.named_modules() if module is decoder) + ".layers."
    weights = {name: value for name, value in target.model.state_dict().items() if not name.startswith(prefix)}
    for index, layer in enumerate(layers):
        chosen = target.decoder.layers[layer].state_dict()  # type: ignore[index,union-attr]
        weights |= {f"{prefix}{index}.{name}": value for name, value in chosen.items()}
    model.load_state_dict(weights)
    model.requires_grad_(False)
    decoder.requires_grad_(True)
    for part in (decoder.get_input_embeddings(), head):  # type: ignore[operator]
        part.requires_grad_(not freeze_embeddings)
    return LayerCutTask(model.eval(), target.head)


def save_model(module: nn.Module, processor: Any, folder: Path, dtype: torch.dtype) -> None:
    """Write a drafter with weights in `dtype`, and its processor or tokenizer, as a transformers checkpoint."""
    model: Any = copy.deepcopy(module).to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
