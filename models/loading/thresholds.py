"""Choose the length of a test prompt: past the numbers of tokens in a configuration at which a model may change."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

MAX_TOKENS = 4096
"""Longest test prompt in tokens; bounds the masks of a forward."""
MAX_WORK = 1 << 37
"""Most multiplications of weights in one forward of a test prompt: tokens times parameters. A forward of 2,000 tokens
of a model of 70 million parameters, or of 137 tokens of one of a billion."""
WIDTHS = re.compile(
    r"_ids?$|_index$|pinpoints|label|vocab|hidden|intermediate|ffn|inner|embd|embed|model$|dim|rank|theta|max_|positions$|seq_length$"
    r"|heads?$|layers?$|experts?(_per_tok)?$",
    re.IGNORECASE,
)
"""Names of integers that are sizes and numbers of weights, token ids or the longest context."""
ORIGINAL = "original_max_position_embeddings"
OTHER_PARTS = re.compile(r"vision|audio|speech|talker|quantization|image", re.IGNORECASE)
"""Names of nested configurations that are not of the language model."""
LONGEST = re.compile(r"^(max_(\w+_)?positions?(_embeddings)?|n_positions|max_seq_len|n_ctx|seq_length)$")
"""Names of the number of positions of a model; tables of learned positions have no others."""


def prompt_length(
    model: nn.Module, decoder: nn.Module, least: int, reserved: int, max_context_tokens: int | None
) -> int:
    """Return the length in tokens of a prompt that is followed by `reserved` tokens.

    It is `least`, or twice the largest integer of the configuration that may be a window or another threshold of a
    context, as far as `MAX_TOKENS`, `MAX_WORK`, the positions of the model and `max_context_tokens` allow.
    """
    config: Any = decoder.config
    positions = [value for name, value in config.to_dict().items() if LONGEST.search(name)]
    known = [number for number in (*positions, max_context_tokens) if isinstance(number, int) and number > 0]
    possible = min(MAX_TOKENS, *known) - reserved
    num_parameters = sum(parameter.numel() for parameter in decoder.parameters())
    bound = min(possible, MAX_WORK // max(num_parameters, 1) - reserved)
    passed = [number for number in thresholds(model.config.to_dict()) if number < bound]  # type: ignore[operator,union-attr]
    return max(min(least, possible), min(2 * max(passed, default=0), bound))


def thresholds(settings: dict[str, Any]) -> set[int]:
    """Return the positive integers of a configuration, nested ones included, that may be thresholds in tokens."""
    found: set[int] = set()
    pending: list[tuple[str, Any]] = list(settings.items())
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict):
            pending += [] if OTHER_PARTS.search(name) else [(str(key), one) for key, one in value.items()]
        elif isinstance(value, (list, tuple)):
            pending += [(name, one) for one in value]
        elif type(value) is int and value > 0 and (name == ORIGINAL or not WIDTHS.search(name)):
            found.add(value)
    return found
