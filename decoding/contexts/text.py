"""Contexts without pixels: images and videos are removed, or replaced by a caption."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from decoding.contexts.tokens import newline_id, prompt_tokens, replace_pictures, text_prefix
from decoding.contracts import Probe
from decoding.types import Request
from models.captioner import Captioner
from models.inputs.prefix import Prefix
from models.target import Target


class TextOnly:
    """Each image, and each video, is one newline (context T of TABED)."""

    needs_attention = False

    def build(self, request: Request, probe: Probe, model: Target) -> Prefix:
        newline = [newline_id(model)]
        images, videos = [newline] * len(request.images), [newline] * len(request.videos)
        return text_prefix(replace_pictures(prompt_tokens(request, model), model, images, videos), model)


class Caption:
    """Each image is "image: " and a small captioner's words (context C of TABED, Appendix E); of a video, the words are
    those for its middle frame."""

    needs_attention = False

    def __init__(self, captioner: Captioner, lead: str = "image: ") -> None:
        self.captioner = captioner
        self.lead = lead

    def build(self, request: Request, probe: Probe, model: Target) -> Prefix:
        tokenizer = model.front_end.tokenizer

        def told(picture: NDArray[np.uint8]) -> list[int]:
            words = self.lead + self.captioner.caption(picture)
            return list(tokenizer(words, add_special_tokens=False)["input_ids"])

        images = [told(image) for image in request.images]
        videos = [told(clip.frames[len(clip.frames) // 2]) for clip in request.videos]
        return text_prefix(replace_pictures(prompt_tokens(request, model), model, images, videos), model)
