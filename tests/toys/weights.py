"""Defines the vocabulary, the tokenizer and the random weights of all toy models."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast, Qwen2Tokenizer

VOCAB_SIZE = 64
STD = 0.2
IMAGE_ID = 3
VIDEO_ID = 4
"""In the place of the first word, for tokenizers that know videos; to them the word w4 is unknown."""


def make_tokenizer(first_word: int = 4, **more_words: int) -> PreTrainedTokenizerFast:
    """Words w4 … w63 with bos 1, eos 2, image 3; token id = the number in the word."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<image>": IMAGE_ID} | more_words
    words |= {f"w{i}": i for i in range(first_word, VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    # A newline stays a word (an unknown one, id 0): contexts without pixels put one in the place of each image.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<image>"],
    )


def make_qwen_tokenizer() -> Qwen2Tokenizer:
    """The same words as whole tokens of the byte-level class that transformers insists on for Qwen2 checkpoints."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<image>": IMAGE_ID} | {f"w{i}": i for i in range(4, VOCAB_SIZE)}
    tokenizer = Qwen2Tokenizer(
        vocab=words, merges=[], unk_token="<pad>", pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.add_tokens([AddedToken(f"w{i}", lstrip=True, normalized=False) for i in range(4, VOCAB_SIZE)])
    return tokenizer


def make_multimodal_tokenizer() -> PreTrainedTokenizerFast:
    """The same words for processors that ask their tokenizer for the image and video placeholders by name."""
    tokenizer = make_tokenizer(VIDEO_ID + 1, **{"<video>": VIDEO_ID})
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>", "<video>"]})
    assert tokenizer.convert_tokens_to_ids("<video>") == VIDEO_ID
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens={"image_token": "<image>", "video_token": "<video>"},
    )


def randomise(model: torch.nn.Module, seed: int, std: float = STD) -> None:
    """Redraw every matrix, and the vectors that transformers itself draws at random: norms keep their ones, biases
    their zeros, and nothing is left that depends on what ran before."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith(("class_embedding", "image_newline")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
