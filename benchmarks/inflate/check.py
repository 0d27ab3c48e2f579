"""Checks that an inflated model equals its source: the same tokens by transformers' `generate`, and the same logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.harness.engines import front_end_of
from benchmarks.harness.verdict import first_difference
from benchmarks.inflate.shapes import InflationError
from zoo.text import held_out_prompts
from zoo.world import sample_scenes

Inputs = dict[str, Tensor]
EXACT_TOLERANCE = 1e-4
"""Largest allowed difference of logits in float32 or float64, relative to the largest logit."""
HALF_TOLERANCE = 0.03
"""Largest allowed gap between the two best logits at which outputs in half precision diverge, on the same scale."""


@dataclass(frozen=True)
class Difference:
    """Comparison of two models on the same prompts, along the source's output.

    `worst_gap` is the largest gap between the source's two best logits at the first token that differs (0 if none
    does). It and `logit_difference` are relative to the source's largest logit.
    """

    dtype: str
    num_prompts: int
    num_tokens: int
    equal_prompts: int
    equal_argmax_share: float
    logit_difference: float
    worst_gap: float

    @property
    def fault(self) -> str:
        """Description of how the inflated model differs from its source; empty if it does not."""
        if not self.logit_difference < float("inf"):
            return f"in {self.dtype} its logits are not finite"
        if self.dtype in ("float32", "float64"):
            if self.logit_difference > EXACT_TOLERANCE:
                return f"in {self.dtype} its logits differ by {self.logit_difference:.2g} of the largest"
            if self.equal_prompts < self.num_prompts:
                return f"in {self.dtype} {self.num_prompts - self.equal_prompts} of {self.num_prompts} outputs differ"
        elif self.worst_gap > HALF_TOLERANCE:
            return f"in {self.dtype} an output differs where the source's choice has a lead of {self.worst_gap:.2g}"
        return ""

    def require_equal(self, source: object, shape: object) -> Difference:
        """Return this comparison; raise InflationError if the models differ."""
        if self.fault:
            raise InflationError(f"{source} in the shape {shape} is another model: {self.fault}")
        return self


def zoo_inputs(folder: str | Path, num: int, seed: int) -> list[Inputs]:
    """Return held-out samples for a text or captioning model of the zoo, encoded by its own processor."""
    front_end = front_end_of(folder)
    if not front_end.takes_images:
        return [front_end.encode(prompt, ()) for prompt in held_out_prompts(num, seed)]
    samples = []
    for _, image, _, prompt in sample_scenes("held_out", num, seed):
        content: list[dict[str, Any]] = [{"type": "image"}, {"type": "text", "text": prompt}]
        text = front_end.render([{"role": "user", "content": content}])
        samples.append(dict(front_end.processor(text=text, images=image, return_tensors="pt")))
    return samples


@torch.no_grad()
def compare(
    source: PreTrainedModel, inflated: PreTrainedModel, samples: Sequence[Inputs], max_new_tokens: int
) -> Difference:
    """Run both models greedily over samples of one row each and compare them."""
    pairs, firsts = [], []
    for sample in samples:
        expected, actual = (_generate(model, sample, max_new_tokens) for model in (source, inflated))
        prompt = sample["input_ids"].shape[1]
        pairs.append((_logits(source, sample, expected, prompt), _logits(inflated, sample, expected, prompt)))
        firsts.append(first_difference(expected[prompt:].tolist(), actual[prompt:].tolist()))
    return summarise(str(source.dtype), pairs, firsts)


def summarise(dtype: str, pairs: Sequence[tuple[Tensor, Tensor]], firsts: Sequence[int | None]) -> Difference:
    """Compare logits (n, V) of source and inflated model for each prompt; `firsts` are the indices of the first
    different token, None for equal outputs."""
    equal_prompts = equal_argmax = num_tokens = 0
    difference = gap = largest = 0.0
    for (ours, theirs), first in zip(pairs, firsts, strict=True):
        largest = max(largest, ours.abs().max().item())
        worst = (ours - theirs).abs().max().item()
        # In this order NaN counts as a difference.
        difference = difference if worst <= difference else worst
        equal_argmax += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        num_tokens += len(ours)
        if first is None:
            equal_prompts += 1
        else:
            best = ours[min(first, len(ours) - 1)].topk(2).values
            gap = max(gap, (best[0] - best[1]).item())
    return Difference(
        dtype=dtype.removeprefix("torch."),
        num_prompts=len(pairs),
        num_tokens=num_tokens,
        equal_prompts=equal_prompts,
        equal_argmax_share=equal_argmax / num_tokens,
        logit_difference=difference / largest,
        worst_gap=gap / largest,
    )


def _placed(model: PreTrainedModel, sample: Inputs) -> Inputs:
    return {
        name: value.to(model.device, model.dtype if value.is_floating_point() else None)
        for name, value in sample.items()
    }


def _generate(model: PreTrainedModel, sample: Inputs, max_new_tokens: int) -> Tensor:
    """Return prompt and greedy output of one row, (L,)."""
    tokens: Any = model.generate(**_placed(model, sample), max_new_tokens=max_new_tokens, do_sample=False)
    row: Tensor = tokens[0].cpu()
    return row


def _logits(model: PreTrainedModel, sample: Inputs, tokens: Tensor, prompt: int) -> Tensor:
    """Return the logits (n, V) from which each of the n generated tokens was chosen."""
    inputs = _placed(model, sample) | {"input_ids": tokens[None].to(model.device)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    for name in ("token_type_ids", "mm_token_type_ids"):
        inputs.pop(name, None)
    logits: Tensor = model(**inputs, use_cache=False).logits[0, prompt - 1 : -1]
    return logits.cpu().double()
