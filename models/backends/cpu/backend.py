"""Run models on a CPU: compiled layers with packed weights, an attention kernel and a GEMM kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from models.backends.attention import DecoderRunner
from models.backends.base import Backend
from models.backends.cpu.compiled import CompiledDecoder, can_compile
from models.backends.host_copy import HostCopy

BUSY_TOKENS = 192
"""Maximum number of positions of one prefill forward; more do not make GEMMs more efficient on a CPU."""
MAX_PADDING = 16
"""See `models.backends.base.MAX_PREFILL_PADDING`; a CPU computes about this many positions while it reads weights."""


class CpuBackend(Backend):
    """CPU backend; it is synchronous, so results are complete when a call returns."""

    name = "cpu"
    is_asynchronous = False

    def compile(self, decoder: nn.Module) -> DecoderRunner | None:
        return CompiledDecoder(decoder) if can_compile(decoder) else None

    def copy_to_host(self, parts: Sequence[Tensor | None], packed: Tensor | None = None) -> HostCopy:
        return HostCopy(parts)

    def synchronize(self, device: torch.device) -> None:
        """See `Backend.synchronize`; nothing runs asynchronously."""

    def prefill_limits(self, max_tokens: int | None) -> tuple[int | None, int]:
        if max_tokens is None:
            return super().prefill_limits(None)
        return min(max_tokens, BUSY_TOKENS), MAX_PADDING

    def refuse_quantization(self, kind: str, dtype: torch.dtype) -> str | None:
        if kind == "fp8":
            return "CPUs have no fp8 units; use int8"
        if dtype == torch.bfloat16:
            return None
        name = str(dtype).removeprefix("torch.")
        return f"on a CPU torch has fast int8 kernels for bfloat16 only, not for {name}; set dtype bfloat16"

    def describe(self, device: torch.device) -> str:
        return f"{device.type} {torch.backends.cpu.get_cpu_capability()}"
