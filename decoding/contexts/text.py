"""Encodes prompts without pixels: replaces images and videos by a newline or a caption.

The prompt is tokenized with one placeholder per image or video; no processor expands the placeholders.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from decoding.contracts import Context, PrefillOutput
from decoding.types import Request
from models.captioner import Captioner
from models.inputs.prefix import Prefix
from models.inputs.processing import PromptError
from models.target import Target


class TextOnly(Context):
    """The prompt with each image and each video replaced by one newline (context T of TABED)."""

    def build(self, request: Request, prefill_output: PrefillOutput, model: Target) -> Prefix:
        newline = [newline_id(model)]
        return _with_texts(request, model, [newline] * request.num_images, [newline] * len(request.num_frames))


class Caption(Context):
    """The prompt with each image and each video's middle frame replaced by `lead` and a caption (TABED, Appendix E)."""

    def __init__(self, captioner: Captioner, lead: str = "image: ") -> None:
        self.captioner = captioner
        self.lead = lead

    def build(self, request: Request, prefill_output: PrefillOutput, model: Target) -> Prefix:
        tokenizer = model.front_end.tokenizer

        def caption(picture: NDArray[np.uint8]) -> list[int]:
            text = self.lead + self.captioner.caption(picture)
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])

        images = [caption(image) for image in request.images]
        videos = [caption(clip.frames[len(clip.frames) // 2]) for clip in request.videos]
        return _with_texts(request, model, images, videos)


def prompt_tokens(request: Request, model: Target) -> list[int]:
    """Return the prompt's token ids with one placeholder per image and video; raise PromptError if they do not fit."""
    front_end = model.front_end
    ids = front_end.tokenizer(request.prompt, **front_end.special_tokens_option(request.prompt))["input_ids"]
    num_videos = sum(token == model.video_id for token in ids)
    num_images = sum(token in model.visual_ids for token in ids) - num_videos
    for kind, count, given in (
        ("image", num_images, request.num_images),
        ("video", num_videos, len(request.num_frames)),
    ):
        if count != given:
            raise PromptError(f"the prompt has {count} {kind} placeholder(s) for {given} {kind}(s)")
    if not ids:
        raise PromptError("the prompt holds no tokens")
    return list(ids)


def _with_texts(
    request: Request, model: Target, images: Sequence[Sequence[int]], videos: Sequence[Sequence[int]]
) -> Prefix:
    """Replace the i-th image placeholder by the tokens `images[i]` and the i-th video placeholder by `videos[i]`."""
    of_images, of_videos = iter(images), iter(videos)
    ids: list[int] = []
    for token in prompt_tokens(request, model):
        if token == model.video_id:
            ids.extend(next(of_videos))
        else:
            ids.extend(next(of_images) if token in model.visual_ids else [token])
    token_ids = torch.tensor(ids, dtype=torch.long, device=model.device)
    embeds = model.decoder.get_input_embeddings()(token_ids)  # type: ignore[operator]
    return Prefix(token_ids, embeds, torch.arange(len(ids), device=model.device), torch.zeros_like(token_ids) > 0)


def newline_id(model: Target) -> int:
    """Return the last id of a tokenized newline; LLaVA-style tokenizers add a word-start marker before it."""
    tokenizer = model.front_end.tokenizer
    ids = tokenizer("\n", add_special_tokens=False)["input_ids"]
    if not ids:
        raise PromptError("the drafter's tokenizer has no token for a newline, which replaces each image")
    return int(ids[-1])
