"""Define the losses of EAGLE and Medusa heads over teacher-forced samples, and create untrained heads for a target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.contract import TargetModel
from models.heads.config import LAYER_FIELDS
from models.heads.eagle import EagleNetwork, EagleShape
from models.heads.medusa import MedusaHeads, MedusaShape
from models.heads.training.chunks import sum_in_chunks
from models.heads.training.teacher import States
from models.kv.feature_layers import LAST

FEATURE_WEIGHT, TOKEN_WEIGHT = 1.0, 0.1
"""Weights of the two terms of EAGLE's loss (Li et al. 2024, equation 7); the second is from the public code."""


class HeadTask(ABC):
    """A head `module` and its loss, a sum of k terms, each of which is a mean over its own positions.

    `feature_layers` are the states of the target that the head reads.
    """

    module: nn.Module
    feature_layers: tuple[int, ...] = (LAST,)

    @abstractmethod
    def counts(self, wanted: Tensor) -> list[int]:
        """Return for each term the number of positions of `wanted` (L,) that it averages over."""

    @abstractmethod
    def sums(self, states: States, noise: Tensor) -> Tensor:
        """Return the terms (k,), each summed over its positions; `noise` (b, L, F) is added to input features."""

    @abstractmethod
    def logits(self, states: States) -> Tensor:
        """Return the logits (b, L − 2, V) in fp32 for token t + 2, given state t and token t + 1."""


class EagleTask(HeadTask):
    """EAGLE loss: SmoothL1 of predicted features plus 0.1 times the cross-entropy of their token distributions.

    Li et al. 2024 (arXiv 2401.15077), equations 5 to 7. Position t reads (feature t, embedding of token t + 1),
    predicts feature t + 1, and with it token t + 2. `head` is the output layer of the target.
    """

    def __init__(self, network: EagleNetwork, head: nn.Module) -> None:
        self.module = self.network = network
        self.head = head

    def counts(self, wanted: Tensor) -> list[int]:
        return [int(wanted[2:].sum())]

    def sums(self, states: States, noise: Tensor) -> Tensor:
        use = states.wanted[:, 2:]
        mine = self._guess(states, states.hidden + noise)[:, :-1][use]  # [used, D]
        true = states.hidden[:, 1:-1][use]

        def tokens(mine: Tensor, true: Tensor) -> Tensor:
            with torch.no_grad():
                probs = self._logits(true).softmax(dim=-1)
            return F.cross_entropy(self._logits(mine), probs, reduction="sum")[None]

        features = F.smooth_l1_loss(mine.float(), true, reduction="none").mean(dim=-1).sum()
        summed = sum_in_chunks(tokens, [mine], [true], [], width_of(self.head))
        return FEATURE_WEIGHT * features + TOKEN_WEIGHT * summed

    def logits(self, states: States) -> Tensor:
        return self._logits(self._guess(states, states.hidden)[:, :-1])

    def _guess(self, states: States, features: Tensor) -> Tensor:
        """Predict features (b, L − 1, D) from the same input pairs as in decoding; see `decoding.drafters.eagle`."""
        tokens = states.tokens[:, 1:]
        embeds = self.network.embed_tokens(torch.where(tokens < self.network.vocab_size, tokens, 0))
        embeds = torch.where(states.visual[:, 1:, None], states.received[:, 1:].to(embeds.dtype), embeds)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        guessed: Tensor = self.network(self.network.fuse(embeds, features[:, :-1]), positions).last_hidden_state
        return guessed

    def _logits(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features.to(next(self.head.parameters()).dtype))
        return logits.float()


class MedusaTask(HeadTask):
    """Medusa loss: cross-entropy by head; head i at token t predicts token t + 2 + i. Cai et al. 2024, equation 1."""

    def __init__(self, heads: MedusaHeads) -> None:
        self.module = self.heads = heads

    def counts(self, wanted: Tensor) -> list[int]:
        return [int(wanted[head + 2 :].sum()) for head in range(self.heads.shape.num_heads)]

    def sums(self, states: States, noise: Tensor) -> Tensor:
        terms = []
        for head in range(self.heads.shape.num_heads):
            use = states.wanted[:, head + 2 :]

            def tokens(hidden: Tensor, wanted: Tensor, head: int = head) -> Tensor:
                return F.cross_entropy(self.heads.logits(head, hidden), wanted, reduction="sum")[None]

            given = [states.hidden[:, : -head - 2][use], states.tokens[:, head + 2 :][use]]
            weights = list(self.heads[head].parameters())
            terms.append(sum_in_chunks(tokens, [], given, weights, self.heads.shape.vocab_size))
        return torch.cat(terms)

    def logits(self, states: States) -> Tensor:
        return self.heads.logits(0, states.hidden[:, :-2])


def width_of(head: nn.Module) -> int:
    """Return the number of rows V of an output layer."""
    return int(next(head.parameters()).shape[0])


def fresh_eagle(target: TargetModel, seed: int, make: Callable[[], EagleNetwork] | None = None) -> EagleTask:
    """Create an EAGLE head initialized from `seed`, with the target's token embedding, which is frozen.

    `make` creates the network for model families with their own; by default it is one layer of the target's sizes.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = EagleNetwork(_shape_like(target)) if make is None else make()
    with torch.no_grad():
        network.embed_tokens.weight.copy_(target.decoder.get_input_embeddings().weight)  # type: ignore[operator]
    network.embed_tokens.weight.requires_grad_(False)
    return EagleTask(network.to(target.device), target.head)


def _shape_like(target: TargetModel) -> EagleShape:
    """Return the shape of a head with the sizes of one layer of the target."""
    config: Any = target.decoder.config
    data = {name: getattr(config, name, None) for name in LAYER_FIELDS}
    # A head's positions are one-dimensional.
    data["rope_parameters"] = {
        name: value for name, value in config.rope_parameters.items() if not name.startswith("mrope")
    }
    data["vocab_size"] = target.decoder.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    return EagleShape.of(data, "the target")


def fresh_medusa(target: TargetModel, seed: int, num_heads: int) -> MedusaTask:
    """Create Medusa heads of one block each; blocks start as the identity, output layers as the target's."""
    weight: Tensor = target.head.weight  # type: ignore[assignment]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        heads = MedusaHeads(MedusaShape(num_heads, 1, weight.shape[1], weight.shape[0]))
    with torch.no_grad():
        for index in range(num_heads):
            heads.get_parameter(f"{index}.0.linear.bias").zero_()
            heads.get_parameter(f"{index}.1.weight").copy_(weight)
    return MedusaTask(heads.to(target.device))
