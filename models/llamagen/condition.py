"""Encode prompts as text features with T5, the condition of text-to-image models."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, T5EncoderModel

from models.heads.files import read_shapes
from models.inputs.processing import PromptError
from models.llamagen.shape import MAX_TEXT_TOKENS, GptShape
from models.loading.checkpoints import CheckpointError, CheckpointRef, load_pretrained, read_config, read_processor

MAX_CHARACTERS = 4096
"""Longest prompt in characters; the time of cleaning grows quadratically."""

NUM_REMEMBERED = 64
"""Number of prompts whose features are cached, for several images of one prompt."""


class EmptyPrompt(PromptError):
    """Raised for a prompt without text, before or after cleaning."""


class PromptTooLong(PromptError):
    """Raised for a prompt with too many characters, or with too many tokens if truncation is off."""


class T5Condition:
    """T5 encoder with its tokenizer, which encodes prompts of at most `max_tokens` tokens, the end token included.

    With `truncate`, longer prompts are truncated, as in LlamaGen's scripts; otherwise they raise PromptTooLong.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any, max_tokens: int = MAX_TEXT_TOKENS, truncate: bool = False
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.max_tokens, self.truncate = max_tokens, truncate
        self.num_forwards = 0
        self.device = next(model.parameters()).device
        self._features = lru_cache(NUM_REMEMBERED)(self._encode)

    @property
    def condition_dim(self) -> int:
        config: Any = self.model.config
        return int(config.d_model)

    def encode(self, text: str) -> Tensor:
        """Encode a prompt as features (l, condition_dim) of its l tokens, without padding; the result is read-only.

        Raises: PromptError.
        """
        return self._features(self._clean(text))

    def _encode(self, cleaned: str) -> Tensor:
        ids = torch.tensor([self._tokenize(cleaned)], device=self.device)
        with torch.no_grad():
            features: Tensor = self.model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
        self.num_forwards += 1
        if not bool(features.isfinite().all()):
            # Published T5s overflow in float16.
            raise PromptError("the text encoder gives values that are not finite for this prompt; try another dtype")
        return features

    def _clean(self, text: str) -> str:
        if not isinstance(text, str):
            raise PromptError(f"a prompt must be text, not {type(text).__name__}")
        if not text.strip():
            raise EmptyPrompt("the prompt is empty")
        if len(text) > MAX_CHARACTERS:
            raise PromptTooLong(f"the prompt has {len(text)} characters; at most {MAX_CHARACTERS} are read")
        # Cleaning needs packages that class labels and precomputed features do not need.
        from models.llamagen.cleaning import clean_caption

        try:
            cleaned = clean_caption(text)
        except Exception as error:  # the HTML parser raises its own errors for broken declarations
            raise PromptError(f"the prompt cannot be cleaned: {error}") from error
        if not cleaned:
            raise EmptyPrompt(f"nothing is left of the prompt once addresses, codes and markup are gone: {text[:80]!r}")
        return cleaned

    def _tokenize(self, cleaned: str) -> list[int]:
        try:
            ids: list[int] = self.tokenizer(cleaned, verbose=False).input_ids
            if len(ids) > self.max_tokens and self.truncate:
                ids = self.tokenizer(cleaned, truncation=True, max_length=self.max_tokens).input_ids
        except Exception as error:  # tokenizers may raise any error; fail the row, not the job
            raise PromptError(f"the tokenizer refuses the prompt: {error}") from error
        if len(ids) > self.max_tokens:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens, and the model takes {self.max_tokens}; shorten it, or allow "
                "truncation"
            )
        return ids


def check_t5(ref: CheckpointRef, gpt: GptShape) -> PreTrainedConfig:
    """Return the configuration of a text encoder; raise CheckpointError unless it is a T5 of the GPT's feature width
    with readable weight headers."""
    folder = Path(ref.path)
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    for file in files:
        read_shapes(file)
    config = read_config(ref)
    if config.model_type != "t5":
        raise CheckpointError(f"{ref.path}: the text encoder must be a T5, not {config.model_type!r}")
    if config.d_model != gpt.condition_dim:
        raise CheckpointError(
            f"{ref.path}: its features are {config.d_model} wide, and the GPT reads {gpt.condition_dim}; take the "
            "encoder that the GPT was trained with (flan-t5-xl for the published ones)"
        )
    if ref.is_folder and not files:
        raise CheckpointError(f"{ref.path}: it holds no weights: neither model.safetensors nor pytorch_model.bin")
    return config


def load_t5(ref: CheckpointRef, gpt: GptShape, dtype: str, device: torch.device, truncate: bool = False) -> T5Condition:
    """Load the encoder of a T5 from safetensors, or from torch's own format with `weights_only`."""
    config = check_t5(ref, gpt)
    tokenizer = read_processor(ref, config)
    if tokenizer.eos_token_id is None or tokenizer("a").input_ids[-1:] != [tokenizer.eos_token_id]:
        raise CheckpointError(f"{ref.path}: its tokenizer does not end a text with the end token, as T5's does")
    model = load_pretrained(ref, config, T5EncoderModel, dtype, use_safetensors=False, weights_only=True)
    return T5Condition(model.to(device), tokenizer, gpt.num_condition_tokens, truncate)


def pad_left(features: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Left-pad features (l, condition_dim) to (num_columns, condition_dim); also returns the bool padding mask."""
    num_padding = num_columns - features.shape[0]
    assert num_padding >= 0, (features.shape, num_columns)
    padded = torch.cat([features.new_zeros(num_padding, features.shape[1]), features])
    return padded, torch.arange(num_columns, device=features.device) < num_padding
