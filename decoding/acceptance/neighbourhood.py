"""Computes A(k, δ): the nearest neighbours whose probability is added to a draft's while the distortion is within δ.

Jang et al. 2024, "LANTERN", section 3.3 (arXiv 2410.03355). Shapes: n examined neighbours, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from decoding.acceptance.relaxed import special_tokens
from decoding.contracts import EngineSpec

Divergence = Literal["tvd", "jsd", "multiplicative"]

_TINY = 1e-60
"""Smaller than every positive float32; avoids 0 / 0 without changing any other quotient."""


def jensen_shannon(prob: Tensor, moved: Tensor) -> Tensor:
    """Return the float64 divergence in nats between q and q after mass `moved` goes to a token of probability `prob`.

    With m = moved, JSD = ½ · [m · ln 2 + (own + m) · ln((own + m) / (own + m/2)) + own · ln(own / (own + m/2))]. It
    increases with m, so comparing cumulative sums with the bound finds the longest prefix of neighbours.
    """
    half = moved / 2
    middle = (prob + half).clamp_min(_TINY)
    # log1p, because for small m the last two terms cancel to first order.
    gained = (prob + moved) * torch.log1p(half / middle)
    lost = prob * torch.log1p(half / prob.clamp_min(_TINY))
    return 0.5 * (moved * math.log(2.0) + gained - lost)


WITHIN: dict[Divergence, Callable[[Tensor, Tensor, float], Tensor]] = {
    # Half of |q − q'| is removed mass and half is added mass, so the total variation is the moved mass.
    "tvd": lambda prob, moved, bound: moved <= bound,
    "jsd": lambda prob, moved, bound: jensen_shannon(prob, moved) <= bound,
    # LANTERN++: own + moved ≤ λ · own.
    "multiplicative": lambda prob, moved, bound: moved <= (bound - 1.0) * prob,
}
"""Tests by divergence of whether mass `moved` to a token of probability `prob` is within the bound."""


class Neighbourhood:
    """The neighbourhoods A(k, δ) of all tokens; `table` (V, …) lists each token's neighbours, nearest first.

    `k` counts the draft itself, as in the paper; with `k_counts_draft` False it counts neighbours only, as in the
    public code. `delta` is the upper bound of the `divergence`; for "multiplicative" it is λ of LANTERN++: the sum of a
    draft's probability and its neighbours' is at most λ times its own. Special tokens lend and receive nothing.
    """

    def __init__(self, table: Tensor, k: int, delta: float, divergence: Divergence, k_counts_draft: bool) -> None:
        self.table = table
        self.num_neighbours = k - 1 if k_counts_draft else k
        self.delta = delta
        self.divergence = divergence

    def open(self, spec: EngineSpec) -> None:
        """Copy the examined part of the table to the device."""
        num_codes, num_kept = self.table.shape
        assert num_codes == spec.vocab_size, f"a table of {num_codes} codes does not fit {spec.vocab_size} tokens"
        assert self.num_neighbours <= num_kept, f"{self.num_neighbours} of {num_kept} neighbours of each code"
        # One neighbour more than is examined, because the public code zeroes it; a small table may not have it.
        self._near = self.table[:, : self.num_neighbours + 1].to(spec.device, torch.long).contiguous()
        self._is_special = special_tokens(spec) if spec.special_ids | spec.eos_ids else None

    def around(self, tokens: Tensor) -> Tensor:
        """Return the neighbours (…, n) of `tokens` (…), nearest first."""
        return self._near[tokens][..., : self.num_neighbours]

    def around_and_one_more(self, tokens: Tensor) -> Tensor:
        """Return the neighbours (…, n + 1) of `tokens` (…), the last not examined; (…, n) if the table has no more."""
        return self._near[tokens]

    def may_lend(self, tokens: Tensor, near: Tensor) -> Tensor:
        """Return a mask (…, m), False if a neighbour in `near` (…, m) or its token in `tokens` (…) is special."""
        if self._is_special is None:
            return torch.ones_like(near, dtype=torch.bool)
        return ~(self._is_special[near] | self._is_special[tokens][..., None])

    def members(self, tokens: Tensor, prob: Tensor, near: Tensor, near_probs: Tensor) -> Tensor:
        """Return a mask (…, n) of the neighbours `near` (…, n) of `tokens` (…) in A(k, δ), besides the draft itself.

        `prob` (…) are the target's probabilities of `tokens`, `near_probs` (…, n) those of `near`.
        """
        free = self.may_lend(tokens, near)
        # float64, because float32 rounding errors over a thousand terms would exceed the bound.
        moved = (near_probs * free).cumsum(dim=-1, dtype=torch.float64)
        return WITHIN[self.divergence](prob.double()[..., None], moved, self.delta) & free
