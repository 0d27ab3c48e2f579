"""A(k, δ): the neighbours whose probability a draft may use, nearest first, while the distortion is within δ.

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
"""Below every float32 above zero: keeps 0 / 0 out without changing any other quotient."""


def jensen_shannon(own: Tensor, moved: Tensor) -> Tensor:
    """Divergence in nats between q and q with mass `moved` from other tokens to one of probability `own`; float64.

    With m = moved, JSD = ½ · [m · ln 2 + (own + m) · ln((own + m) / (own + m/2)) + own · ln(own / (own + m/2))]. It
    increases with m, so the longest prefix is found by comparing sums.
    """
    half = moved / 2
    middle = (own + half).clamp_min(_TINY)
    # log1p, because for a small m the two last terms cancel to the first order.
    gained = (own + moved) * torch.log1p(half / middle)
    lost = own * torch.log1p(half / own.clamp_min(_TINY))
    return 0.5 * (moved * math.log(2.0) + gained - lost)


WITHIN: dict[Divergence, Callable[[Tensor, Tensor, float], Tensor]] = {
    # Half of |q − q'| is removed mass and half is added mass, so the total variation is the moved mass.
    "tvd": lambda own, moved, bound: moved <= bound,
    "jsd": lambda own, moved, bound: jensen_shannon(own, moved) <= bound,
    # LANTERN++: own + moved ≤ λ · own.
    "multiplicative": lambda own, moved, bound: moved <= (bound - 1.0) * own,
}
"""Whether mass moved onto a token of probability `own` stays within the bound."""


class Neighbourhood:
    """The neighbours (V, …) of all tokens, nearest first, and how many of them are within the bound `delta`.

    `k` counts the draft itself, as in the paper; with `k_counts_draft` False it counts neighbours, as in the public
    code. `delta` bounds the `divergence`; for "multiplicative" it is λ of LANTERN++: the gathered probability of a
    draft, its own included, is at most λ times its own. Special tokens neither lend nor receive probability.
    """

    def __init__(self, table: Tensor, k: int, delta: float, divergence: Divergence, k_counts_draft: bool) -> None:
        self.table = table
        self.num_neighbours = k - 1 if k_counts_draft else k
        self.delta = delta
        self.divergence = divergence

    def open(self, spec: EngineSpec) -> None:
        """Copy the examined part of the table to the device.

        Raises:
            ValueError: the table is of another codebook than the target's, or too short for k.
        """
        num_codes, num_kept = self.table.shape
        if num_codes != spec.vocab_size:
            raise ValueError(
                f"the table of neighbours is of a codebook of {num_codes} codes, but the target draws from "
                f"{spec.vocab_size}: they do not belong together"
            )
        if self.num_neighbours > num_kept:
            raise ValueError(
                f"{self.num_neighbours} neighbours are to be looked at, and the table holds {num_kept} of each code"
            )
        # One more than is examined: the public code zeroes it. A code of a small codebook may not have it.
        self._near = self.table[:, : self.num_neighbours + 1].to(spec.device, torch.long).contiguous()
        self._is_special = special_tokens(spec) if spec.special_ids | spec.eos_ids else None

    def around(self, tokens: Tensor) -> Tensor:
        """The neighbours (…, n) of `tokens` (…), nearest first."""
        return self._near[tokens][..., : self.num_neighbours]

    def around_and_one_more(self, tokens: Tensor) -> Tensor:
        """The neighbours (…, n + 1) of `tokens` (…), of which the last is never looked at; n in a whole codebook."""
        return self._near[tokens]

    def may_lend(self, tokens: Tensor, near: Tensor) -> Tensor:
        """Whether `near` (…, m) and `tokens` (…) are both no special tokens, (…, m)."""
        if self._is_special is None:
            return torch.ones_like(near, dtype=torch.bool)
        return ~(self._is_special[near] | self._is_special[tokens][..., None])

    def members(self, tokens: Tensor, own: Tensor, near: Tensor, near_probs: Tensor) -> Tensor:
        """Which neighbours `near` (…, n) of `tokens` (…) are in A(k, δ), (…, n); the draft itself always is.

        `own` (…) and `near_probs` (…, n) are the target's probabilities of both.
        """
        free = self.may_lend(tokens, near)
        # float64: in float32 the rounding of a thousand sums would let in more than the bound.
        moved = (near_probs * free).cumsum(dim=-1, dtype=torch.float64)
        return WITHIN[self.divergence](own.double()[..., None], moved, self.delta) & free
