"""Define the loss of MTP layers over several draft steps per token, and create a new layer for a target that has none.

Step k reads the layer's own output of step k − 1, as in decoding, where one layer is used repeatedly; see
`models.heads.training.eagle3_loss`. DeepSeek-AI 2024 (arXiv 2412.19437), section 2.2, has one layer per step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.heads.mtp import MtpNetwork, mtp_network
from models.heads.training.chunks import sum_in_chunks
from models.heads.training.eagle3_loss import STEP_DECAY, final_norm, unroll
from models.heads.training.losses import HeadTask, width_of
from models.heads.training.teacher import States
from models.target import Target


class MtpTask(HeadTask):
    """MTP loss: cross-entropy between the target's distributions and those of the layer's outputs, both computed by
    the target's output layer `head`, which is frozen. Step k has weight 0.8^k."""

    def __init__(self, network: MtpNetwork, head: nn.Module, num_draft_steps: int) -> None:
        self.module = self.network = network
        self.head = head
        self._num_draft_steps = num_draft_steps

    def counts(self, wanted: Tensor) -> list[int]:
        return [int(wanted[2 + step :].sum()) for step in range(self._num_draft_steps)]

    def sums(self, states: States, noise: Tensor) -> Tensor:
        rows, indices = states.wanted[:, 2:].nonzero(as_tuple=True)
        # A step before the first token of a sample has no loss; its output is that of the first token.
        mine = [
            outputs[rows, (indices - step).clamp_min(0)]
            for step, outputs in enumerate(self._unroll(states, states.features + noise))
        ]

        def terms(*chunks: Tensor) -> Tensor:
            *mine, hidden, indices = chunks
            with torch.no_grad():
                probs = self._logits(hidden).softmax(dim=-1)
            losses = [F.cross_entropy(self._logits(outputs), probs, reduction="none") for outputs in mine]
            sums = [STEP_DECAY**step * (each * (indices >= step)).sum() for step, each in enumerate(losses)]
            return torch.stack(sums)

        given = [states.hidden[:, 1:-1][rows, indices], indices]
        return sum_in_chunks(terms, mine, given, [], width_of(self.head))

    def logits(self, states: States) -> Tensor:
        return self._logits(next(self._unroll(states, states.features))[:, :-1])

    def _unroll(self, states: States, features: Tensor) -> Iterator[Tensor]:
        return unroll(self.network, states, features, states.positions[..., 1:], self._num_draft_steps)

    def _logits(self, outputs: Tensor) -> Tensor:
        logits: Tensor = self.head(outputs.to(next(self.head.parameters()).dtype))
        return logits.float()


def fresh_mtp(target: Target, seed: int, num_draft_steps: int = 3) -> MtpTask:
    """Create an MTP layer for a target, in fp32.

    The projection begins as the sum of both inputs, the decoder layer as the target's last layer with the same tensors,
    or initialized from `seed` if there is none, and the final norm as that of the target. Raises CheckpointError if
    the target's layers cannot make an MTP layer.
    """
    layers: Any = target.decoder.layers
    network = mtp_network(target.decoder, target.name).float()
    block = network.mtp_block
    shapes = {name: value.shape for name, value in block.state_dict().items()}
    states = [layer.state_dict() for layer in layers]
    alike = [state for state in states if {name: value.shape for name, value in state.items()} == shapes]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for value in block.parameters():
            if value.dim() > 1:
                value.normal_(std=getattr(network.config, "initializer_range", 0.02))
        if alike:
            block.load_state_dict(alike[-1])
        identity = torch.eye(network.hidden_size, device=network.eh_proj.weight.device)
        network.eh_proj.weight.copy_(identity.repeat(1, 2))
        post_norm: Any = network.post_norm
        post_norm.weight.copy_(final_norm(target.decoder))
    return MtpTask(network.requires_grad_(True), target.head, num_draft_steps)
