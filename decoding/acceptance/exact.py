"""Lossless acceptance: a draft is taken where it is the very token that the target would have taken.

Greedy rows compare with the argmax. Sampled rows compare with the target's shared-noise draw argmax(log p + g), g keyed
by sample and position, so the output equals plain sampling token for token, whatever was drafted (drafter-invariant
coupling: Daliri, Musco, Suresh 2024, arXiv 2408.07978).
"""

from __future__ import annotations

from decoding.acceptance.choice import target_choice
from decoding.acceptance.walk import walk_choices
from decoding.contracts import Judgement, StatelessRule
from decoding.tree import Verdict


class Exact(StatelessRule):
    """Take a draft where it equals the target's own choice."""

    def judge(self, judgement: Judgement) -> Verdict:
        return walk_choices(judgement.tree, target_choice(judgement))
