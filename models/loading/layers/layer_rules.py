"""Take recorded masks of a model apart into the rules of its layers, see `models.backends.mask_rules`.

Rules come from masks, because keyword arguments of attention do not name all of them: Phi-MoE's window and Llama 4's
chunks exist in the mask alone. Functions of masks are evaluated at any distance, so that no prompt has to be longer
than a window; masks of prompts are compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from models.backends.mask_rules import LayerRule
from models.loading.layers.attention_calls import AttentionCall, MaskFunction, first_hidden
from models.prompt_blocks import first_readers, visible_of

SUPPORTED = frozenset({"softcap", "s_aux"})
"""Keyword arguments of attention that change weights, and that the engine computes."""
FEATURES = {"position_bias": "a position bias"}
"""Names of unsupported features in error messages, by keyword argument of attention."""
GRID = 256
"""Positions between which all pairs of a mask function are compared with a rule."""
MAX_SAMPLES = 1 << 16
"""Maximum number of queries, spread over a context, whose border positions are compared with a rule."""


class UnsupportedMask(ValueError):
    """Raised with the reason why the attention of a model follows no rule."""


def fit_rule(function: MaskFunction, num_tokens: int, device: torch.device) -> LayerRule:
    """Return the rule that equals a mask function in contexts of `num_tokens`.

    Raises: UnsupportedMask if no window or chunk does.
    """
    limit = first_hidden(function, num_tokens, device)
    if limit is None:
        return LayerRule()
    size = limit - 1
    for rule in (LayerRule(window=size), LayerRule(chunk=size)):
        if size > 0 and _equals(rule, function, num_tokens, device):
            return rule
    raise UnsupportedMask(
        f"its attention hides earlier tokens in contexts of {limit} tokens by a rule that is neither a sliding window "
        "nor chunks"
    )


def _equals(rule: LayerRule, function: MaskFunction, num_tokens: int, device: torch.device) -> bool:
    """Compare a rule with a mask function at all pairs of small positions, and along the rule's borders."""
    size = rule.window or rule.chunk or 1
    zero = torch.zeros((), dtype=torch.long, device=device)
    small = torch.arange(min(GRID, num_tokens), device=device)
    far = torch.arange(min(num_tokens, MAX_SAMPLES), device=device)
    if num_tokens > MAX_SAMPLES:
        far = far * (num_tokens - 1) // (MAX_SAMPLES - 1)
    # Around the first borders, every position counts.
    near = torch.arange(max(0, size - 8), min(num_tokens, 2 * size + 8), device=device)[:MAX_SAMPLES]
    queries = torch.cat([far, near])
    chunk_start = queries // size * size
    borders = [queries - size + step for step in (-1, 0, 1, 2)] + [chunk_start + step for step in (-1, 0, 1)]
    borders += [queries - 1, queries, queries + 1, queries // 2, torch.zeros_like(queries)]
    pairs = [(small[:, None].expand(-1, len(small)), small[None].expand(len(small), -1))]
    pairs += [(queries, keys.clamp(0, num_tokens - 1)) for keys in borders]
    last = far[-1:].expand(len(far))
    pairs.append((last, far))
    for query, key in pairs:
        theirs = function(zero, zero, query, key).expand(query.shape)
        if not torch.equal((key <= query) & rule.reads(query, key), theirs):
            return False
    return True


def rules_from_calls(calls: Sequence[AttentionCall], num_layers: int, num_tokens: int) -> list[LayerRule]:
    """Return the rules of all layers for contexts of `num_tokens` from the attention calls of one text prompt.

    Raises: UnsupportedMask with the reason if attention is more than rules, soft caps and sinks.
    """
    words = sorted({word for call in calls for word in call.keywords - SUPPORTED})
    if words:
        uses = " and ".join(FEATURES.get(word, f"the argument {word}") for word in words)
        raise UnsupportedMask(f"its attention uses {uses}")
    if any(call.rule is None for call in calls):
        raise UnsupportedMask("its attention uses its own mask")
    rules = [LayerRule()] * num_layers
    fitted: dict[MaskFunction, LayerRule] = {}
    for call in calls:
        assert call.rule is not None
        if call.rule not in fitted:
            try:
                fitted[call.rule] = fit_rule(call.rule, num_tokens, call.device)
            except UnsupportedMask:
                raise
            except Exception as error:  # functions of models may index tensors of the length of the prompt
                reason = " ".join(str(error).split())
                raise UnsupportedMask(
                    f"its attention uses masks that depend on more than positions ({reason})"
                ) from None
        rule = fitted[call.rule]
        if call.window is not None and call.window < num_tokens and call.window != rule.window:
            raise UnsupportedMask(f"its attention names a sliding window of {call.window} tokens that its mask lacks")
        if 0 <= call.layer < num_layers:
            caps = {"has_softcap": "softcap" in call.keywords, "has_sinks": "s_aux" in call.keywords}
            rules[call.layer] = replace(rule, **caps, owner=_owner_of(call, calls))
    return rules


def _owner_of(call: AttentionCall, calls: Sequence[AttentionCall]) -> int | None:
    """Return the layer that made the K of a call before; None if the call has its own."""
    owner = next(other.layer for other in calls if other is call or (other.key is not None and other.key is call.key))
    return None if owner == call.layer else owner


def with_blocks(
    rules: Sequence[LayerRule], masks: Sequence[tuple[int, Tensor]]
) -> tuple[list[LayerRule], Tensor | None]:
    """Return the rules of layers with `in_blocks` set as in the masks of one prompt, and its blocks (L,), see
    `models.prompt_blocks.groups_of`.

    `masks` are pairs of layer and mask (1, 1, L, L). Raises: UnsupportedMask if a mask is none of its layer's rule.
    """
    if not masks:
        return list(rules), None
    distinct = {id(mask): visible_of(mask)[0, 0] for _, mask in masks}
    groups = first_readers(list(distinct.values()))
    index = torch.arange(groups.shape[0], device=groups.device)
    changed = list(rules)
    known: dict[tuple[int, LayerRule], bool] = {}
    for layer, mask in masks:
        if layer < 0 or layer >= len(changed):
            continue
        rule = changed[layer]

        def fits(rule: LayerRule, mask: Tensor = mask) -> bool:
            key = id(mask), LayerRule(rule.window, rule.chunk, rule.in_blocks)
            if key not in known:
                made = key[1].prompt_mask(index, index, groups[None].to(mask.device))[0, 0]
                known[key] = torch.equal(made, distinct[id(mask)])
            return known[key]

        if fits(rule):
            continue
        changed[layer] = replace(rule, in_blocks=not rule.in_blocks)
        if rule.in_blocks or not fits(changed[layer]):
            raise UnsupportedMask(_difference(distinct[id(mask)]))
    return changed, groups if bool((groups != index).any()) else None


def _difference(visible: Tensor) -> str:
    """Return how a mask (L, L) that no rule makes differs from a causal one."""
    causal = torch.ones_like(visible).tril()
    if bool((visible & ~causal).any()):
        return "its attention lets tokens read later ones by a rule that the engine does not know"
    return "its attention hides earlier tokens by a rule that the engine does not know"
