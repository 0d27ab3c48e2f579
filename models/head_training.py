"""Training of EAGLE and Medusa heads on a frozen target's own states over teacher-forced conversations.

Owns the losses and the loop. Knows nothing of how the samples are drawn, nor of trees or decoding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.eagle import EagleNetwork, EagleShape
from models.medusa import MedusaHeads, MedusaShape

FEATURE_WEIGHT, TOKEN_WEIGHT = 1.0, 0.1
"""Weights of the two terms of EAGLE's loss (Li et al. 2024, equation 7; the second is the public code's)."""
FEATURE_NOISE = 0.2
"""Width of the uniform noise on EAGLE's input features, against the errors of its own outputs that it will read."""

Report = Callable[[str], None]


class Batch(Protocol):
    """Conversations of one batch, right-padded: `ids` [b, L], `weights` [b, L] above 0 where a token is the target's to
    say, `mask` [b, L], `pixels` of all their images or None."""

    @property
    def ids(self) -> Tensor: ...
    @property
    def weights(self) -> Tensor: ...
    @property
    def mask(self) -> Tensor: ...
    @property
    def pixels(self) -> Tensor | None: ...

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        ...


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@torch.no_grad()
def teacher_states(target: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Run the target over whole conversations: its language model's inputs and last states, [b, L, hidden] fp32."""
    seen: dict[str, Any] = {}

    def record(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        seen.update(kwargs)

    model: Any = target
    handle = model.get_decoder().register_forward_pre_hook(record, with_kwargs=True)
    inputs = {"input_ids": batch.ids, "attention_mask": batch.mask}
    if batch.pixels is not None:
        inputs["pixel_values"] = batch.pixels.to(model.dtype)
    try:
        hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
    finally:
        handle.remove()
    embeds = seen.get("inputs_embeds")
    if embeds is None:
        embeds = model.get_input_embeddings()(batch.ids)
    return embeds.float(), hidden.float()


def untrained_eagle(target: nn.Module, seed: int) -> EagleNetwork:
    """A head of the target's own sizes with its token embedding, which stays frozen; the rest is drawn from a seed."""
    model: Any = target
    text = model.config.get_text_config()
    names: tuple[str, ...] = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    names += ("rms_norm_eps", "hidden_act", "max_position_embeddings")
    sizes = {name: getattr(text, name, None) for name in names}
    # A head's positions count pairs, in one dimension: the sections of a three-dimensional rotary mean nothing to it.
    rope = {name: value for name, value in text.rope_parameters.items() if not name.startswith("mrope")}
    sizes["rope_parameters"] = rope
    embedding: Tensor = model.get_input_embeddings().weight
    torch.manual_seed(seed)
    network = EagleNetwork(EagleShape.of({"vocab_size": embedding.shape[0], **sizes}, "the target"))
    with torch.no_grad():
        network.embed_tokens.weight.copy_(embedding)
    network.embed_tokens.weight.requires_grad_(False)
    return network.to(embedding.device)


def eagle_loss(network: EagleNetwork, head: nn.Module, embeds: Tensor, hidden: Tensor, wanted: Tensor) -> Tensor:
    """SmoothL1 between guessed and true features plus 0.1 times the soft cross-entropy of the tokens they say.

    `embeds`, `hidden` [b, L, D] of a conversation, `wanted` [b, L] which tokens are the target's to say. Position t of
    the head reads (feature t, embedding of token t + 1), guesses feature t + 1, and with it token t + 2.
    """
    features = hidden[:, :-1] + (torch.rand_like(hidden[:, :-1]) - 0.5) * FEATURE_NOISE
    positions = torch.arange(features.shape[1], device=features.device)[None]
    guessed = network(network.fuse(embeds[:, 1:], features), positions).last_hidden_state
    use = wanted[:, 2:]
    mine, true = guessed[:, :-1][use], hidden[:, 1:-1][use]  # [used, D]
    feature_loss = F.smooth_l1_loss(mine, true)
    with torch.no_grad():
        said = head(true.to(_dtype(head))).float().softmax(dim=-1)
    token_loss = F.cross_entropy(head(mine.to(_dtype(head))).float(), said)
    return FEATURE_WEIGHT * feature_loss + TOKEN_WEIGHT * token_loss


def eagle_logits(network: EagleNetwork, head: nn.Module, embeds: Tensor, hidden: Tensor) -> Tensor:
    """What an EAGLE head says of token t + 2 from the true state at t, [b, L − 2, V]."""
    positions = torch.arange(hidden.shape[1] - 1, device=hidden.device)[None]
    guessed = network(network.fuse(embeds[:, 1:], hidden[:, :-1]), positions).last_hidden_state
    logits: Tensor = head(guessed[:, :-1].to(_dtype(head)))
    return logits.float()


def medusa_logits(heads: MedusaHeads, hidden: Tensor) -> Tensor:
    """What the first Medusa head says of token t + 2 from the state at t, [b, L − 2, V]."""
    return heads.logits(0, hidden[:, :-2])


def medusa_loss(heads: MedusaHeads, hidden: Tensor, ids: Tensor, wanted: Tensor) -> Tensor:
    """Sum over the heads of the cross-entropy of the token that each is for: head i at position t says token t + 2 + i.

    `hidden` [b, L, D], `ids` [b, L], `wanted` [b, L] which tokens are the target's to say.
    """
    loss = hidden.new_zeros(())
    for head in range(heads.shape.num_heads):
        ahead = head + 2
        use = wanted[:, ahead:]
        loss = loss + F.cross_entropy(heads.logits(head, hidden[:, :-ahead][use]), ids[:, ahead:][use])
    return loss


def train_eagle(
    target: nn.Module, samples: Iterable[Batch], steps: int, seed: int, lr: float = 1e-3, report: Report = _to_stderr
) -> EagleNetwork:
    """Train a fresh EAGLE head for `steps` batches; the target is not changed."""
    network = untrained_eagle(target, seed)
    head: Any = target.get_output_embeddings()  # type: ignore[operator]

    def loss_of(batch: Batch) -> Tensor:
        embeds, hidden = teacher_states(target, batch)
        return eagle_loss(network, head, embeds, hidden, batch.weights > 0)

    _train(network, loss_of, target, samples, steps, seed, lr, report)
    return network


def train_medusa(
    target: nn.Module,
    samples: Iterable[Batch],
    steps: int,
    seed: int,
    num_heads: int = 5,
    lr: float = 1e-3,
    report: Report = _to_stderr,
) -> MedusaHeads:
    """Train fresh Medusa heads of one block each for `steps` batches; the target is not changed.

    A head starts as the target's own output layer, with a block that does nothing.
    """
    weight: Tensor = target.get_output_embeddings().weight  # type: ignore[operator]
    torch.manual_seed(seed)
    heads = MedusaHeads(MedusaShape(num_heads, 1, weight.shape[1], weight.shape[0])).to(weight.device)
    with torch.no_grad():
        for head in range(num_heads):
            heads.get_parameter(f"{head}.0.linear.bias").zero_()
            heads.get_parameter(f"{head}.1.weight").copy_(weight)

    def loss_of(batch: Batch) -> Tensor:
        _, hidden = teacher_states(target, batch)
        return medusa_loss(heads, hidden, batch.ids, batch.weights > 0)

    _train(heads, loss_of, target, samples, steps, seed, lr, report)
    return heads


@torch.enable_grad()
def _train(
    module: nn.Module,
    loss_of: Callable[[Batch], Tensor],
    target: nn.Module,
    samples: Iterable[Batch],
    steps: int,
    seed: int,
    lr: float,
    report: Report,
) -> None:
    torch.manual_seed(seed + 1)  # the noise on the features
    frozen = [(parameter, parameter.requires_grad) for parameter in target.parameters()]
    for parameter, _ in frozen:
        parameter.requires_grad_(False)
    target.eval()
    module.train()
    learned = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps + 1, pct_start=0.1)
    total, count = 0.0, 0
    batches: Iterator[Batch] = islice(iter(samples), steps)
    for step, batch in enumerate(batches, start=1):
        loss = loss_of(batch.to(next(target.parameters()).device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        schedule.step()
        total, count = total + loss.item(), count + 1
        if step % 100 == 0 or step == steps:
            report(f"step {step}/{steps} loss {total / count:.4f}")
            total, count = 0.0, 0
    for parameter, needed in frozen:
        parameter.requires_grad_(needed)
    module.eval()


def _dtype(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype
