"""Decodes one sample token by token with transformers' own forward and logits processors, as a reference for tests.

It shares only the noise with the engine; the noise is tested against published vectors.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from decoding.noise import Noise, Stream, key_of
from decoding.types import Request, Sampling


@torch.inference_mode()
def reference_tokens(
    model: nn.Module,
    inputs: dict[str, Tensor],
    request: Request,
    eos_ids: frozenset[int],
    custom_processors: Sequence[LogitsProcessor] = (),
) -> list[int]:
    """Return the expected token ids of plain decoding, EOS included; `inputs` are the processor's outputs.

    `custom_processors` are further logits processors, which run where `generate` runs those of its caller.

    Greedy decoding takes the argmax; sampling takes argmax(log p + g) with the sample's own noise g.
    """
    sampling = request.sampling
    processors = processors_of(sampling, inputs["input_ids"].shape[1], eos_ids, custom_processors)
    key = torch.tensor([key_of(request.seed, request.sample_id, request.replica, request.attempt)])
    tokens: list[int] = []
    while len(tokens) < sampling.max_new_tokens:
        logits = next_logits(model, inputs, tokens)
        history = torch.cat([inputs["input_ids"], torch.tensor([tokens], dtype=torch.long)], dim=1)
        scores = processors(history, logits[None])[0]
        if sampling.temperature > 0:
            noise = Noise(key, torch.tensor([len(tokens)]))
            scores = scores + noise.gumbel(Stream.TOKEN, torch.zeros(1, dtype=torch.long), scores.shape[0])[0, 0]
        tokens.append(int(scores.argmax()))
        if tokens[-1] in eos_ids and not sampling.ignore_eos:
            break
    return tokens


def next_logits(model: nn.Module, inputs: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """Return fp32 logits (V,) after the prompt and `tokens`, from one forward of the prompt and one of `tokens`.

    The forwards are separate so that placeholder ids among generated tokens are not replaced by images. Positions
    continue after the prompt's last position, as in `generate`.
    """
    family: Any = model
    positions = family._prepare_position_ids_for_generation(inputs["input_ids"], dict(inputs))
    out: Any = model(**inputs, use_cache=True)
    if tokens:
        later = positions[..., -1:] + torch.arange(1, len(tokens) + 1)
        ids = torch.tensor([tokens])
        out = model(input_ids=ids, position_ids=later, **cache_of(model, out), use_cache=True)
    logits: Tensor = out.logits[0, -1]
    return logits.float()


def cache_of(model: nn.Module, out: Any) -> dict[str, Any]:
    """Return the KV cache of a forward's output as keyword argument of the next forward; transformers renamed it in
    5.24."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return {name: getattr(out, name)}


def processors_of(
    sampling: Sampling, prompt_length: int, eos_ids: frozenset[int], custom_processors: Sequence[LogitsProcessor] = ()
) -> LogitsProcessorList:
    """Return transformers' processors for a prompt of `prompt_length` tokens, in the order of `generate`."""
    ends = [] if sampling.ignore_eos else sorted(eos_ids)
    least, begin = sampling.min_new_tokens, prompt_length
    processors = LogitsProcessorList()
    if sampling.sequence_bias:
        pairs = [[list(tokens), float(bias)] for tokens, bias in sampling.sequence_bias]
        processors.append(SequenceBiasLogitsProcessor(pairs))
    if sampling.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.no_repeat_ngram_size:
        processors.append(NoRepeatNGramLogitsProcessor(sampling.no_repeat_ngram_size))
    if sampling.bad_words_ids:
        processors.append(NoBadWordsLogitsProcessor([list(words) for words in sampling.bad_words_ids], ends))
    if ends and least:
        processors.append(MinNewTokensLengthLogitsProcessor(prompt_length, least, ends))
    elif ends and sampling.min_length:
        processors.append(MinLengthLogitsProcessor(sampling.min_length, ends))
    if sampling.forced_bos_token_id is not None:
        processors.append(ForcedBOSTokenLogitsProcessor(sampling.forced_bos_token_id))
        begin += prompt_length == 1
    if sampling.forced_eos_token_id:
        most = prompt_length + sampling.max_new_tokens
        processors.append(ForcedEOSTokenLogitsProcessor(most, list(sampling.forced_eos_token_id)))
    if sampling.suppress_tokens:
        processors.append(SuppressTokensLogitsProcessor(sampling.suppress_tokens))
    if sampling.begin_suppress_tokens:
        processors.append(SuppressTokensAtBeginLogitsProcessor(sampling.begin_suppress_tokens, begin))
    processors.extend(custom_processors)
    if sampling.temperature > 0:
        processors.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k > 0:
            processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            processors.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p > 0.0:
            processors.append(MinPLogitsWarper(sampling.min_p))
    return processors
