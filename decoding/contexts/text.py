"""Contexts without pixels: the images gone, or told in words."""

from __future__ import annotations

from decoding.contexts.tokens import newline_id, prompt_tokens, replace_images, text_prefix
from decoding.contracts import Probe
from decoding.types import Request
from models.captioner import Captioner
from models.prefix import Prefix
from models.target import Target


class TextOnly:
    """Each image is one newline (context T of TABED)."""

    needs_attention = False

    def build(self, request: Request, probe: Probe, model: Target) -> Prefix:
        newline = [newline_id(model)]
        return text_prefix(replace_images(prompt_tokens(request, model), model, [newline] * len(request.images)), model)


class Caption:
    """Each image is "image: " and a small captioner's words (context C of TABED, Appendix E)."""

    needs_attention = False

    def __init__(self, captioner: Captioner, lead: str = "image: ") -> None:
        self.captioner = captioner
        self.lead = lead

    def build(self, request: Request, probe: Probe, model: Target) -> Prefix:
        tokenizer = model.front_end.tokenizer
        words = [self.lead + self.captioner.caption(image) for image in request.images]
        told = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in words]
        return text_prefix(replace_images(prompt_tokens(request, model), model, told), model)
