"""Lossless acceptance: a draft is taken where it is the very token that the target would have taken.

Greedy rows compare with the argmax. Sampled rows compare with the target's shared-noise draw argmax(log p + g), g keyed
by sample and position, so the output equals plain sampling token for token, whatever was drafted (drafter-invariant
coupling: Daliri, Musco, Suresh 2024, arXiv 2408.07978).
"""

from __future__ import annotations

import torch

from decoding.acceptance.choice import target_choice
from decoding.acceptance.walk import walk_choices
from decoding.contracts import Judgement, StatelessRule
from decoding.tree import Verdict
from models.backends.cpu.verify_chain import WALK, can_walk


class Exact(StatelessRule):
    """Take a draft where it equals the target's own choice."""

    def judge(self, judgement: Judgement) -> Verdict:
        # Nothing is drawn, penalised or filtered where no logits had to be made beside the raw ones.
        if judgement.tree.is_chain and judgement.warped is judgement.raw and can_walk(judgement.raw):
            path, n, own, said, logprobs = WALK(judgement.raw, judgement.tree.tokens, judgement.tree.valid)
            return Verdict(path, n, own, torch.zeros_like(path, dtype=torch.bool), said, logprobs)
        return walk_choices(judgement.tree, target_choice(judgement))
