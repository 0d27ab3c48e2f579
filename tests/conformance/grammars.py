"""Grammars over toy models: a byte-level vocabulary of 64 tokens, and checks against transformers with a mask.

The oracle is `generate` of the target alone, or the slow reference, with a logits processor that follows the whole
output from its beginning at every token; validity is checked by `jsonschema`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast

from decoding import Completion, Engine, Method, Request, Sampling
from decoding.grammar import SEPARATORS, Grammar, Vocabulary, schema_source
from decoding.reference import reference_tokens
from tests import toys
from tests.conformance import checks

MERGES = [
    (":", "Ġ"), (",", "Ġ"), ("t", "r"), ("tr", "u"), ("tru", "e"), ("n", "u"), ("l", "l"), ("nu", "ll"), ("f", "a"),
    ("l", "s"), ("fa", "ls"), ("fals", "e"), ("Ã", "©"), ("1", "0"), ("a", "b"), ("{", '"'), ('"', ":Ġ"), (",Ġ", '"'),
]  # fmt: skip
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "ab": {"enum": ["ab", "abc", 'é"\n', "trunk"]},
        "list": {
            "type": "array",
            "minItems": 1,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {"n": {"type": "integer", "minimum": -20, "maximum": 101}, "t": {"type": "boolean"}},
                "required": ["n", "t"],
                "additionalProperties": False,
            },
        },
        "e": {"type": ["null", "string"], "maxLength": 4},
    },
    "required": ["ab", "list", "e"],
    "additionalProperties": False,
}


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Characters, and merges across the punctuation of JSON, so that forced text can be split in several ways."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<image>": 3}
    for word in [*'{}[]":,Ġ-.0123456789abcknrtuelsfi\\Ã©', *("".join(pair) for pair in MERGES)]:
        words[word] = len(words)
    assert len(words) <= toys.VOCAB_SIZE
    for spare in range(len(words), toys.VOCAB_SIZE):
        words[f"~{spare}"] = spare
    made = Tokenizer(models.BPE(words, MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(tokenizer(), toys.VOCAB_SIZE, frozenset([2]))


@cache
def grammar() -> Grammar:
    return Grammar(schema_source(SCHEMA), vocabulary())


def allowed_after(tokens: list[int], schema: dict[str, Any] = SCHEMA) -> Tensor:
    """Mask (V,) of the tokens after `tokens`, from a matcher that begins anew."""
    matcher = LLMatcher(vocabulary().tokens, LLMatcher.grammar_from_json_schema(schema, overrides=SEPARATORS))  # type: ignore[arg-type]
    assert matcher.consume_tokens(tokens), matcher.get_error()
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    return torch.from_numpy(bits[: toys.VOCAB_SIZE].astype(bool))


class Masked(LogitsProcessor):
    """transformers' seam for masks; `prompt` is the number of prompt tokens."""

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        allowed = allowed_after(input_ids[0, self.prompt :].tolist())
        return scores.masked_fill(~allowed, -torch.inf)


_EXPECTED: dict[tuple[str, str, Sampling], tuple[int, ...]] = {}


def expected(family: str, request: Request) -> tuple[int, ...]:
    """Output of the oracle: `generate` for greedy requests, else the slow reference."""
    key = family, request.sample_id, request.sampling
    if key not in _EXPECTED:
        inputs = toys.front_end(family).encode(request.prompt, request.images, request.videos)
        model, num_prompt = toys.oracle(family), inputs["input_ids"].shape[1]
        own = [] if request.grammar is None else [Masked(num_prompt)]
        if request.sampling.temperature > 0:
            _EXPECTED[key] = tuple(reference_tokens(model, inputs, request, frozenset([2]), own))
        else:
            limits = {"max_new_tokens": request.sampling.max_new_tokens, "do_sample": False, "eos_token_id": [2]}
            out: Any = model.generate(**inputs, **limits, logits_processor=LogitsProcessorList(own))  # type: ignore[operator]
            _EXPECTED[key] = tuple(out[0, num_prompt:].tolist())
    return _EXPECTED[key]


def requests(family: str, count: int, sampling: Sampling | None = None) -> list[Request]:
    """Requests of different lengths; every fourth has no grammar."""
    made = checks.requests(family, count, sampling, longest=70)
    return [
        Request(
            request.sample_id,
            request.prompt,
            request.images,
            request.sampling,
            request.seed,
            videos=request.videos,
            grammar=own,
        )
        for index, request in enumerate(made)
        for own in [None if index % 4 == 3 else grammar()]
    ]


def check_valid(completion: Completion) -> None:
    """A text that has ended is JSON of the schema; a text that was cut can be continued."""
    ids = list(completion.token_ids)
    if completion.finish_reason == "stop":
        jsonschema.validate(json.loads(tokenizer().decode(ids[:-1])), SCHEMA)
    else:
        assert completion.finish_reason == "length"
        assert allowed_after(ids).any()


def check_equal(
    make: Callable[[str], Method],
    family: str = "llama",
    sampling: Sampling | None = None,
    slots: int = 3,
    count: int = 7,
    async_output: bool = False,
) -> float:
    """The output equals the oracle's token for token; returns the mean acceptance length."""
    wanted = requests(family, count, sampling)
    engine = Engine(toys.target(family), make(family), slots, 160, async_output=async_output)
    done = checks.run(engine, wanted)
    for request in wanted:
        completion = done[request.sample_id]
        assert completion.token_ids == expected(family, request), request.sample_id
        checks.check_telemetry(completion)
        if request.grammar is not None:
            check_valid(completion)
    return sum(c.telemetry.mean_acceptance_length for c in done.values()) / count


def check_lossy(make: Callable[[str], Method], count: int = 8) -> int:
    """Outputs of a relaxed rule are valid; returns the number of relaxed tokens."""
    wanted = [request for request in requests("llama", count, Sampling()) if request.grammar is not None]
    done = checks.run(Engine(toys.target("llama"), make("llama"), 3, 160), wanted)
    for completion in done.values():
        check_valid(completion)
    return sum(c.telemetry.num_relaxed_accepts for c in done.values())
