"""Define the loss of EAGLE-3 heads over several draft steps per token ("training-time test"), and create new heads.

In step k, position t reads the head's own output of step k − 1 and the embedding of token t + 1 + k, and predicts token
t + 2 + k. It attends to the pairs of step 0 up to t, which have the target's features, and to its own pairs of steps 1
to k, as in decoding. Li et al. 2025 (arXiv 2503.01840), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig

from models.contract import TargetModel
from models.heads.config import LAYER_FIELDS
from models.heads.eagle import FeatureStack
from models.heads.eagle3 import Eagle3Network, Eagle3Shape
from models.heads.training.chunks import sum_in_chunks
from models.heads.training.losses import HeadTask
from models.heads.training.teacher import States

IMPLEMENTATION = "draftfleet_training"
STEP_DECAY = 0.8
"""Weight of a draft step in the loss, relative to the step before; from the public code."""


class EarlierPairs:
    """Keys and values (b, H_kv, L, D_h) by layer, to which the next forward of a head attends besides its own."""

    def __init__(self) -> None:
        self._keys: dict[int, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}

    def add(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values of a layer; return all of this layer, one behind the other."""
        keys, values = self._keys.setdefault(layer, []), self._values.setdefault(layer, [])
        keys.append(key)
        values.append(value)
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)


def attend_earlier(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    earlier: EarlierPairs | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return the attention output (b, L, H, D_h) over earlier pairs and the own ones, as transformers expects it."""
    assert earlier is not None, "attention of training needs the earlier pairs"
    layer: int = module.layer_idx  # type: ignore[assignment]
    keys, values = earlier.add(layer, key, value)
    grouped = query.shape[1] != keys.shape[1]
    mixed = F.scaled_dot_product_attention(
        query, keys, values, attn_mask=attention_mask, scale=scaling, enable_gqa=grouped
    )
    return mixed.transpose(1, 2), None


AttentionInterface.register(IMPLEMENTATION, attend_earlier)


class Eagle3Task(HeadTask):
    """EAGLE-3 loss: cross-entropy between the target's and the head's distributions over the draft vocabulary.

    Step k has weight 0.8^k. Positions whose likeliest token is outside the draft vocabulary have no loss. `target_head`
    is the output layer of the target, `num_draft_steps` the number of steps.
    """

    def __init__(self, network: Eagle3Network, target_head: nn.Module, vocab_size: int, num_draft_steps: int) -> None:
        self.module = self.network = network
        self.feature_layers = network.feature_layers
        self.head = network.output_layer(vocab_size)
        self._target_head = target_head
        self._num_draft_steps = num_draft_steps
        self._is_drafted = torch.zeros(vocab_size, dtype=torch.bool, device=network.token_ids.device)
        self._is_drafted[network.token_ids] = True

    def counts(self, wanted: Tensor) -> list[int]:
        return [int(wanted[2 + step :].sum()) for step in range(self._num_draft_steps)]

    def sums(self, states: States, noise: Tensor) -> Tensor:
        rows, indices = states.wanted[:, 2:].nonzero(as_tuple=True)
        # A step before the first token of a sample has no loss; its output is that of the first token.
        mine = [
            outputs[rows, (indices - step).clamp_min(0)]
            for step, outputs in enumerate(self._unroll(states, states.features + noise))
        ]
        network, dtype = self.network, next(self._target_head.parameters()).dtype
        norm = nn.Identity() if network.shape.norm_output else network.norm

        def terms(*chunks: Tensor) -> Tensor:
            *mine, hidden, indices = chunks
            with torch.no_grad():
                wanted: Tensor = self._target_head(hidden.to(dtype)).float()
                is_drafted = self._is_drafted[wanted.argmax(dim=-1)]
                probs = wanted[:, network.token_ids].softmax(dim=-1)
            sums = []
            for step, outputs in enumerate(mine):
                losses = F.cross_entropy(network.lm_head(norm(outputs)).float(), probs, reduction="none")
                sums.append(STEP_DECAY**step * (losses * (is_drafted & (indices >= step))).sum())
            return torch.stack(sums)

        given = [states.hidden[:, 1:-1][rows, indices], indices]
        weights = [network.lm_head.weight, *norm.parameters()]
        return sum_in_chunks(terms, mine, given, weights, self._is_drafted.shape[0])

    def logits(self, states: States) -> Tensor:
        outputs = next(self._unroll(states, states.features))
        logits: Tensor = self.head(outputs[:, :-1])
        return logits.float()

    def _unroll(self, states: States, features: Tensor) -> Iterator[Tensor]:
        num_pairs = states.tokens.shape[1] - 1
        indices = torch.arange(num_pairs, device=states.tokens.device)[None]
        positions = states.positions[..., :-1] if self.network.takes_axes else indices
        return unroll(self.network, states, features, positions, self._num_draft_steps)


def unroll(
    network: FeatureStack, states: States, features: Tensor, positions: Tensor, num_draft_steps: int
) -> Iterator[Tensor]:
    """Yield the outputs (b, L − 1, D) of a network in each draft step; the last `step` positions have no valid input.

    `features` (b, L, F) are those of the target, and `positions` (…, L − 1) the rotary positions of the pairs.
    """
    tokens = torch.where(states.tokens < network.vocab_size, states.tokens, 0)
    embeds = network.embed_tokens(tokens)
    embeds = torch.where(states.visual[:, :, None], states.received.to(embeds.dtype), embeds)[:, 1:]
    num_pairs = embeds.shape[1]
    indices = torch.arange(num_pairs, device=embeds.device)
    causal, diagonal = indices[:, None] >= indices, indices[:, None] == indices
    outputs = network.project(features[:, :-1])
    # An engine may have replaced the implementation.
    network.set_attn_implementation(IMPLEMENTATION)
    earlier = EarlierPairs()
    for step in range(num_draft_steps):
        mask = torch.cat([causal, *[diagonal] * step], dim=1)[None, None]
        ahead = F.pad(embeds[:, step:], (0, 0, 0, min(step, num_pairs)))
        inputs = network.fuse(ahead, outputs)
        outputs = network(inputs, positions + step, attention_mask=mask, earlier=earlier).last_hidden_state
        yield outputs


def default_feature_layers(num_layers: int) -> tuple[int, ...]:
    """Return the usual feature layers of a target with `num_layers` layers: 2, N / 2 and N − 3, or others if the target
    has too few layers. There are three, as vLLM requires, if the target has three layers."""
    usual = (2, num_layers // 2, num_layers - 3)
    if usual[0] < usual[1] < usual[2]:
        return usual
    spaced = sorted({min(num_layers - 1, round(part * num_layers / 4)) for part in (1, 2, 3)})
    return tuple(spaced if len(spaced) == 3 else range(min(3, num_layers)))


def fresh_eagle3(
    target: TargetModel,
    seed: int,
    num_draft_steps: int = 3,
    token_ids: Sequence[int] | None = None,
    feature_layers: Sequence[int] | None = None,
    rotary: nn.Module | None = None,
) -> Eagle3Task:
    """Create an EAGLE-3 head of one layer with the target's sizes, initialized from `seed`.

    `token_ids` is the draft vocabulary, by default all tokens of the target's output layer; its rows initialize the
    head's own. The token embedding is the target's and frozen. `rotary` is passed to `Eagle3Network`.
    """
    config: Any = target.decoder.config
    fields = {name: getattr(config, name, None) for name in LAYER_FIELDS}
    rope = {name: value for name, value in config.rope_parameters.items() if not name.startswith("mrope")}
    embedding: Tensor = target.decoder.get_input_embeddings().weight  # type: ignore[operator]
    chosen = {name: value for name, value in fields.items() if value is not None}
    layers = LlamaConfig(**chosen, rope_parameters=rope, num_hidden_layers=1, vocab_size=embedding.shape[0])
    num_tokens = min(target.vocab_size, embedding.shape[0])
    ids = torch.tensor(sorted(token_ids) if token_ids is not None else range(num_tokens), dtype=torch.long)
    layer_ids = tuple(feature_layers or default_feature_layers(config.num_hidden_layers))
    shape = Eagle3Shape(layers, len(ids), config.hidden_size, layer_ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Eagle3Network(shape, rotary)
    network.token_ids = ids
    with torch.no_grad():
        network.embed_tokens.weight.copy_(embedding)
        output: Any = target.head
        network.lm_head.weight.copy_(output.weight[ids.to(target.device)])
        network.norm.weight.copy_(final_norm(target.decoder))
    network.embed_tokens.weight.requires_grad_(False)
    network.to(target.device)
    return Eagle3Task(network, target.head, target.vocab_size, num_draft_steps)


def final_norm(decoder: nn.Module) -> Tensor:
    """Return the weight of the target's final norm, ones for norms that have none."""
    norm: Any = getattr(decoder, "norm", None)
    weight: Tensor = getattr(norm, "weight", torch.ones(()))
    return weight
