"""The lossless promise for every model family: one `Target` serves them all, each against its own `generate`.

Prompts hold no, one or two pictures of different sizes, so rows with and without pictures share every batch.
"""

from __future__ import annotations

import pytest

from decoding import Sampling
from tests import toys
from tests.conformance import checks

FAMILIES = tuple(family for family in toys.FAMILIES if family not in ("llama", "llava"))
COVERING = (("chain", "perturbed", 4), ("ragged", "perturbed", 9), ("chain", "right", 1), ("ragged", "right", 4))
SAMPLED = Sampling(temperature=0.9, top_k=20, top_p=0.9, repetition_penalty=1.3)


@pytest.mark.parametrize(("tree", "drafter", "slots"), COVERING)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_equals_generate(family: str, tree: str, drafter: str, slots: int) -> None:
    checks.check_greedy(family, tree, drafter, slots)


@pytest.mark.parametrize(("tree", "slots"), [("chain", 9), ("ragged", 4)])
@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_output_equals_plain_sampling_under_shared_noise(family: str, tree: str, slots: int) -> None:
    acceptance_length = checks.check_sampled(family, tree, "perturbed", slots, SAMPLED)
    assert acceptance_length > 1.1


@pytest.mark.parametrize("tree", ["chain", "ragged"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_of_memory_equals_a_fresh_prefill(family: str, tree: str) -> None:
    checks.check_cache(family, tree, "perturbed")
