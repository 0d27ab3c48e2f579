"""An acceptance rule for timings alone: it takes drafts at a given rate and does not ask the target.

Belongs to `benchmarks.synthetic`; no job can choose it. Knows no models.
"""

from __future__ import annotations

import torch

from decoding.acceptance.walk import target_choice
from decoding.contracts import Acceptance, Judgement
from decoding.noise import Stream
from decoding.tree import Verdict


class Forced(Acceptance):
    """Take each draft of a chain with probability `rate`, the first that is not taken ends it.

    The draws are the sample's own (stream RULE), so they follow from the request's seed and are the same for every
    length of chains and every drafter. The token after the last draft is the target's, as it always is.

    Raises:
        ValueError: the rate is no probability, or a tree is no chain.
    """

    lossless = False

    def __init__(self, rate: float) -> None:
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"a rate of acceptance lies between 0 and 1, not {rate}")
        self.rate = rate

    def judge(self, judgement: Judgement) -> Verdict:
        tree = judgement.tree
        if not tree.is_chain:
            raise ValueError("acceptance can be forced for chains only")
        choice = target_choice(judgement)
        draws = judgement.noise.uniform(Stream.RULE)[:, : tree.num_levels]
        taken = (draws < self.rate) & tree.valid[:, 1:]
        n = 1 + taken.long().cumprod(dim=1).sum(dim=1)
        place = torch.arange(tree.num_levels + 1, device=n.device)
        path = torch.where(place < n[:, None], place, 0)
        told = torch.cat([tree.tokens[:, :1], choice[:, :-1]], dim=1)
        relaxed = (path > 0) & (tree.tokens != told)
        return Verdict(path, n, choice.gather(1, (n - 1)[:, None])[:, 0], relaxed)
