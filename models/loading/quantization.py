"""Quantize linear layers to int8 or fp8 with one scale per output, for torch's own kernels.

`int8`: w ≈ s · q with q from −127 to 127 and s the largest |w| of the output's row over 127; inputs are not rounded.
`fp8`: q of float8_e4m3fn and s the largest |w| over 448; inputs are rounded as well, with a scale per row, so that no
row depends on others. Lossless decoding is lossless relative to the quantized model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.backends.select import backend_for

BLOCK = 16
"""Divisor of the sizes that kernels support; other sizes raise errors or write out of bounds."""
LARGEST_INT8 = 127
FP8 = torch.float8_e4m3fn
LARGEST_FP8 = torch.finfo(FP8).max


class RoundedLinear(nn.Module, ABC):
    """Linear layer with quantized `weight` (O, D), `scales` (O,) and an unquantized `bias` (O,)."""

    kind: ClassVar[str]
    block_of_outputs: ClassVar[int] = 1
    weight: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        assert self.takes(linear), (linear.in_features, linear.out_features)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight, scales = self._rounded(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())

    @classmethod
    def takes(cls, linear: nn.Linear) -> bool:
        """Return whether the kernel supports the sizes of this layer."""
        return linear.in_features % BLOCK == 0 and linear.out_features % cls.block_of_outputs == 0

    @staticmethod
    @abstractmethod
    def _rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize weights (O, D); returns them and their scales (O,)."""

    @abstractmethod
    def _multiplied(self, rows: Tensor) -> Tensor:
        """Multiply inputs (n, D); returns outputs (n, O) without bias."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute outputs (…, O) of inputs (…, D)."""
        out = self._multiplied(input.reshape(-1, self.in_features).contiguous())
        out = out if self.bias is None else out + self.bias
        return out.view(*input.shape[:-1], self.out_features)

    def dequantised(self) -> Tensor:
        """Return the weights times their scales, (O, D) in fp32."""
        return self.weight.float() * self.scales.float()[:, None]


class Int8Linear(RoundedLinear):
    """Linear layer with int8 weights; inputs are not quantized."""

    kind = "int8"

    @staticmethod
    def _rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
        # The scale is rounded first, so that each weight becomes the nearest multiple of the rows scale.
        smallest = torch.finfo(rows.dtype).tiny
        scales = (rows.float().abs().amax(dim=1) / LARGEST_INT8).to(rows.dtype).clamp_min(smallest)
        shares = (rows.float() / scales.float()[:, None]).round()
        return shares.clamp(-LARGEST_INT8, LARGEST_INT8).to(torch.int8), scales

    def _multiplied(self, rows: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scales)
        return out


def _in_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows (n, D) to fp8; returns them and one scale per row (n,) in fp32.

    Rows with NaN or infinite values become NaN.
    """
    values = rows.float()
    scales = (values.abs().amax(dim=1) / LARGEST_FP8).clamp_min(torch.finfo(torch.float32).tiny)
    return (values / scales[:, None]).clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8), scales


class Fp8Linear(RoundedLinear):
    """Linear layer with fp8 weights and inputs; each row is scaled so that its maximum is the largest fp8 number."""

    kind = "fp8"
    block_of_outputs = BLOCK

    _rounded = staticmethod(_in_fp8)

    def _multiplied(self, rows: Tensor) -> Tensor:
        small, scales = _in_fp8(rows)
        by_row = F.ScalingType.RowWise
        return F.scaled_mm(
            small, self.weight.t(), scales[:, None], by_row, self.scales[None], by_row, output_dtype=rows.dtype
        )


KINDS: dict[str, type[RoundedLinear]] = {each.kind: each for each in (Int8Linear, Fp8Linear)}


def quantise(decoder: nn.Module, kind: str) -> int:
    """Replace the linear layers of supported sizes in a decoder by quantized ones; returns their number."""
    rounded = KINDS[kind]
    count = 0
    for parent in decoder.modules():
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and rounded.takes(child):
                setattr(parent, name, rounded(child))
                count += 1
    return count


def why_not(device: torch.device, dtype: torch.dtype, kind: str) -> str | None:
    """Return why `kind` weights with inputs of `dtype` are unsupported on a device; None if a trial is correct."""
    if (reason := backend_for(device).refuse_quantization(kind, dtype)) is not None:
        return reason
    name = str(dtype).removeprefix("torch.")
    try:
        linear = nn.Linear(BLOCK, BLOCK, device=device, dtype=dtype)
        layer = KINDS[kind](linear)
        # Inputs that quantization represents exactly.
        ones = torch.ones(2, BLOCK, device=device, dtype=dtype)
        with torch.inference_mode():
            output, expected = layer(ones).float(), ones.float() @ layer.dequantised().T + linear.bias.float()
    except (RuntimeError, NotImplementedError, ValueError, AttributeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return f"torch {torch.__version__} has no kernel for them with {name} on {device} ({reason})"
    if not torch.allclose(output, expected, rtol=0.02, atol=0.02):
        return f"the kernel of torch {torch.__version__} is wrong with {name} on {device}"
    return None
