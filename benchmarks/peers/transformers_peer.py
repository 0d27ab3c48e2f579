"""Runs transformers' `generate` as a peer: `python -m benchmarks.peers.transformers_peer WORK MODE`.

Modes: `eager` (growing cache), `compiled` (static cache, compiled step with packed weights), `assisted` and
`assisted_confident` (a drafter for one sample at a time; the second uses transformers' default confidence threshold).
Prompts of similar length are batched together, padded on the left.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    CompileConfig,
    GenerationConfig,
    PreTrainedModel,
    StaticCache,
)

from benchmarks.harness.process import Outcome, Work, serve, versions_of

ASSISTED = {"assisted": 0.0, "assisted_confident": None}
"""Confidence threshold of the drafter; None for transformers' default."""


def load_model(path: str, dtype: str, ignore_eos: bool) -> PreTrainedModel:
    """Load a text model with the settings of `set_greedy`."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    model.requires_grad_(False)
    set_greedy(model, ignore_eos)
    return model


def set_greedy(model: PreTrainedModel, ignore_eos: bool) -> None:
    """Reduce the generation settings to the checkpoint's end tokens (none with `ignore_eos`) and padding."""
    settings, config = model.generation_config, model.config.get_text_config()
    ends = settings.eos_token_id if settings.eos_token_id is not None else config.eos_token_id
    pad = next((i for i in (settings.pad_token_id, config.pad_token_id) if i is not None), 0)
    model.generation_config = GenerationConfig(eos_token_id=None if ignore_eos else ends, pad_token_id=pad)


def end_ids(model: PreTrainedModel) -> frozenset[int]:
    ends = model.generation_config.eos_token_id
    return frozenset(() if ends is None else ends if isinstance(ends, list) else [ends])


def cut(tokens: Sequence[int], ends: frozenset[int]) -> list[int]:
    """Return the tokens up to and including the first end token."""
    for number, token in enumerate(tokens):
        if token in ends:
            return list(tokens[: number + 1])
    return list(tokens)


def pad_left(prompts: Sequence[Sequence[int]], pad_id: int) -> dict[str, torch.Tensor]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def batches(prompts: Sequence[Sequence[int]], batch: int) -> list[list[int]]:
    """Return the indices of the prompts in batches of similar lengths."""
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    return [order[start : start + batch] for start in range(0, len(order), batch)]


def generate_all(
    model: Any,
    prompts: Sequence[Sequence[int]],
    batch: int,
    options: Callable[[int], dict[str, Any]],
) -> list[list[int]]:
    """Return the new tokens of all prompts by `generate`, in batches of similar lengths; `options` by batch size."""
    ends, pad = end_ids(model), model.generation_config.pad_token_id
    outputs: list[list[int]] = [[] for _ in prompts]
    for numbers in batches(prompts, batch):
        inputs = {
            name: tensor.to(model.device) for name, tensor in pad_left([prompts[i] for i in numbers], pad).items()
        }
        sequences = model.generate(**inputs, **options(len(numbers)))
        for number, row in zip(numbers, sequences[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            outputs[number] = cut(row, ends)
    return outputs


class GenerateRunner:
    """A model, an assistant for the assisted modes, and the options of `generate`."""

    def __init__(self, work: Work, mode: str) -> None:
        torch.set_num_threads(work.threads)
        self._work, self._mode = work, mode
        self._model = load_model(work.target, work.dtype, work.ignore_eos)
        self._options: dict[str, Any] = {"do_sample": False, "max_new_tokens": work.max_new_tokens}
        self._num_forwards = 0
        self._caches: dict[int, StaticCache] = {}
        if mode == "compiled":
            # Packs the weights; without it compiling gains little on a CPU.
            torch._inductor.config.freezing = True
            compiling = CompileConfig(dynamic=False, mode="default")
            compiling._compile_all_devices = True
            self._options["compile_config"] = compiling
        if mode in ASSISTED:
            assistant = load_model(work.drafter, work.dtype, work.ignore_eos)
            assistant.generation_config.num_assistant_tokens = work.gamma
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            if ASSISTED[mode] is not None:
                assistant.generation_config.assistant_confidence_threshold = ASSISTED[mode]
            self._options["assistant_model"] = assistant
            self._model.register_forward_pre_hook(self._count_forward)

    def _count_forward(self, *_: object) -> None:
        self._num_forwards += 1

    def _cache(self, batch: int) -> dict[str, StaticCache]:
        """Return the cache of a batch size, emptied; compiled graphs depend on its address."""
        if self._mode != "compiled":
            return {}
        if batch not in self._caches:
            self._caches[batch] = StaticCache(self._model.config, max_cache_len=self._work.max_context_tokens)
        self._caches[batch].reset()
        return {"past_key_values": self._caches[batch]}

    def versions(self) -> dict[str, str]:
        return versions_of(torch, transformers)

    def warm(self, batch: int, num_requests: int) -> Outcome:
        """Run one full batch; every batch of a pass has the same shape."""
        return self.run(batch, min(batch, num_requests))

    def run(self, batch: int, num_requests: int) -> Outcome:
        """Run a pass; see `benchmarks.harness.process.serve`. With a drafter, every forward of the target is a
        step."""
        prompts = self._work.prompt_ids[:num_requests]
        forwards_before = self._num_forwards
        start = time.perf_counter()
        outputs = generate_all(self._model, prompts, batch, lambda size: self._options | self._cache(size))
        seconds = time.perf_counter() - start
        steps = self._num_forwards - forwards_before
        return Outcome(seconds, outputs, steps, sum(map(len, outputs)) - steps if steps else 0)


if __name__ == "__main__":
    sys.exit(serve(GenerateRunner))
