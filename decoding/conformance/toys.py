"""A Llama of two layers with random weights and a vocabulary of 64 words, made in memory."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from models.inputs.processing import FrontEnd
from models.target import Target

VOCAB_SIZE = 64
STD = 0.2
"""Standard deviation of weights; with the default 0.02 a model ignores its positions."""
IMAGE_ID = 3
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def text_config(vocab_size: int = VOCAB_SIZE) -> LlamaConfig:
    """Return the configuration of the Llama."""
    return LlamaConfig(vocab_size=vocab_size, **SIZES)


@cache
def llama(seed: int = 0, vocab_size: int = VOCAB_SIZE) -> LlamaForCausalLM:
    """Return the model as transformers runs it; copies of it are used in engines."""
    model = LlamaForCausalLM(text_config(vocab_size)).eval()
    randomise(model, seed)
    return model


def make_tokenizer(first_word: int = 4, **more_words: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words w4 … w63 with bos 1, eos 2, image 3; a token's id is the number in the word."""
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


@cache
def front_end() -> FrontEnd:
    """Return the text front end of the Llama."""
    return FrontEnd(make_tokenizer())


def target(seed: int = 0) -> Target:
    """Return a copy of the Llama for an engine."""
    return Target(copy.deepcopy(llama(seed)), front_end(), "toy")


def similar(noise: float = 0.02) -> Target:
    """Return the target with its matrices disturbed: a drafter that agrees with it often, but not always."""
    model = copy.deepcopy(llama())
    disturb(model, noise, 1000)
    return Target(model, front_end(), "toy-drafter")


def disturb(model: torch.nn.Module, noise: float, seed: int) -> None:
    """Add random numbers of standard deviation `noise` to every matrix."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * noise)


def randomise(model: torch.nn.Module, seed: int, std: float = STD) -> None:
    """Redraw every matrix, and the vectors that transformers itself draws at random: norms keep their ones, biases
    their zeros, and nothing is left that depends on what ran before."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith(("class_embedding", "image_newline")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
