"""Score how well images match texts with a contrastive image-text model, such as CLIP or SigLIP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from models.backends.select import resolve_device
from models.loading.checkpoints import (
    CheckpointError,
    CheckpointRef,
    first_line,
    load_pretrained,
    read_config,
    read_processor,
)
from models.loading.hub import offline

Pictures = Sequence[NDArray[np.uint8]]
BATCH = 32


@dataclass
class Scorer:
    """A model with `get_image_features` and `get_text_features` of one width."""

    model: Any
    tokenizer: Any
    image_processor: Any

    @classmethod
    def load(cls, ref: CheckpointRef, dtype: str, device: str) -> Scorer:
        """Load a checkpoint onto `device`, with weights of `dtype`.

        Raises CheckpointError if it has no image and text features, or no image processor.
        """
        config = read_config(ref)
        model: nn.Module = load_pretrained(ref, config, transformers.AutoModel, dtype, use_safetensors=True)
        if not (hasattr(model, "get_image_features") and hasattr(model, "get_text_features")):
            kind = config.model_type
            reason = f"{kind!r} has no image and text features; name a CLIP or SigLIP checkpoint"
            raise CheckpointError(f"{ref.path}: {reason}")
        try:
            with offline():
                prepare: Any = transformers.AutoImageProcessor.from_pretrained(ref.path)
        except Exception as error:  # each processor class raises its own errors
            raise CheckpointError(f"{ref.path}: its image processor cannot be read: {first_line(error)}") from error
        return cls(model.to(resolve_device(device)), read_processor(ref, config), prepare)

    @torch.inference_mode()
    def image_features(self, images: Pictures) -> NDArray[np.float64]:
        """Return features (n, d) of uint8 RGB images (height, width, 3)."""
        parts = []
        for some in _batches(images):
            pixels = self.image_processor([Image.fromarray(image) for image in some], return_tensors="pt")
            parts.append(_features(self.model.get_image_features(**self._placed(pixels))))
        return torch.cat(parts).double().cpu().numpy()

    @torch.inference_mode()
    def text_features(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Return features (n, d) of texts, which are cut to the model's length."""
        parts = []
        for some in _batches(texts):
            limit = self.model.config.text_config.max_position_embeddings
            whole = {"padding": "max_length", "padding_side": "right", "max_length": limit, "truncation": True}
            tokens = self.tokenizer(list(some), **whole, return_tensors="pt")
            # SigLIP is trained on padded texts without a mask; CLIP reads the mask.
            known = {name: tokens[name] for name in self.tokenizer.model_input_names if name in tokens}
            parts.append(_features(self.model.get_text_features(**self._placed(known))))
        return torch.cat(parts).double().cpu().numpy()

    def _placed(self, inputs: Any) -> dict[str, Tensor]:
        parameter = next(self.model.parameters())
        return {
            name: value.to(parameter.device, parameter.dtype if value.is_floating_point() else None)
            for name, value in inputs.items()
        }


def cosines(images: NDArray[np.float64], texts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the cosine (n,) of each image's features with those of its text."""
    norms = np.linalg.norm(images, axis=1) * np.linalg.norm(texts, axis=1)
    result: NDArray[np.float64] = (images * texts).sum(1) / np.maximum(norms, np.finfo(np.float64).tiny)
    return result


def _batches(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (values[start : start + BATCH] for start in range(0, len(values), BATCH))


def _features(output: Any) -> Tensor:
    features: Tensor = output if isinstance(output, Tensor) else output.pooler_output
    return features
