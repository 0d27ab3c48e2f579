"""Whether an inflated model is its source: the same tokens through transformers' `generate`, and the same logits.

Owns the comparison and the prompts it runs on. Knows nothing of how a model is inflated or stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models.inputs.processing import FrontEnd
from models.loading.checkpoints import CheckpointRef, read_config, read_processor
from zoo.text_samples import held_out_prompts
from zoo.world import sample_scenes

Inputs = dict[str, Tensor]
EXACT_TOLERANCE = 1e-4
"""Largest difference of logits in single or double precision, in parts of the largest logit. Norms of transformers run
in single precision, and sums over more numbers have another order."""
HALF_TOLERANCE = 0.03
"""The same for the gap between the two best tokens where outputs in half precision part: more is no rounding."""


@dataclass(frozen=True)
class Difference:
    """What two models say to the same prompts, in one type.

    Logits are compared along the source's own output. `worst_gap` is the largest gap between the source's two best
    logits at the first token where outputs part, 0 where they never do; it and the difference count in parts of the
    source's largest logit.
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
        """Why the inflated model is not its source; empty where it is."""
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


def zoo_inputs(folder: str | Path, num: int, seed: int) -> list[Inputs]:
    """Held-out samples for a text or a captioning model of the zoo, encoded by its own processor."""
    ref = CheckpointRef(str(folder))
    front_end = FrontEnd(read_processor(ref, read_config(ref)))
    if not front_end.takes_images:
        return [front_end.encode(prompt, ()) for prompt in held_out_prompts(num, seed)]
    samples = []
    for _, image, _, prompt in sample_scenes("held_out", num, seed):
        content: list[dict[str, Any]] = [{"type": "image"}, {"type": "text", "text": prompt}]
        inputs = front_end.processor(
            text=front_end.render([{"role": "user", "content": content}]), images=image, return_tensors="pt"
        )
        samples.append(dict(inputs))
    return samples


@torch.no_grad()
def compare(
    source: PreTrainedModel, inflated: PreTrainedModel, samples: Sequence[Inputs], max_new_tokens: int
) -> Difference:
    """Run both models over samples of one row each, without pads, greedily."""
    pairs, firsts = [], []
    for sample in samples:
        written = _generate(source, sample, max_new_tokens)
        told = _generate(inflated, sample, max_new_tokens)
        prompt = sample["input_ids"].shape[1]
        pairs.append((_logits(source, sample, written, prompt), _logits(inflated, sample, written, prompt)))
        firsts.append(_first_difference(written[prompt:].tolist(), told[prompt:].tolist()))
    return summarise(str(source.dtype), pairs, firsts)


def summarise(dtype: str, pairs: Sequence[tuple[Tensor, Tensor]], firsts: Sequence[int | None] | None) -> Difference:
    """Put together logits (n, V) of source and inflated model for each prompt, and where their outputs first part.

    Without `firsts` that is where their first choices do, which is the same for greedy outputs.
    """
    equal_prompts = equal_argmax = num_tokens = 0
    difference = gap = largest = 0.0
    for index, (ours, theirs) in enumerate(pairs):
        same = ours.argmax(-1) == theirs.argmax(-1)
        if firsts is not None:
            first = firsts[index]
        else:
            first = None if same.all() else int((~same).nonzero()[0])
        largest = max(largest, ours.abs().max().item())
        worst = (ours - theirs).abs().max().item()
        # Compared the other way round, not-a-number would count as no difference.
        difference = difference if worst <= difference else worst
        equal_argmax += int(same.sum())
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
    """Prompt and greedy output of one row, (L,)."""
    written: Any = model.generate(**_placed(model, sample), max_new_tokens=max_new_tokens, do_sample=False)
    return written[0].cpu()


def _logits(model: PreTrainedModel, sample: Inputs, written: Tensor, prompt: int) -> Tensor:
    """Logits (n, V) from which each of the n written tokens was chosen."""
    inputs = _placed(model, sample) | {"input_ids": written[None].to(model.device)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    for name in ("token_type_ids", "mm_token_type_ids"):
        inputs.pop(name, None)
    logits: Tensor = model(**inputs, use_cache=False).logits[0, prompt - 1 : -1]
    return logits.cpu().double()


def _first_difference(one: list[int], other: list[int]) -> int | None:
    for place in range(max(len(one), len(other))):
        if one[place : place + 1] != other[place : place + 1]:
            return place
    return None
