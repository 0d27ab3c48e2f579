"""From text and pictures to model inputs: chat template, tokenizer, image processor.

Knows the processor that ships with a checkpoint. Knows nothing of weights, slots or generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from transformers import ProcessorMixin

VIDEO_PART = "video_processor"


class PromptError(ValueError):
    """A prompt that the processor refuses: wrong number of images, an unreadable template, no tokens."""


class _ImagesOnly(ProcessorMixin):  # type: ignore[misc]
    """A processor without its video part, which this project never calls: clips arrive as frames, that is, images."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        if argument_name == VIDEO_PART and argument is None:
            return None
        return super().check_argument_for_proper_class(argument_name, argument)


def images_only(processor_class: type[Any]) -> type[Any]:
    """`processor_class`, which insists on a video part, as a class that works without one.

    Video processors need torchvision, and reading an image must not.
    """

    return type(processor_class.__name__, (_ImagesOnly, processor_class), {})


class FrontEnd:
    """A processor (vision-language) or a bare tokenizer (text), behind one surface."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.takes_images = self.tokenizer is not processor

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """Messages → prompt text by the checkpoint's own chat template, with the turn to be answered opened.

        Raises:
            PromptError: there is no template, or it refuses these messages.
        """
        turns: list[dict[str, Any]] = list(messages)
        if not self.takes_images:
            turns = [{**turn, "content": _plain_text(turn["content"])} for turn in turns]
        try:
            text = self.processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates are programs: jinja errors, ValueErrors, KeyErrors alike
            raise PromptError(f"the chat template refuses these messages: {error}") from error
        return str(text)

    def encode(self, prompt: str, images: Sequence[NDArray[np.uint8]]) -> dict[str, Tensor]:
        """Prompt and uint8 RGB images (height, width, 3) → processor outputs for one sample (batch axis of 1).

        Raises:
            PromptError: the processor refuses them, or images are given to a text model.
        """
        bos = self.tokenizer.bos_token
        # Templates that write the BOS themselves must not get a second one.
        special = not (bos and prompt.startswith(bos))
        if images and not self.takes_images:
            raise PromptError(f"the model takes text only, but the sample has {len(images)} image(s)")
        try:
            if images:
                pictures = [Image.fromarray(image) for image in images]
                inputs = self.processor(images=pictures, text=prompt, add_special_tokens=special, return_tensors="pt")
            elif self.takes_images:
                inputs = self.processor(text=prompt, add_special_tokens=special, return_tensors="pt")
            else:
                inputs = self.tokenizer(prompt, add_special_tokens=special, return_tensors="pt")
        except Exception as error:  # third-party processors raise anything; the row, not the job, has to fail
            raise PromptError(f"the processor refuses the prompt: {error}") from error
        tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        if tensors["input_ids"].shape[1] == 0:
            raise PromptError("the prompt holds no tokens")
        return tensors

    def decode(self, token_ids: Sequence[int]) -> str:
        """Token ids → text without special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))


def _plain_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")
