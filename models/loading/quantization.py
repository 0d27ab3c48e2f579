"""Linear layers with rounded weights and one scale per output, which use torch's own kernels.

`int8`: w ≈ s · q with q from −127 to 127 and s the largest |w| of the output's row over 127; inputs are not rounded.
`fp8`: q of float8_e4m3fn and s the largest |w| over 448; inputs are rounded as well, with a scale per row, so that no
row depends on others. Lossless decoding is lossless with respect to the rounded model.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.backends.select import backend_for

BLOCK = 16
"""Inputs and outputs that kernels read at once; with a rest they refuse, or write beyond their memory."""
LARGEST_INT8 = 127
FP8 = torch.float8_e4m3fn
LARGEST_FP8 = torch.finfo(FP8).max


class RoundedLinear(nn.Module):
    """A linear layer with rounded weights: `weight` (O, D), `scales` (O,) and `bias` of its type."""

    kind: ClassVar[str]
    block_of_outputs: ClassVar[int] = 1

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        assert self.takes(linear), (linear.in_features, linear.out_features)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight, scales = self._rounded(linear.weight.detach())
        self.weight: Tensor
        self.scales: Tensor
        self.bias: Tensor | None
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())

    @classmethod
    def takes(cls, linear: nn.Linear) -> bool:
        """Whether the kernel has this layer's sizes."""
        return linear.in_features % BLOCK == 0 and linear.out_features % cls.block_of_outputs == 0

    @classmethod
    def why_slow(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why the kernel is too slow there; None if it is not."""
        return backend_for(device).refuse_quantization(cls.kind, dtype)

    @staticmethod
    def _rounded(stored: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (O, D) → rounded ones and scales (O,)."""
        raise NotImplementedError

    def _multiplied(self, rows: Tensor) -> Tensor:
        """Inputs (n, D) → outputs (n, O), without bias."""
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        """Inputs (…, D) → outputs (…, O)."""
        out = self._multiplied(input.reshape(-1, self.in_features).contiguous())
        if self.bias is not None:
            out = out + self.bias
        return out.view(*input.shape[:-1], self.out_features)

    def dequantised(self) -> Tensor:
        """The weights that are multiplied, in fp32."""
        return self.weight.float() * self.scales.float()[:, None]


class Int8Linear(RoundedLinear):
    """Weights of int8, inputs as they are."""

    kind = "int8"

    @staticmethod
    def _rounded(stored: Tensor) -> tuple[Tensor, Tensor]:
        # The scale is rounded first, so that each weight becomes the nearest multiple of the scale that is multiplied.
        smallest = torch.finfo(stored.dtype).tiny
        scales = (stored.float().abs().amax(dim=1) / LARGEST_INT8).to(stored.dtype).clamp_min(smallest)
        shares = (stored.float() / scales.float()[:, None]).round()
        return shares.clamp(-LARGEST_INT8, LARGEST_INT8).to(torch.int8), scales

    def _multiplied(self, rows: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scales)
        return out


class Fp8Linear(RoundedLinear):
    """Weights of fp8, and inputs too: each row's largest value becomes the largest number that fp8 has."""

    kind = "fp8"
    block_of_outputs = BLOCK

    @staticmethod
    def _rounded(stored: Tensor) -> tuple[Tensor, Tensor]:
        return _in_fp8(stored)

    def _multiplied(self, rows: Tensor) -> Tensor:
        small, scales = _in_fp8(rows)
        return F.scaled_mm(
            small,
            self.weight.t(),
            scales[:, None],
            F.ScalingType.RowWise,
            self.scales[None],
            F.ScalingType.RowWise,
            output_dtype=rows.dtype,
        )


def _in_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (n, D) → the nearest multiples in fp8 of a scale for each, and these scales (n,) in fp32.

    A row with a value that is no number, or infinite, has no number at all.
    """
    values = rows.float()
    scales = (values.abs().amax(dim=1) / LARGEST_FP8).clamp_min(torch.finfo(torch.float32).tiny)
    return (values / scales[:, None]).clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8), scales


KINDS: dict[str, type[RoundedLinear]] = {each.kind: each for each in (Int8Linear, Fp8Linear)}


def quantise(decoder: nn.Module, kind: str) -> int:
    """Replace the linear layers of a decoder; returns how many. Those of sizes that the kernel does not take stay."""
    rounded = KINDS[kind]
    count = 0
    for parent in decoder.modules():
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and rounded.takes(child):
                setattr(parent, name, rounded(child))
                count += 1
    return count


def why_not(device: torch.device, dtype: torch.dtype, kind: str) -> str | None:
    """Why such weights are not multiplied there with inputs of a type, in words; None where they are."""
    rounded = KINDS[kind]
    if (reason := rounded.why_slow(device, dtype)) is not None:
        return reason
    name = str(dtype).removeprefix("torch.")
    try:
        linear = nn.Linear(BLOCK, BLOCK, device=device, dtype=dtype)
        layer = rounded(linear)
        # Numbers that no rounding changes.
        ones = torch.ones(2, BLOCK, device=device, dtype=dtype)
        with torch.inference_mode():
            found, wanted = layer(ones).float(), ones.float() @ layer.dequantised().T + linear.bias.float()
    except (RuntimeError, NotImplementedError, ValueError, AttributeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return f"torch {torch.__version__} has no kernel for them with {name} on {device} ({reason})"
    if not torch.allclose(found, wanted, rtol=0.02, atol=0.02):
        return f"the kernel of torch {torch.__version__} is wrong with {name} on {device}"
    return None
