"""Define Medusa heads, which predict tokens at several distances from one hidden state, and read and write their files.

Head i consists of residual blocks x + SiLU(W x + b) and a linear layer to the vocabulary. From the state of token t it
predicts token t + 2 + i. Cai et al. 2024 (arXiv 2401.10774), equation 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.heads import files
from models.loading.checkpoints import DTYPES, CheckpointError, CheckpointRef

WEIGHT_NAMES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors", "pytorch_model.bin")
_PREFIX = "medusa_head."
"""Prefix of tensor names of the heads in files of a whole model (Medusa-2)."""
_Value = TypeVar("_Value")
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.weight")


@dataclass(frozen=True)
class MedusaShape:
    """Sizes of the heads, read from the weight file because published configs have a wrong number of heads."""

    num_heads: int
    num_blocks: int
    hidden_size: int
    vocab_size: int

    @staticmethod
    def of(shapes: Mapping[str, tuple[int, ...]], where: str) -> MedusaShape:
        """Infer the sizes from names and shapes of a weight file; raises CheckpointError if they do not fit."""
        blocks = [tuple(map(int, match.groups())) for name in shapes if (match := _BLOCK.fullmatch(name))]
        if not blocks:
            raise CheckpointError(f"{where}: it holds no tensor named like 0.0.linear.weight, so no Medusa head")
        num_heads, num_blocks = (1 + max(numbers) for numbers in zip(*blocks, strict=True))
        last = shapes.get(f"0.{num_blocks}.weight", ())
        if len(last) != 2:
            raise CheckpointError(f"{where}: head 0 has {num_blocks} block(s), so 0.{num_blocks}.weight must be (V, D)")
        found = MedusaShape(num_heads, num_blocks, last[1], last[0])
        with torch.device("meta"):
            files.expect_shapes(where, shapes, files.shapes_of(MedusaHeads(found).state_dict()))
        return found


class ResBlock(nn.Module):
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
                *(ResBlock(shape.hidden_size) for _ in range(shape.num_blocks)),
                nn.Linear(shape.hidden_size, shape.vocab_size, bias=False),
            )
            for _ in range(shape.num_heads)
        )
        self.shape = shape

    def with_outputs(self, outputs: Sequence[nn.Module]) -> MedusaHeads:
        """Return heads with the same residual blocks and other output layers, one for each head."""
        other = MedusaHeads.__new__(MedusaHeads)
        pairs = zip(self, outputs, strict=True)
        nn.ModuleList.__init__(other, (nn.Sequential(*list(own.children())[:-1], output) for own, output in pairs))
        other.shape = self.shape
        return other

    def logits(self, head: int, hidden: Tensor) -> Tensor:
        """Compute logits (…, V) in fp32 of token t + 2 + `head` from states (…, D) of token t."""
        block = self[head]
        out: Tensor = block(hidden.to(next(block.parameters()).dtype))
        return out.float()


def read_medusa_shape(ref: CheckpointRef) -> MedusaShape | None:
    """Read the sizes of the heads in a local folder from file headers; None for a hub id, checked by `load_medusa`."""
    folder = files.head_folder(ref, WEIGHT_NAMES, weights=False)
    if not ref.is_folder:
        return None
    return MedusaShape.of(_own(files.read_shapes(files.weight_file(folder, WEIGHT_NAMES))), ref.path)


def load_medusa(ref: CheckpointRef, dtype: str, device: torch.device) -> MedusaHeads:
    """Load all heads in evaluation mode; `dtype` is a key of `DTYPES`, or "auto" for the stored type."""
    folder = files.head_folder(ref, WEIGHT_NAMES[:2])
    weights = _own(files.read_tensors(files.weight_file(folder, WEIGHT_NAMES)))
    shape = MedusaShape.of(files.shapes_of(weights), ref.path)
    heads = MedusaHeads(shape)
    heads.load_state_dict(weights, strict=True)
    heads.to(device=device, dtype=DTYPES.get(dtype, weights["0.0.linear.weight"].dtype))
    return heads.requires_grad_(False).eval()


def save_medusa(heads: MedusaHeads, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write `config.json` and `medusa_lm_head.pt` in the format of public checkpoints."""
    config = {"medusa_num_heads": heads.shape.num_heads, "medusa_num_layers": heads.shape.num_blocks}
    files.write_checkpoint(folder, config, heads.state_dict(), dtype, "medusa_lm_head.pt")


def _own(found: Mapping[str, _Value]) -> dict[str, _Value]:
    """Select the tensors of the heads and remove the prefix of their names in whole-model files."""
    inside = {name.removeprefix(_PREFIX): value for name, value in found.items() if name.startswith(_PREFIX)}
    return inside or dict(found)
