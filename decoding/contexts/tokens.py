"""Prompts as token lists with one placeholder per image or video, before a processor expands it.

Text-only and caption contexts are built from them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decoding.types import Request
from models.inputs.prefix import Prefix
from models.inputs.processing import PromptError
from models.target import Target


def prompt_tokens(request: Request, model: Target) -> list[int]:
    """The prompt's ids with a single placeholder for each image and video.

    Raises:
        PromptError: placeholders and images, or videos, differ in number, or there are no tokens.
    """
    tokenizer = model.front_end.tokenizer
    bos = tokenizer.bos_token
    ids = tokenizer(request.prompt, add_special_tokens=not (bos and request.prompt.startswith(bos)))["input_ids"]
    num_videos = sum(token == model.video_id for token in ids)
    num_images = sum(token in model.visual_ids for token in ids) - num_videos
    for kind, found, given in (("image", num_images, request.images), ("video", num_videos, request.videos)):
        if found != len(given):
            raise PromptError(f"the prompt has {found} {kind} placeholder(s) for {len(given)} {kind}(s)")
    if not ids:
        raise PromptError("the prompt holds no tokens")
    return list(ids)


def replace_pictures(
    ids: Sequence[int], model: Target, images: Sequence[Sequence[int]], videos: Sequence[Sequence[int]]
) -> list[int]:
    """`ids` with the i-th image placeholder replaced by the tokens `images[i]`, and those of videos likewise."""
    of_images, of_videos = iter(images), iter(videos)
    out: list[int] = []
    for token in ids:
        if token == model.video_id:
            out.extend(next(of_videos))
        else:
            out.extend(next(of_images) if token in model.visual_ids else [token])
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
