"""Defines the tokenizers of toy models, and names the vocabulary and the random weights of all."""

from __future__ import annotations

from transformers import AddedToken, PreTrainedTokenizerFast, Qwen2Tokenizer

from decoding.conformance.toys import IMAGE_ID, STD, VOCAB_SIZE, make_tokenizer, randomise

__all__ = ["IMAGE_ID", "STD", "VIDEO_ID", "VOCAB_SIZE", "make_qwen_tokenizer", "make_tokenizer", "randomise"]

VIDEO_ID = 4
"""In the place of the first word, for tokenizers that know videos; to them the word w4 is unknown."""


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
