"""Checks of structured output on the shipped text pair, against `generate` of the target with a logits processor.

The processor follows the whole output with a new matcher of the grammar library for every token, so it shares neither
states nor masks with the engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from decoding import Completion, Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from decoding.contexts import Full
from decoding.contracts import Acceptance, Drafter, TreePolicy
from decoding.drafters import GrammarDrafter, LookupDrafter, ModelDrafter, NoDrafter
from decoding.grammar import Grammar, Vocabulary, choices_source, regex_source, schema_source
from decoding.reference import reference_tokens
from decoding.trees import Chain, DynamicTree, StaticTree, branching_paths
from models.loading.checkpoints import CheckpointRef
from models.target import Target
from tests.conformance.checks import check_telemetry, run
from zoo.pair import CHECKPOINTS

NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "größe": {"type": "number", "minimum": -10, "maximum": 10},
        "tags": {
            "type": "array",
            "items": {"enum": ["naïve", 'a "quoted" word', "back\\slash", "日本"]},
            "maxItems": 2,
        },
        "box": {
            "type": "object",
            "properties": {"left": {"type": "integer", "minimum": 0, "maximum": 999}, "seen": {"type": "boolean"}},
            "required": ["left", "seen"],
            "additionalProperties": False,
        },
    },
    "required": ["größe", "tags", "box"],
    "additionalProperties": False,
}
TEXT: dict[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string", "maxLength": 24}, "kind": {"enum": ["photo", "drawing", None]}},
    "required": ["text", "kind"],
    "additionalProperties": False,
}
FORMATS: dict[str, tuple[str, Any]] = {
    "nested": ("json_schema", NESTED),
    "text": ("json_schema", TEXT),
    "date": ("regex", r"(19|20)[0-9]{2}-[01][0-9]-[0-3][0-9]( at [0-9]{2}:[0-9]{2})?"),
    "choice": ("choices", ("yes", "yes, certainly", "no — never", "ünsicher")),
}
PROMPTS = ("<s>the small red circle", "<s>", '<s>{"text": "', "<s>A question about the picture")
SAMPLED = Sampling(max_new_tokens=60, temperature=0.8, top_k=30, top_p=0.95, repetition_penalty=1.1)
GREEDY = Sampling(max_new_tokens=60)


def chain() -> TreePolicy:
    return Chain(5)


def tree() -> TreePolicy:
    return StaticTree(branching_paths([3, 2, 1]))


def grown() -> TreePolicy:
    return DynamicTree(4, 3, 16)


def inner() -> Drafter:
    return ModelDrafter(model("text_drafter"), [Full()], model("text_target").vocab_size)


def forced() -> Drafter:
    return GrammarDrafter()


def forced_before_model() -> Drafter:
    return GrammarDrafter(inner())


METHODS: dict[str, tuple[Callable[[], Drafter], Callable[[], TreePolicy]]] = {
    "plain": (NoDrafter, lambda: Chain(1)),
    "model": (inner, chain),
    "tree": (inner, tree),
    "dynamic": (inner, grown),
    "lookup": (LookupDrafter, chain),
    "grammar": (forced, chain),
    "grammar+model": (forced_before_model, chain),
    "grammar+tree": (forced_before_model, tree),
}


@cache
def model(name: str) -> Target:
    return Target.load(CheckpointRef(str(CHECKPOINTS / name)), "float32", "cpu")


@cache
def grammar(name: str) -> Grammar:
    target = model("text_target")
    kind, value = FORMATS[name]
    source = {"json_schema": schema_source, "regex": regex_source, "choices": choices_source}[kind](value)
    return Grammar(source, Vocabulary(target.front_end.tokenizer, target.vocab_size, target.eos_ids))


class Processor(LogitsProcessor):
    """Masks logits by the library's own state after all tokens beyond the prompt."""

    def __init__(self, name: str, num_input_tokens: int) -> None:
        self._grammar, self._num_input_tokens = grammar(name), num_input_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        matcher = LLMatcher(self._grammar.vocabulary.tokens, self._grammar._source, log_level=0)
        assert matcher.consume_tokens(input_ids[0, self._num_input_tokens :].tolist())
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        return scores.masked_fill(torch.from_numpy(mask[: scores.shape[1]] == 0), -torch.inf)


@cache
def requests(sampling: Sampling) -> tuple[tuple[Request, str], ...]:
    """Requests and the names of their grammars: all of `FORMATS` in turn, and every fifth without one."""
    names = [*FORMATS, ""]
    asked = [(names[index % 5], PROMPTS[index % 4]) for index in range(10)]
    return tuple(
        (
            Request(f"r{index}", prompt, sampling=sampling, seed=3, grammar=grammar(name) if name else None),
            name,
        )
        for index, (name, prompt) in enumerate(asked)
    )


@cache
def expected(sampling: Sampling) -> dict[str, tuple[int, ...]]:
    """Tokens of the target alone: `generate` for greedy requests, the reference loop for sampled ones."""
    target = model("text_target")
    oracle = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "text_target", dtype=torch.float32).eval()
    outputs = {}
    for request, name in requests(sampling):
        inputs = target.front_end.encode(request.prompt, ())
        length = inputs["input_ids"].shape[1]
        own = [Processor(name, length)] if name else []
        if sampling.temperature:
            tokens = reference_tokens(oracle, inputs, request, target.eos_ids, own)
        else:
            limit = sampling.max_new_tokens
            out = oracle.generate(
                **inputs, max_new_tokens=limit, do_sample=False, logits_processor=LogitsProcessorList(own)
            )
            tokens = out[0, length:].tolist()
        outputs[request.sample_id] = tuple(tokens)
    return outputs


def decode(
    method: str,
    slots: int,
    wanted: Sequence[Request],
    rule: Acceptance | None = None,
    async_output: bool | None = None,
) -> dict[str, Completion]:
    drafter, policy = METHODS[method]
    made = Method(drafter(), policy(), rule or Exact())
    return run(Engine(model("text_target"), made, slots, 256, async_output=async_output), wanted)


def check_equal(method: str, slots: int, sampling: Sampling, async_output: bool | None = None) -> None:
    """All tokens equal the oracle's, and all texts that ended by themselves are whole."""
    wanted = requests(sampling)
    done = decode(method, slots, [request for request, _ in wanted], None, async_output)
    assert {key: c.token_ids for key, c in done.items()} == expected(sampling)
    for request, name in wanted:
        completion = done[request.sample_id]
        check_telemetry(completion)
        if name:
            check_text(name, completion)


def check_legal(method: str, rule: Acceptance, sampling: Sampling) -> None:
    """All texts follow their grammars; a rule that is not exact may give other texts than the target's."""
    wanted = requests(sampling)
    done = decode(method, 3, [request for request, _ in wanted], rule)
    for request, name in wanted:
        if name:
            check_text(name, done[request.sample_id])


def check_text(name: str, completion: Completion) -> None:
    """A text that ended by EOS is whole; others are beginnings of one."""
    kind, value = FORMATS[name]
    assert completion.finish_reason in ("stop", "length")
    if completion.finish_reason == "length":
        assert LLMatcher(grammar(name).vocabulary.tokens, grammar(name)._source, log_level=0).consume_tokens(
            list(completion.token_ids)
        )
    elif kind == "json_schema":
        jsonschema.validate(json.loads(completion.text), value)
    elif kind == "regex":
        assert re.fullmatch(value, completion.text), completion.text
    else:
        assert completion.text in value, completion.text
