"""Checks the shapes that a part of a method returns, without reading values, and thus without waiting for the device.

Parts that are not draftfleet's own run inside these proxies. `values` in this package checks values too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decoding.contracts import Acceptance, Drafter, DraftLogits, EngineSpec, TreePolicy, VerificationOutput
from decoding.tree import AcceptanceResult, DraftTree, Frontier
from models.kv.lanes import SlotBatch


class ContractError(RuntimeError):
    """Raised if a part returns what its interface in `decoding.contracts` does not allow."""


class _Proxy:
    """Calls a part, and checks what it returns; all other attributes are those of the part."""

    def __init__(self, part: Any, name: str) -> None:
        self.inner, self.title = part, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def open(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._device = torch.empty(0, device=spec.device).device  # with its index
        self.inner.open(spec)

    def _expect(self, method: str, what: str, value: Any, shape: tuple[int | None, ...], *dtypes: torch.dtype) -> None:
        """Raise ContractError unless the value is a tensor of the shape (None: any size) and of one of the types."""
        where = f"{self.title}.{method} returned {what}"
        if not isinstance(value, Tensor):
            raise ContractError(f"{where} as {type(value).__name__}, and it must be a tensor")
        fits = len(value.shape) == len(shape) and all(
            size is None or size == actual for size, actual in zip(shape, value.shape, strict=True)
        )
        if not fits:
            sizes = ", ".join("*" if size is None else str(size) for size in shape)
            raise ContractError(f"{where} of shape {tuple(value.shape)}, and it must be ({sizes})")
        if value.dtype not in dtypes:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ContractError(f"{where} of type {str(value.dtype).removeprefix('torch.')}, and it must be {names}")
        if value.device != self._device:
            raise ContractError(f"{where} on {value.device}, and the target is on {self._device}")


FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class CheckedDrafter(_Proxy):
    """Proxy of a `Drafter`."""

    def draft(self, slots: SlotBatch, frontier: Frontier) -> Tensor:
        logits: Tensor = self.inner.draft(slots, frontier)
        num_rows, num_nodes = frontier.tokens.shape
        self._expect("draft", "logits", logits, (num_rows, num_nodes, self._spec.vocab_size), *FLOATS)
        return logits


class CheckedTree(_Proxy):
    """Proxy of a `TreePolicy`."""

    def start(self, slots: SlotBatch, root: Tensor, num_levels: int, keep_probs: bool) -> Frontier:
        self._num_rows, self._num_levels = root.shape[0], num_levels
        return self._frontier("start", self.inner.start(slots, root, num_levels, keep_probs), 0)

    def grow(self, level: DraftLogits) -> Frontier | None:
        frontier = self.inner.grow(level)
        return frontier if frontier is None else self._frontier("grow", frontier, self._depth + 1)

    def _frontier(self, method: str, frontier: Any, depth: int) -> Frontier:
        if not isinstance(frontier, Frontier):
            raise ContractError(f"{self.title}.{method} returned {type(frontier).__name__}, and it must be a Frontier")
        if frontier.depth != depth or depth >= max(self._num_levels, 1):
            raise ContractError(
                f"{self.title}.{method} returned a frontier of depth {frontier.depth}; it must be {depth}, and trees "
                f"of this step have at most {self._num_levels} levels"
            )
        self._depth = depth
        num_nodes = frontier.tokens.shape[-1] if isinstance(frontier.tokens, Tensor) else None
        for name in ("tokens", "nodes", "parents"):
            value = getattr(frontier, name)
            self._expect(method, f"frontier.{name}", value, (self._num_rows, num_nodes), torch.long)
        return frontier

    def finish(self) -> DraftTree:
        tree = self.inner.finish()
        if not isinstance(tree, DraftTree):
            raise ContractError(f"{self.title}.finish returned {type(tree).__name__}, and it must be a DraftTree")
        self._expect("finish", "tree.tokens", tree.tokens, (self._num_rows, None), torch.long)
        shape = tuple(tree.tokens.shape)
        for name, dtype in {
            "parents": torch.long,
            "depth": torch.long,
            "valid": torch.bool,
            "origin": torch.long,
        }.items():
            self._expect("finish", f"tree.{name}", getattr(tree, name), shape, dtype)
        if tree.draft_probs is not None:
            self._expect("finish", "tree.draft_probs", tree.draft_probs, (*shape, self._spec.vocab_size), *FLOATS)
        bounds = {"num_nodes": self.inner.max_nodes, "num_levels": min(self._num_levels, self.inner.max_levels)}
        for name, most in bounds.items():
            if (size := getattr(tree, name)) > most:
                raise ContractError(
                    f"{self.title}.finish returned a tree with {name} {size}, and it must be at most {most}"
                )
        return tree


class CheckedAcceptance(_Proxy):
    """Proxy of an `Acceptance`."""

    def accept(self, verification: VerificationOutput) -> AcceptanceResult:
        result = self.inner.accept(verification)
        if not isinstance(result, AcceptanceResult):
            what = f"{self.title}.accept returned {type(result).__name__}"
            raise ContractError(f"{what}, and it must be an AcceptanceResult")
        num_rows, width = verification.tree.tokens.shape[0], verification.tree.num_levels + 1
        self._expect("accept", "path", result.path, (num_rows, width), torch.long)
        self._expect("accept", "relaxed", result.relaxed, (num_rows, width), torch.bool)
        for name in ("n", "next"):
            self._expect("accept", name, getattr(result, name), (num_rows,), torch.long)
        return result


PROXIES: dict[type, type[_Proxy]] = {
    Drafter: CheckedDrafter,
    TreePolicy: CheckedTree,
    Acceptance: CheckedAcceptance,
}
"""The proxy of each kind of part."""
