"""Converts a line of certain drafts, one per depth, to the logits of a frontier's children."""

from __future__ import annotations

import torch
from torch import Tensor

from decoding.tree import Frontier


def follow_line(frontier: Frontier, line: Tensor, vocab_size: int) -> Tensor:
    """Return the logits (b, F, V) of the frontier's children: 0 at the token that `line` (b, D) has for their depth,
    −inf elsewhere.

    Column d of `line` has depth d + 1, and D is more than the frontier's depth. Nodes whose path differs from the line,
    and nodes whose next token is not in the vocabulary, such as `NO_TOKEN`, get no children.
    """
    token = line[:, None, frontier.depth]
    on_line = (frontier.path == line[:, None, : frontier.depth]).all(dim=-1)
    is_drafted = on_line & (token >= 0) & (token < vocab_size)
    logits = torch.full((*is_drafted.shape, vocab_size), -torch.inf, device=line.device)
    index = token.clamp(0, vocab_size - 1).expand_as(is_drafted)[:, :, None]
    return logits.scatter_(2, index, torch.where(is_drafted, 0.0, -torch.inf)[:, :, None])
