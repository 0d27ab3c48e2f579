"""Compute the nearest codes of each code of a VQ codebook, for LANTERN (arXiv 2410.03355, section 3.2).

A table (V, k) has the k nearest other codes of each code, nearest first; ties are ordered by code number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Metric = Literal["l2", "cosine", "random"]

MAX_NEIGHBOURS = 1001
"""Largest k of a table: 1,000 as in the paper, and one more that the published code zeroes."""

# Number of distances computed at once: 32 MiB of float64.
_DISTANCES_AT_ONCE = 1 << 22


class CodebookError(ValueError):
    """Raised for an invalid codebook, or if it has too few codes for the number of neighbours."""


@dataclass(frozen=True)
class Proximity:
    """Distance between codes: `metric` over the stored codes, or over codes of unit length if `normalised`.

    "cosine" always normalises. "random" is a control experiment: the neighbours of every code are drawn from all other
    codes with `seed`.
    """

    metric: Metric = "l2"
    normalised: bool = False
    seed: int = 0


def nearest_codes(codebook: Tensor, num_neighbours: int, proximity: Proximity) -> Tensor:
    """Compute the nearest other codes of each code, (V, k) int64 on the CPU, in blocks of bounded memory.

    Raises CodebookError if `codebook` (V, code_dim) has values that are not finite, or fewer than k + 1 codes.
    """
    if codebook.ndim != 2 or not codebook.is_floating_point() or not codebook.numel():
        raise CodebookError(f"a codebook is a table (codes, numbers), not {codebook.dtype} {list(codebook.shape)}")
    if not bool(codebook.isfinite().all()):
        raise CodebookError("the codebook holds numbers that are not finite")
    num_others = len(codebook) - 1
    if not 1 <= num_neighbours <= min(num_others, MAX_NEIGHBOURS):
        raise CodebookError(
            f"{num_neighbours} neighbours are asked for; a codebook of {len(codebook)} codes has 1 to {num_others}, of "
            f"which at most {MAX_NEIGHBOURS} are kept"
        )
    if proximity.metric == "random":
        return _drawn_codes(len(codebook), num_neighbours, proximity.seed)
    codes = codebook.detach().to("cpu", torch.float64)
    if proximity.normalised or proximity.metric == "cosine":
        # ‖a − b‖² = 2 − 2 cos for directions: both rank alike, and equal codes stay equal to the last bit.
        codes = F.normalize(codes, dim=-1)
    numbers = torch.arange(len(codes))
    num_bits = (len(codes) - 1).bit_length()
    rows_at_once = max(1, _DISTANCES_AT_ONCE // len(codes))
    neighbours = []
    for first in range(0, len(codes), rows_at_once):
        rows = numbers[first : first + rows_at_once]
        # Differences instead of a matrix multiplication, which rounds equal distances apart.
        distance = torch.cdist(codes[rows], codes, compute_mode="donot_use_mm_for_euclid_dist")
        distance[torch.arange(len(rows)), rows] = torch.inf
        # Non-negative numbers sort like their bits; the lowest ones are replaced by the code's number to rank ties.
        key = (distance.view(torch.int64) >> num_bits << num_bits) | numbers
        neighbours.append(key.topk(num_neighbours, dim=-1, largest=False, sorted=True).values & ((1 << num_bits) - 1))
    return torch.cat(neighbours)


def _drawn_codes(num_codes: int, num_neighbours: int, seed: int) -> Tensor:
    rows = np.empty((num_codes, num_neighbours), dtype=np.int64)
    for code in range(num_codes):
        others = np.random.default_rng((seed, code)).permutation(num_codes - 1)[:num_neighbours]
        rows[code] = others + (others >= code)  # numbered without the code itself
    return torch.from_numpy(rows)
