"""The slow reference draws what LlamaGen's own code draws, and filters as that code does."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.llamagen_reference import LlamaGenReference, ReferenceSampling, filter_logits, greedy
from tests.models.llamagen.layouts import FEATURES, GRID, HEADS, official_weights

# Drawn by `generate` of FoundationVision/LlamaGen at ce98ec4 from the same tensors: cfg_scale 3, temperature 0.9,
# top_k 1; text from four features, or class 2; with cfg_interval −1 and 2.
PUBLISHED = {
    ("text", -1): [26, 8, 25, 37, 28, 19, 19, 13, 13],
    ("text", 2): [26, 8, 25, 37, 28, 28, 2, 22, 4],
    ("class", -1): [7, 5, 25, 20, 4, 2, 11, 36, 11],
    ("class", 2): [7, 5, 25, 20, 23, 13, 6, 31, 26],
}


@pytest.mark.parametrize(("kind", "interval"), PUBLISHED)
def test_the_reference_draws_the_codes_of_the_published_code(kind: str, interval: int) -> None:
    reference = LlamaGenReference(official_weights(kind), HEADS, GRID)
    condition = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(0)) if kind == "text" else 2
    sampling = ReferenceSampling(cfg_scale=3.0, cfg_interval=interval, temperature=0.9, top_k=1)
    assert reference.generate(condition, sampling, greedy) == PUBLISHED[kind, interval]


def test_the_sampling_function_is_called_once_per_code_in_order() -> None:
    reference = LlamaGenReference(official_weights("class"), HEADS, GRID)
    asked: list[int] = []

    def choose(position: int, logits: Tensor) -> int:
        asked.append(position)
        assert logits.dtype == torch.float32
        assert int(logits.isfinite().sum()) == 5
        return position

    assert reference.generate(2, ReferenceSampling(top_k=5), choose, num_tokens=4) == [0, 1, 2, 3]
    assert asked == [0, 1, 2, 3]


def kept(logits: list[float], sampling: ReferenceSampling) -> list[int]:
    return filter_logits(torch.tensor(logits), sampling).isfinite().nonzero().flatten().tolist()


def test_filters_keep_what_the_published_sampler_keeps() -> None:
    logits = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]
    assert kept(logits, ReferenceSampling()) == [0, 1, 2, 3]
    assert kept(logits, ReferenceSampling(top_k=2)) == [1, 3]
    assert kept([1.0, 2.0, 1.0, 0.0], ReferenceSampling(top_k=2)) == [0, 1, 2], "ties with the k-th stay"
    assert kept(logits, ReferenceSampling(top_k=99)) == [0, 1, 2, 3]
    assert kept(logits, ReferenceSampling(top_p=0.39)) == [1]
    assert kept(logits, ReferenceSampling(top_p=0.41)) == [1, 3], "the code that crosses the mass stays"
    assert kept(logits, ReferenceSampling(top_p=0.0)) == [1], "no mass at all is the best code"
    # Top-k first: of the three that stay, the best has 0.44 of the mass. Temperature before both: 0.16 of 0.30.
    assert kept(logits, ReferenceSampling(top_k=3, top_p=0.43)) == [1]
    assert kept(logits, ReferenceSampling(temperature=0.5, top_p=0.52)) == [1]
    assert filter_logits(torch.tensor(logits), ReferenceSampling(temperature=0, top_k=1)).isfinite().all()
