"""An acceptance rule that writes what the drafter writes: what a drafter with pruned columns is worth on its own.

Belongs to `benchmarks.methods`; no job can choose it. Knows no models.
"""

from __future__ import annotations

import torch

from decoding.acceptance.walk import target_choice
from decoding.contracts import Acceptance, Judgement
from decoding.tree import Verdict


class FollowDrafter(Acceptance):
    """Take every draft of a chain, the last one as the token after the path, so that the target adds none of its own.

    The first token of a sample, which the target's prefill gives, is the target's; so is one for which nothing was
    drafted.

    Raises:
        ValueError: a tree is no chain.
    """

    lossless = False

    def judge(self, judgement: Judgement) -> Verdict:
        tree = judgement.tree
        if not tree.is_chain:
            raise ValueError("a drafter can be followed along chains only")
        choice = target_choice(judgement)
        num_drafts = tree.valid[:, 1:].long().cumprod(dim=1).sum(dim=1)
        n = num_drafts.clamp_min(1)
        place = torch.arange(tree.num_levels + 1, device=n.device)
        path = torch.where(place < n[:, None], place, 0)
        last = tree.tokens.gather(1, num_drafts[:, None])[:, 0]
        return Verdict(path, n, torch.where(num_drafts > 0, last, choice[:, 0]), path > 0)
