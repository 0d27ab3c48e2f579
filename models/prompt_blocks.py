"""Find the blocks of a prompt, whose tokens read each other, in the masks that a model makes for its decoder.

Wrappers of language models make masks for images (Gemma 3 and 4) and for whole prompts (PaliGemma) from token types
that the decoder does not receive. transformers makes no mask for an attention implementation without a mask function,
so that the engine's implementation gets one, under a second name, while a prompt is captured. Masks are taken apart
into blocks, and compared bit by bit with those that the layers' rules make of the blocks.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from models.backends.attention import IMPLEMENTATION, attend
from models.backends.mask_rules import LayerRule, rules_of

WITH_MASKS = f"{IMPLEMENTATION}_with_masks"
"""Name of the engine's attention implementation while a prompt of a model with blocks is captured."""

_capturing = threading.local()
_lock = threading.Lock()
_num_captures: Counter[int] = Counter()


class UnknownMaskError(ValueError):
    """Raised for a mask that no rule of a layer reproduces."""


def _make_mask(**options: Any) -> Tensor | None:
    """Make a mask for the capturing thread; decoding steps of other threads get none."""
    if not getattr(_capturing, "is_on", False):
        return None
    mask: Tensor = sdpa_mask(**options | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    return mask


AttentionInterface.register(WITH_MASKS, attend)
AttentionMaskInterface.register(WITH_MASKS, _make_mask)


@contextmanager
def masks_made(decoder: nn.Module) -> Iterator[None]:
    """Make the masks of prompts in this thread and context, if a layer of `decoder` reads blocks."""
    config: Any = decoder.config
    if not any(rule.in_blocks for rule in rules_of(decoder)):
        yield
        return
    with _lock:
        if config._attn_implementation == IMPLEMENTATION:
            config._attn_implementation = WITH_MASKS
        _num_captures[id(config)] += 1
    _capturing.is_on = True
    try:
        yield
    finally:
        _capturing.is_on = False
        with _lock:
            _num_captures[id(config)] -= 1
            # Another thread may still capture a prompt.
            if not _num_captures[id(config)] and config._attn_implementation == WITH_MASKS:
                config._attn_implementation = IMPLEMENTATION


def groups_of(masks: Any, rules: Sequence[LayerRule]) -> Tensor | None:
    """Return the blocks (L,) of a prompt whose decoder receives `masks`: tokens of one block have equal numbers, which
    are those of its first token. None if the prompt has no blocks.

    `masks` is a mask (1, 1, L, L), a dictionary of masks, or None. Raises: UnknownMaskError if a mask is none that
    `rules` make of the blocks. One device synchronization.
    """
    given = masks.values() if isinstance(masks, dict) else [masks]
    squares = [visible_of(mask)[0, 0] for mask in given if isinstance(mask, Tensor) and mask.dim() == 4]
    if not squares:
        return None
    groups = first_readers(squares)
    index = torch.arange(groups.shape[0], device=groups.device)
    kinds = list(dict.fromkeys(LayerRule(rule.window, rule.chunk, rule.in_blocks) for rule in rules)) or [LayerRule()]
    made = [kind.prompt_mask(index, index, groups[None])[0, 0] for kind in kinds]
    fits = torch.stack([torch.stack([(square == mask).all() for mask in made]).any() for square in squares]).all()
    is_known, has_blocks = torch.stack([fits, (groups != index).any()]).tolist()
    if not is_known:
        raise UnknownMaskError("the model hides tokens of this prompt from others by a rule that is not known")
    return groups if has_blocks else None


def first_readers(squares: Sequence[Tensor]) -> Tensor:
    """Return the first token (L,) that reads each token in any of the masks (L, L), bool: the first one of its block,
    or the token itself."""
    firsts = [square.to(torch.uint8).argmax(dim=0) for square in squares]
    return torch.stack([first.to(firsts[0].device) for first in firsts]).amin(dim=0)


def visible_of(mask: Tensor) -> Tensor:
    """Return which positions a mask (…, N, M), bool or added to the scores, leaves visible."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def end_of_blocks(groups: Tensor) -> Tensor:
    """Return the number of leading tokens of a prompt after which no block of `groups` (L,) has tokens."""
    number = torch.arange(groups.shape[0], device=groups.device)
    is_later = groups != number
    return (is_later * (number + 1)).max() if groups.shape[0] else groups.new_zeros(())
