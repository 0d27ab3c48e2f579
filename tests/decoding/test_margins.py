"""Margins between two tokens, against transformers' forward and logits processors."""

from __future__ import annotations

import pytest
import torch

from decoding.margins import ROUNDING, margin
from decoding.noise import Noise, Stream, key_of
from decoding.reference import next_logits, processors_of
from decoding.types import Request, Sampling
from tests import toys

SAMPLINGS = {
    "greedy": Sampling(),
    "penalised": Sampling(repetition_penalty=1.7),
    "sampled": Sampling(temperature=0.8, top_k=20, top_p=0.95, repetition_penalty=1.2),
    "processed": Sampling(no_repeat_ngram_size=2, min_new_tokens=9, begin_suppress_tokens=tuple(range(4, 30))),
}
FIRST = [5, 9, 5, 3]


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "llava"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_margins_are_those_of_transformers(family: str, name: str) -> None:
    text, images = toys.prompt(family, 3)
    sampling = SAMPLINGS[name]
    request = Request("one", text, images, sampling, seed=7)
    inputs = toys.front_end(family).encode(text, images)
    for tokens in ([], FIRST):
        logits = next_logits(toys.oracle(family), inputs, tokens)
        history = torch.cat([inputs["input_ids"], torch.tensor([tokens], dtype=torch.long)], dim=1)
        processors = processors_of(sampling, inputs["input_ids"].shape[1], toys.target(family).eos_ids)
        scores = processors(history, logits[None])[0]
        if sampling.temperature:
            noise = Noise(torch.tensor([key_of(7, "one", 0)]), torch.tensor([len(tokens)]))
            scores = scores + noise.gumbel(Stream.TOKEN, torch.zeros(1, dtype=torch.long), len(scores))[0, 0]
        best, second = scores.topk(2).indices.tolist()
        for first, other in ((best, second), (second, best), (best, int(scores.argmin()))):
            result = margin(toys.target(family), request, tokens, first, other)
            assert result.value == pytest.approx(float(scores[first] - scores[other]), rel=1e-4, abs=1e-4)
            assert ROUNDING[torch.float32] <= result.tolerance < 0.01
