"""Prompts as plain token lists with one placeholder per image, before any processor widens it to a run.

What text-only and caption contexts are made from. Knows tokenizers; no pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decoding.types import Request
from models.front_end import PromptError
from models.prefix import Prefix
from models.target import Target


def prompt_tokens(request: Request, model: Target) -> list[int]:
    """The prompt's ids with a single placeholder for each image.

    Raises:
        PromptError: placeholders and images differ in number, or there are no tokens.
    """
    tokenizer = model.front_end.tokenizer
    bos = tokenizer.bos_token
    ids = tokenizer(request.prompt, add_special_tokens=not (bos and request.prompt.startswith(bos)))["input_ids"]
    found = sum(token in model.visual_ids for token in ids)
    if found != len(request.images):
        raise PromptError(f"the prompt has {found} image placeholder(s) for {len(request.images)} image(s)")
    if not ids:
        raise PromptError("the prompt holds no tokens")
    return list(ids)


def replace_images(ids: Sequence[int], model: Target, replacements: Sequence[Sequence[int]]) -> list[int]:
    """`ids` with the i-th placeholder replaced by the tokens `replacements[i]`."""
    remaining = iter(replacements)
    out: list[int] = []
    for token in ids:
        out.extend(next(remaining) if token in model.visual_ids else [token])
    return out


def newline_id(model: Target) -> int:
    """The last id of a tokenized newline, as LLaVA-style tokenizers put a word-start marker before it.

    Raises:
        PromptError: the vocabulary has no newline.
    """
    tokenizer = model.front_end.tokenizer
    ids = tokenizer("\n", add_special_tokens=False)["input_ids"]
    if not ids:
        raise PromptError("the drafter's tokenizer has no token for a newline, which stands for each image")
    return int(ids[-1])


def text_prefix(ids: Sequence[int], model: Target) -> Prefix:
    """Embed plain text."""
    token_ids = torch.tensor(ids, dtype=torch.long, device=model.device)
    embeds = model.decoder.get_input_embeddings()(token_ids)  # type: ignore[operator]
    positions = torch.arange(len(ids), device=model.device)
    return Prefix(token_ids, embeds, positions, torch.zeros(len(ids), dtype=torch.bool, device=model.device))
