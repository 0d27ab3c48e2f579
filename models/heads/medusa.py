"""Define Medusa heads, which predict tokens at several distances from one hidden state.

Head i consists of residual blocks x + SiLU(W x + b) and a linear layer to the vocabulary. From the state of token t it
predicts token t + 2 + i. Cai et al. 2024 (arXiv 2401.10774), equation 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class MedusaShape:
    """Sizes of the heads, read from the weight file because published configs have a wrong number of heads."""

    num_heads: int
    num_blocks: int
    state_size: int
    vocab_size: int


class MedusaResBlock(nn.Module):
    """Residual block x + SiLU(W x + b); W is initialized with zeros."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """All Medusa heads, with the parameter names of public checkpoints."""

    def __init__(self, shape: MedusaShape) -> None:
        super().__init__(
            nn.Sequential(
                *(MedusaResBlock(shape.state_size) for _ in range(shape.num_blocks)),
                nn.Linear(shape.state_size, shape.vocab_size, bias=False),
            )
            for _ in range(shape.num_heads)
        )
        self.shape = shape

    def with_outputs(self, outputs: Sequence[nn.Module]) -> MedusaHeads:
        """Return heads with the same residual blocks and other output layers, one for each head."""
        other = MedusaHeads.__new__(MedusaHeads)
        pairs = zip(self, outputs, strict=True)
        nn.ModuleList.__init__(other, (nn.Sequential(*list(block.children())[:-1], output) for block, output in pairs))
        other.shape = self.shape
        return other

    def logits(self, head: int, hidden: Tensor) -> Tensor:
        """Compute logits (…, V) in fp32 of token t + 2 + `head` from states (…, D) of token t."""
        block = self[head]
        out: Tensor = block(hidden.to(next(block.parameters()).dtype))
        return out.float()
