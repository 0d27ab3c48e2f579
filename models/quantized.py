"""Linear layers whose weights are kept as int8, one scale for each output, and multiplied by torch's own kernel.

w ≈ s · q with q from −127 to 127 and s the largest |w| of the output's row over 127; inputs stay as they are. A model
with such layers is another model than the one that was stored: what decodes is lossless with respect to it. Knows
linear layers, and nothing of what they are parts of.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

BLOCK = 16
"""Inputs that torch's kernel reads at once; with a rest it writes beyond its memory."""
LARGEST = 127


class Int8Linear(nn.Module):
    """Stands for a linear layer, with its weights rounded: `weight` int8 (O, D), `scales` (O,) and `bias` of its
    type."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        assert linear.in_features % BLOCK == 0, linear.in_features
        self.in_features, self.out_features = linear.in_features, linear.out_features
        stored = linear.weight.detach()
        # The scale is rounded first, so that each weight becomes the nearest multiple of the scale that is multiplied.
        smallest = torch.finfo(stored.dtype).tiny
        scales = (stored.float().abs().amax(dim=1) / LARGEST).to(stored.dtype).clamp_min(smallest)
        rounded = (stored.float() / scales.float()[:, None]).round().clamp(-LARGEST, LARGEST).to(torch.int8)
        self.weight: Tensor
        self.scales: Tensor
        self.bias: Tensor | None
        self.register_buffer("weight", rounded)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())

    def forward(self, input: Tensor) -> Tensor:
        """Inputs (…, D) → outputs (…, O)."""
        rows = input.reshape(-1, self.in_features).contiguous()
        out: Tensor = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scales)
        if self.bias is not None:
            out = out + self.bias
        return out.view(*input.shape[:-1], self.out_features)

    def dequantised(self) -> Tensor:
        """The weights that are multiplied, in fp32."""
        return self.weight.float() * self.scales.float()[:, None]


def quantise(decoder: nn.Module) -> int:
    """Replace the linear layers of a decoder; returns how many. Those whose inputs are no multiple of `BLOCK` stay."""
    count = 0
    for parent in decoder.modules():
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.in_features % BLOCK == 0:
                setattr(parent, name, Int8Linear(child))
                count += 1
    return count


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why int8 weights are not multiplied there with inputs of a type, in words; None where they are."""
    name = str(dtype).removeprefix("torch.")
    if device.type == "cpu" and dtype != torch.bfloat16:
        return f"on a CPU torch multiplies them fast with bfloat16 only, and not with {name}: give dtype bfloat16"
    try:
        linear = nn.Linear(BLOCK, 4, device=device, dtype=dtype)
        layer = Int8Linear(linear)
        ones = torch.ones(2, BLOCK, device=device, dtype=dtype)
        with torch.inference_mode():
            found, wanted = layer(ones).float(), ones.float() @ layer.dequantised().T + linear.bias.float()
    except (RuntimeError, NotImplementedError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return f"torch {torch.__version__} has no kernel for them with {name} on {device.type} ({reason})"
    if not torch.allclose(found, wanted, rtol=0.02, atol=0.02):
        return f"the kernel of torch {torch.__version__} is wrong with {name} on {device.type}"
    return None
