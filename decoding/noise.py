"""Generates counter-based random numbers per sample.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). The 64-bit key is a hash of job seed,
sample id, replica and attempt; the counter is (vocabulary index, position, stream, sibling). Slot and batch have no
influence.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


class Stream(IntEnum):
    """Purpose of a draw; each has its own noise, because a residual sampled with the draft's noise is biased."""

    TOKEN = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    RULE = 4


def key_of(seed: int, sample_id: str, replica: int, attempt: int = 0) -> tuple[int, int]:
    """Return the two 32-bit key words of one sample; `attempt` 0 is the first of several attempts to decode it."""
    number = f"{replica}.{attempt}" if attempt else f"{replica}"
    digest = hashlib.blake2b(f"{seed}\x00{number}\x00{sample_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Run ten Philox rounds over 32-bit words in broadcastable int64 tensors; return four words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # Multiplying two 32-bit words overflows into the sign bit; masking after the shift removes the sign.
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((high >> 32) & _WORD) ^ c1 ^ k0,
            high & _WORD,
            ((low >> 32) & _WORD) ^ c3 ^ k1,
            low & _WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


class Noise:
    """Random numbers of a batch of samples: `keys` (b, 2) int64 key words, `positions` (b,) index of the next token."""

    def __init__(self, keys: Tensor, positions: Tensor) -> None:
        self.keys = keys
        self.positions = positions

    def _words(self, stream: Stream, ahead: Tensor, sibling: int, index: Tensor) -> Tensor:
        """Return words (b, P, 4, J); `ahead` (P,) are offsets from the next token, `index` (J,) counter words."""
        position = (self.positions[:, None] + ahead)[:, :, None]
        counter = (
            index.expand(*position.shape[:2], -1),
            position,
            torch.full_like(position, int(stream)),
            torch.full_like(position, sibling),
        )
        key = (self.keys[:, 0, None, None], self.keys[:, 1, None, None])
        return torch.stack(philox(counter, key), dim=2)

    def uniform(self, stream: Stream, ahead: Tensor, sibling: int = 0) -> Tensor:
        """Return float64 uniform numbers (b, P) in (0, 1), one per offset `ahead` (P,) from the next token."""
        word = self._words(stream, ahead, sibling, torch.zeros(1, dtype=torch.long, device=self.keys.device))
        return (word[:, :, 0, 0].double() + 0.5) / 2.0**32

    def gumbel(self, stream: Stream, ahead: Tensor, vocab_size: int, sibling: int = 0) -> Tensor:
        """Return float32 standard Gumbel noise (b, P, V) for every vocabulary entry at offsets `ahead` (P,)."""
        blocks = torch.arange(-(-vocab_size // 4), device=self.keys.device)
        words = self._words(stream, ahead, sibling, blocks).transpose(2, 3).flatten(2)[..., :vocab_size]
        # −log1p(−u) rather than −log(u): the largest noise then comes from small u, where fp32 is most precise.
        uniform = ((words.double() + 0.5) / 2.0**32).float().clamp_max(1.0 - 2.0**-24)
        return -torch.log(-torch.log1p(-uniform))
