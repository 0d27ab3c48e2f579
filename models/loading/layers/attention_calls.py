"""Record the attention calls of a model, with their masks, and find the distance at which a mask stops being causal.

transformers makes most masks of a model by functions of positions. A recorded function is evaluated at any distance,
so windows are found without prompts that are longer than them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from models.backends.mask_rules import HARMLESS
from models.backends.rule_attention import weigh

IMPLEMENTATION = "draftfleet_recording"
MARK = "draftfleet_mark"
"""Keyword argument of a decoder that its layers must pass on to attention."""
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Returns whether queries read keys: (batch index, head index, query positions, key positions) → bool."""
SHORT = 16
"""Maximum number of tokens of a call whose K is kept, which bounds memory."""
UNLIMITED_TOKENS = 1 << 20
"""Context length at which masks are evaluated if no limit is known."""
MAX_POINTS = 1 << 20
"""Maximum number of positions at which one row or column of a mask is evaluated; longer ones are sampled evenly."""


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention: the layer, the names of keyword arguments that are not None and not in `HARMLESS`, the
    `sliding_window` argument, the mask (…, N, M) or None, and the function that made it, None if it is unknown.
    `is_marked` is whether the layer passed on the keyword argument `MARK` of the decoder. `key` is K of calls with at
    most `SHORT` tokens, by which layers are found that share it."""

    layer: int
    keywords: frozenset[str]
    window: int | None
    mask: Tensor | None
    rule: MaskFunction | None
    device: torch.device
    is_marked: bool
    key: Tensor | None = None


@dataclass
class AttentionCalls:
    """Attention calls of the models that run under `recorded`."""

    calls: list[AttentionCall] = field(default_factory=list)
    masks: list[tuple[Tensor, MaskFunction]] = field(default_factory=list)

    def rule_of(self, mask: Tensor | None) -> MaskFunction | None:
        """Return the function that made a mask or the mask of which it is a view; None if it is unknown."""
        if mask is None:
            return _causal
        for known, rule in self.masks:
            if known.untyped_storage().data_ptr() == mask.untyped_storage().data_ptr():
                return rule
        return None


def _causal(_batch: Tensor, _head: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    return keys <= queries


_current: ContextVar[AttentionCalls | None] = ContextVar("attention calls", default=None)


@contextmanager
def recorded(decoder: nn.Module) -> Iterator[AttentionCalls]:
    """Record the attention calls of `decoder` in this context; it computes what torch's attention computes."""
    config: Any = decoder.config
    before = config._attn_implementation
    calls = AttentionCalls()
    token = _current.set(calls)
    try:
        decoder.set_attn_implementation(IMPLEMENTATION)  # type: ignore[operator]
        yield calls
    finally:
        _current.reset(token)
        decoder.set_attn_implementation(before)  # type: ignore[operator]


def first_hidden(rule: MaskFunction, num_tokens: int, device: torch.device) -> int | None:
    """Return a number of tokens, up to `num_tokens`, of which the last one does not read all; None if it always does.

    It is the least one if the first token, the previous one or the token itself is hidden first, as by windows and
    chunks.
    """
    if rule is _causal or rule is causal_mask_function:
        return None
    index = torch.arange(min(num_tokens, MAX_POINTS), device=device)
    if num_tokens > MAX_POINTS:
        index = index * (num_tokens - 1) // (MAX_POINTS - 1)
    zero = index.new_zeros(())

    def hides(queries: Tensor, keys: Tensor) -> Tensor:
        return ~rule(zero, zero, queries, keys).expand(index.shape)

    hidden = hides(index, zero) | hides(index, index) | hides(index, (index - 1).clamp_min(0))
    if bool(hidden.any()):
        return int(index[hidden.to(torch.uint8).argmax()]) + 1
    return num_tokens if bool(hides(index[-1].expand(index.shape), index).any()) else None


def _record(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **keywords: Any
) -> tuple[Tensor, Tensor | None]:
    """Record a call and return the attention output (b, N, H, D_h), as transformers expects it."""
    if (calls := _current.get()) is not None:
        is_marked = keywords.pop(MARK, None) is not None
        given = frozenset(name for name, value in keywords.items() if value is not None) - HARMLESS
        rule = calls.rule_of(attention_mask)
        window = keywords.get("sliding_window")
        calls.calls.append(
            AttentionCall(
                int(getattr(module, "layer_idx", -1)),
                given - {"sliding_window"},
                window,
                attention_mask,
                rule,
                query.device,
                is_marked,
                key if key.shape[2] <= SHORT else None,
            )
        )
    softcap, sinks = keywords.get("softcap"), keywords.get("s_aux")
    if softcap is not None or sinks is not None:
        # torch's attention has neither.
        mask = _as_square(query.shape[2], key.shape[2], query.device) if attention_mask is None else attention_mask
        scale = keywords.get("scaling") or query.shape[3] ** -0.5
        return weigh(query, key, value, mask, scale, softcap, sinks).transpose(1, 2), None
    used = {name: keywords[name] for name in ("scaling", "is_causal") if name in keywords}
    output: tuple[Tensor, Tensor | None] = AttentionInterface()["sdpa"](
        module, query, key, value, attention_mask, **used
    )
    return output


def _as_square(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Return a causal mask (1, 1, N, M)."""
    causal = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)
    return causal[None, None]


def _make_mask(**options: Any) -> Tensor:
    """Make a mask as for torch's attention, never None, and record its function."""
    options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: Tensor = sdpa_mask(**options)
    if (calls := _current.get()) is not None:
        calls.masks.append((mask, options.get("mask_function", _causal)))
    return mask


AttentionInterface.register(IMPLEMENTATION, _record)
AttentionMaskInterface.register(IMPLEMENTATION, _make_mask)
