"""Define the loss of block drafters, and create new ones.

The block at anchor p has token p and masks at the positions after it; the output at mask i predicts token p + i. Its
positions attend to each other and to the target's projected features before p, as in decoding. Chen et al. 2026 (arXiv
2602.06036).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config

from models.contract import TargetModel
from models.heads.block import BlockNetwork, BlockShape
from models.heads.config import LAYER_FIELDS
from models.heads.training.chunks import sum_in_chunks
from models.heads.training.eagle3_loss import IMPLEMENTATION, EarlierPairs, default_feature_layers, final_norm
from models.heads.training.losses import HeadTask, width_of
from models.heads.training.teacher import States

MAX_ANCHORS = 32
"""Maximum number of blocks of one sample; the anchors of a longer answer are spaced evenly."""


def anchors_of(wanted: Tensor) -> Tensor:
    """Return the anchors (A,) of a sample whose tokens to learn are `wanted` (L,): tokens of the answer that another
    one follows."""
    indices = (wanted[:-1] & wanted[1:]).nonzero()[:, 0]
    if len(indices) <= MAX_ANCHORS:
        return indices
    return indices[torch.linspace(0, len(indices) - 1, MAX_ANCHORS, device=indices.device).round().long()]


class BlockTask(HeadTask):
    """Block loss: cross-entropy between the target's and the drafter's distributions, over all masks of all blocks.

    Mask i has weight exp(−(i − 1) / γ), with γ half the block size. `embedding` and `head` are those of the target.
    """

    def __init__(self, network: BlockNetwork, embedding: nn.Module, head: nn.Module) -> None:
        self.module = self.network = network
        self.feature_layers = network.feature_layers
        self.embedding, self.head = embedding, head

    def counts(self, wanted: Tensor) -> list[int]:
        return [int(self._learned(wanted[None], anchors_of(wanted)[None]).sum())]

    def sums(self, states: States, noise: Tensor) -> Tensor:
        length = states.tokens.shape[1]
        anchors_by_sample = [anchors_of(wanted) for wanted in states.wanted]
        anchors = nn.utils.rnn.pad_sequence(anchors_by_sample, batch_first=True, padding_value=length)
        outputs = self._run(states, states.features + noise, anchors.clamp_max(length - 1))[:, :, 1:]
        use = self._learned(states.wanted, anchors)
        rows, blocks, masks = use.nonzero(as_tuple=True)
        # The state of a token predicts the next one.
        true = states.hidden[rows, anchors[rows, blocks] + masks]
        weights = torch.exp(-2.0 * masks / self.network.shape.block_size)

        def tokens(mine: Tensor, true: Tensor, weights: Tensor) -> Tensor:
            with torch.no_grad():
                probs = self._logits(true).softmax(dim=-1)
            return (F.cross_entropy(self._logits(mine), probs, reduction="none") * weights).sum()[None]

        return sum_in_chunks(tokens, [outputs[use]], [true, weights], [], width_of(self.head))

    def logits(self, states: States) -> Tensor:
        b, length = states.tokens.shape
        logits = torch.zeros(b, length - 2, width_of(self.head), device=states.tokens.device)
        # The block at token t + 1 drafts token t + 2. Only tokens to learn are asked for.
        indices = states.wanted[:, 2:].any(dim=0).nonzero()[:, 0]
        for chunk in torch.split(indices, MAX_ANCHORS):
            outputs = self._run(states, states.features, (chunk + 1).expand(b, -1))
            logits[:, chunk] = self._logits(outputs[:, :, 1])
        return logits

    def _learned(self, wanted: Tensor, anchors: Tensor) -> Tensor:
        """Return which masks (b, A, S − 1) are learned: those up to the end of the answer, of `wanted` (b, L), that the
        block's anchor (b, A) is in. An anchor L is padding."""
        positions = anchors[:, :, None] + torch.arange(1, self.network.shape.block_size, device=anchors.device)
        padded = F.pad(wanted, (0, self.network.shape.block_size))
        is_wanted = padded.gather(1, positions.flatten(1)).view_as(positions)
        return is_wanted.cumprod(dim=2).bool()

    def _run(self, states: States, features: Tensor, anchors: Tensor) -> Tensor:
        """Run the blocks at `anchors` (b, A); return the outputs (b, A, S, D) at all their positions."""
        network, size = self.network, self.network.shape.block_size
        b, length = states.tokens.shape
        tokens = torch.where(states.tokens < network.shape.vocab_size, states.tokens, 0)
        ids = tokens.gather(1, anchors)[:, :, None].repeat(1, 1, size)
        ids[:, :, 1:] = network.shape.mask_token_id
        context_positions = torch.arange(length, device=anchors.device)
        starts = anchors.repeat_interleave(size, dim=1)
        block = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(size)
        same_block = (block[:, None] == block).expand(b, -1, -1)
        mask = torch.cat([context_positions < starts[:, :, None], same_block], dim=2)[:, None]
        positions = (anchors[:, :, None] + torch.arange(size, device=anchors.device)).flatten(1)
        # An engine may have replaced the implementation.
        network.set_attn_implementation(IMPLEMENTATION)
        projected = network.project(features)
        context = EarlierPairs()
        for layer, pairs in enumerate(network.keys_and_values(projected, context_positions.expand(b, -1))):
            context.add(layer, *pairs)
        embeds = self.embedding(ids.flatten(1)).to(projected.dtype)
        outputs: Tensor = network(embeds, positions, attention_mask=mask, earlier=context).last_hidden_state
        return outputs.view(b, -1, size, outputs.shape[2])

    def _logits(self, outputs: Tensor) -> Tensor:
        logits: Tensor = self.head(outputs.to(next(self.head.parameters()).dtype))
        return logits.float()


def fresh_block(
    target: TargetModel,
    seed: int,
    mask_token_id: int,
    block_size: int = 8,
    num_layers: int = 2,
    feature_layers: tuple[int, ...] | None = None,
) -> BlockTask:
    """Create a block drafter of `num_layers` Qwen3 layers with the target's sizes, initialized from `seed`.

    The embedding and the output layer are the target's. `mask_token_id` is a token that no answer has.
    """
    config: Any = target.decoder.config
    fields = {name: getattr(config, name, None) for name in LAYER_FIELDS}
    rope = {name: value for name, value in config.rope_parameters.items() if not name.startswith("mrope")}
    embedding: Any = target.decoder.get_input_embeddings()  # type: ignore[operator]
    chosen = {name: value for name, value in fields.items() if value is not None}
    chosen |= {"rope_parameters": rope, "vocab_size": embedding.weight.shape[0], "num_hidden_layers": num_layers}
    chosen.setdefault("head_dim", config.hidden_size // config.num_attention_heads)
    chosen.setdefault("num_key_value_heads", config.num_attention_heads)
    layers = Qwen3Config(**chosen)
    read = tuple(feature_layers or default_feature_layers(config.num_hidden_layers))
    shape = BlockShape(layers, read, block_size, mask_token_id, embedding.weight.shape[0])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = BlockNetwork(shape)
        for module in network.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=layers.initializer_range)
    with torch.no_grad():
        network.get_parameter("norm.weight").copy_(final_norm(target.decoder))
    return BlockTask(network.to(target.device), embedding, target.head)
