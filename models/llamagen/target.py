"""Run LlamaGen as a target or an independent drafter, with conditions as prefixes of one or two lanes.

Lane 0 is conditional. With guidance, lane 1 is unconditional with the *same* padding, as public checkpoints are
trained, or has the features of a negative prompt with its own padding. The output is the VQ codes of a square image in
raster order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.contract import Condition, TargetModel
from models.inputs.clip import Clip
from models.inputs.content import ConditionPair
from models.inputs.packing import PackedInputs
from models.inputs.prefix import Prefix
from models.inputs.processing import PromptError
from models.llamagen.condition import pad_left
from models.llamagen.features import FeaturesError, check_features
from models.llamagen.gpt import Gpt


class TextEncoder(Protocol):
    """Text encoder of prompts; see `models.llamagen.condition.T5Condition`."""

    def encode(self, text: str) -> Tensor: ...


class LlamaGenTarget(TargetModel):
    """A LlamaGen model, with two lanes if `guided`. Without `text_encoder`, text models need features in requests."""

    def __init__(self, gpt: Gpt, text_encoder: TextEncoder | None = None, guided: bool = True, name: str = "") -> None:
        self.gpt, self.text_encoder, self.name = gpt, text_encoder, name
        self.num_lanes = 2 if guided else 1
        self.decoder, self.head = gpt, gpt.output
        self.device, self.dtype = gpt.output.weight.device, gpt.output.weight.dtype
        self.vocab_size, self.hidden_size = gpt.shape.vocab_size, gpt.shape.dim
        self.max_new_tokens, self.grid = gpt.shape.num_image_tokens, gpt.shape.grid
        self.eos_ids, self.special_ids = frozenset(), frozenset()

    def encode_lanes(
        self,
        prompt: str,
        images: Sequence[NDArray[np.uint8]],
        condition: Condition,
        videos: Sequence[Clip] = (),
        inputs: PackedInputs | None = None,
    ) -> list[Prefix]:
        """Encode the prompt, or `condition` if it is set, as one prefix per lane; raises PromptError."""
        assert inputs is None, "an image model has no processor"
        if images or videos:
            counts = f"{len(images)} image(s) and {len(videos)} video(s)"
            raise PromptError(f"the model makes images from text or a label, but the sample has {counts}")
        with torch.inference_mode():
            if self.gpt.shape.condition == "class":
                return self._class_lanes(prompt, condition)
            return self._text_lanes(prompt, condition)

    def _class_lanes(self, prompt: str, condition: Condition) -> list[Prefix]:
        num_classes = self.gpt.shape.num_classes
        if not isinstance(condition, int) or isinstance(condition, bool):
            raise PromptError(f"a class-conditional model needs a label from 0 to {num_classes - 1}, not {prompt!r}")
        if not 0 <= condition < num_classes:
            raise PromptError(f"the class label {condition} is not from 0 to {num_classes - 1}")
        # The label after the last one is the unconditional one.
        labels = (condition, num_classes)[: self.num_lanes]
        return [self._prefix(self.gpt.embed_class(label), None, 0) for label in labels]

    def _text_lanes(self, prompt: str, condition: Condition) -> list[Prefix]:
        if isinstance(condition, ConditionPair):
            features = [self._features(prompt, part) for part in (condition.positive, condition.negative)]
            return [self._text_prefix(part) for part in features[: self.num_lanes]]
        conditional = self._text_prefix(self._features(prompt, condition))
        padding, num_padding = conditional.padding, conditional.num_padding
        return [conditional, self._prefix(self.gpt.null_text(), padding, num_padding)][: self.num_lanes]

    def _text_prefix(self, features: Tensor) -> Prefix:
        num_padding = self.gpt.shape.num_condition_tokens - features.shape[0]
        padded, padding = pad_left(features, self.gpt.shape.num_condition_tokens)
        return self._prefix(self.gpt.embed_text(padded), padding if num_padding else None, num_padding)

    def _features(self, prompt: str, condition: Condition) -> Tensor:
        shape = self.gpt.shape
        if condition is None:
            if self.text_encoder is None:
                raise PromptError("no text encoder is loaded, and the sample brings no features of its own")
            features = self.text_encoder.encode(prompt)
            assert features.shape[1] == shape.condition_dim, (features.shape, shape.condition_dim)
        elif isinstance(condition, np.ndarray):
            try:
                features = torch.from_numpy(check_features(condition, shape.condition_dim, shape.num_condition_tokens))
            except FeaturesError as error:
                raise PromptError(str(error)) from None
        else:
            raise PromptError(f"a text-conditional model needs a prompt or features, not {condition!r}")
        return features.to(self.device, self.dtype)

    def _prefix(self, embeds: Tensor, padding: Tensor | None, num_padding: int) -> Prefix:
        """Create the prefix of condition embeddings (L, D), with token ids 0 as EAGLE heads for LlamaGen expect."""
        positions = torch.arange(embeds.shape[0], device=embeds.device)
        ids = torch.zeros_like(positions)
        return Prefix(ids, embeds, positions, ids > 0, (), padding, num_padding)

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""
