"""The CPU backend: compiled layers, packed weights, own attention and chain verification."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from models.backends.attention import AttentionStep
from models.backends.base import Backend, ChainVerdict, TreeNodes
from models.backends.cpu.attention import PLACE, can_place
from models.backends.cpu.compiled import CompiledDecoder, can_compile
from models.backends.cpu.verify_chain import CUT, WALK, can_walk
from models.backends.forward import DecoderRunner
from models.backends.host_copy import HostCopy, ReadCopy

BUSY_TOKENS = 192
"""Positions of one prefill forward that keep a CPU busy: its GEMMs gain nothing from more."""
MAX_PADDING = 16
"""As `models.backends.base.MAX_PREFILL_PADDING`: a CPU multiplies so many positions while it reads the weights."""


class CpuBackend(Backend):
    """The host computes, so results are complete when a call returns."""

    name = "cpu"
    is_asynchronous = False

    def compile(self, decoder: nn.Module) -> DecoderRunner | None:
        """See `Backend.compile`."""
        return CompiledDecoder(decoder) if can_compile(decoder) else None

    def place(self, nodes: TreeNodes) -> tuple[AttentionStep, Tensor]:
        """See `Backend.place`."""
        if not can_place(nodes.lens, nodes.dtype):
            return super().place(nodes)
        cache_positions, positions, bias = PLACE(
            nodes.lens, nodes.delta, nodes.depth, nodes.visible, nodes.offset, nodes.window, nodes.dtype
        )
        return AttentionStep(nodes.cache, nodes.rows, cache_positions, bias, nodes.window, len(nodes.rows)), positions

    def cut_chain(self, best: Tensor, max_depth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Backend.cut_chain`."""
        if not can_walk(best):
            return super().cut_chain(best, max_depth)
        valid, num_drafted, has_failed = CUT(best, max_depth)
        return valid, num_drafted, has_failed

    def verify_chain(self, logits: Tensor, tokens: Tensor, valid: Tensor) -> ChainVerdict:
        """See `Backend.verify_chain`."""
        if not can_walk(logits):
            return super().verify_chain(logits, tokens, valid)
        return ChainVerdict(*WALK(logits, tokens, valid))

    def copy_to_host(self, parts: Sequence[Tensor | None]) -> HostCopy:
        """See `Backend.copy_to_host`."""
        return ReadCopy(parts)

    def synchronize(self, device: torch.device) -> None:
        """See `Backend.synchronize`; nothing runs asynchronously."""

    def prefill_limits(self, max_tokens: int | None) -> tuple[int | None, int]:
        """See `Backend.prefill_limits`."""
        if max_tokens is None:
            return super().prefill_limits(None)
        return min(max_tokens, BUSY_TOKENS), MAX_PADDING

    def refuse_quantization(self, kind: str, dtype: torch.dtype) -> str | None:
        """See `Backend.refuse_quantization`."""
        if kind == "fp8":
            return "CPUs have no fp8 units; use int8"
        if dtype == torch.bfloat16:
            return None
        name = str(dtype).removeprefix("torch.")
        return f"on a CPU torch has fast int8 kernels for bfloat16 only, not for {name}; set dtype bfloat16"

    def describe(self, device: torch.device) -> str:
        """See `Backend.describe`."""
        return f"{device.type} {torch.backends.cpu.get_cpu_capability()}"
