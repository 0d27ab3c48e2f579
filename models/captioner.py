"""Caption images in one sentence with a small image-to-text model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from models.backends.select import resolve_device
from models.loading.checkpoints import CheckpointRef, load_weights, read_config, read_processor


@dataclass
class Captioner:
    """A transformers image-text-to-text model, whose `generate` answers `prompt` about one image."""

    model: nn.Module
    processor: Any
    prompt: str
    num_beams: int = 3
    max_new_tokens: int = 128

    @classmethod
    def load(
        cls, ref: CheckpointRef, prompt: str, dtype: str, device: str, num_beams: int, max_new_tokens: int
    ) -> Captioner:
        """Load a checkpoint with its processor onto `device`, with weights of `dtype`."""
        config = read_config(ref)
        model = load_weights(ref, config, dtype, resolve_device(device))
        return cls(model, read_processor(ref, config), prompt, num_beams, max_new_tokens)

    @torch.inference_mode()
    def caption(self, image: NDArray[np.uint8]) -> str:
        """Return the caption of one uint8 RGB image (height, width, 3), without special tokens."""
        parameter = next(self.model.parameters())
        inputs = self.processor(images=[Image.fromarray(image)], text=self.prompt, return_tensors="pt")
        placed = {
            name: value.to(parameter.device, parameter.dtype if value.is_floating_point() else None)
            for name, value in inputs.items()
        }
        out = self.model.generate(  # type: ignore[operator]
            **placed, max_new_tokens=self.max_new_tokens, num_beams=self.num_beams, do_sample=False
        )
        config: Any = self.model.config
        # Decoder-only models repeat the prompt in their output, encoder-decoders do not.
        start = 0 if getattr(config, "is_encoder_decoder", False) else placed["input_ids"].shape[1]
        tokenizer = getattr(self.processor, "tokenizer", self.processor)
        return str(tokenizer.decode(out[0, start:], skip_special_tokens=True)).strip()
