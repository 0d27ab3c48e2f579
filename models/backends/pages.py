"""Store keys and values in pages: a row holds as many pages as its sample needs, and not the longest context.

A block table maps the positions of a row to pages. Page 0 belongs to no sample: it takes the writes of rows without
pages, which are spare rows of a step, and of positions after the last page of a row. A kernel that reads each row up to
its length reads nothing of it for the sample of another row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from models.backends.cache import RaggedCache

PAGE_POSITIONS = 64
"""Positions of a page: the largest block of positions that the tree kernel reads, which is then in one page."""


def num_pages_of(num_positions: int) -> int:
    """Return the pages of a row of `num_positions` positions."""
    return -(-num_positions // PAGE_POSITIONS)


class PagePool:
    """Pages 1 … `num_pages` of a cache, which samples take at admission and return at their end."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, number: int) -> list[int] | None:
        """Take `number` pages; None if there are fewer."""
        if number > len(self._free):
            return None
        return [self._free.pop() for _ in range(number)]

    def give_back(self, pages: Sequence[int]) -> None:
        """Return pages to the pool."""
        self._free += reversed(pages)


class PagedCache(RaggedCache):
    """K and V of every layer, shape (pages, H_kv, PAGE_POSITIONS, D_h), with one length per row.

    `table` (rows, pages of `capacity` positions + 1) int32 is the block table; entries without a page are 0.
    """

    def __init__(self, num_rows: int, capacity: int, num_layers: int, device: torch.device, num_pages: int) -> None:
        super().__init__(num_rows, capacity, num_layers, device)
        self.pool = PagePool(num_pages)
        self.num_blocks, self.block_size = num_pages + 1, PAGE_POSITIONS
        self.table = torch.zeros(self.num_rows, num_pages_of(capacity) + 1, dtype=torch.int32, device=device)

    @property
    def unread(self) -> tuple[int, int]:
        return 0, 0

    def take(self, num_rows: int, num_positions: int) -> list[list[int]] | None:
        number = self._num_pages(num_positions)
        pages = self.pool.take(num_rows * number)
        return None if pages is None else [pages[start : start + number] for start in range(0, len(pages), number)]

    def has(self, num_rows: int, num_positions: int) -> bool:
        return num_rows * self._num_pages(num_positions) <= self.pool.num_free

    def refuse(self, num_rows: int, num_positions: int) -> str:
        needed, most = num_rows * self._num_pages(num_positions), self.pool.num_pages
        if needed <= most:
            return ""
        return (
            f"the sample needs {needed:,} pages of {self.block_size} KV positions for prompt, longest output and "
            f"drafts, and the KV cache has {most:,}"
        )

    def assign(self, rows: Tensor, pages: Tensor) -> None:
        """See `RaggedCache.assign`; `pages` (r, W) are rows of the block table."""
        self.table[rows] = pages.to(torch.int32)

    def release(self, first_row: int, pages: Sequence[Sequence[int]]) -> None:
        """See `RaggedCache.release`; further writes of the rows go to page 0."""
        self.table[first_row : first_row + len(pages)].zero_()
        for some in pages:
            self.pool.give_back(some)

    def entry_of(self, pages: Sequence[int]) -> list[int]:
        return [*pages, *[0] * (self.table.shape[1] - len(pages))]

    def _num_pages(self, num_positions: int) -> int:
        return num_pages_of(min(num_positions, self.capacity))

    def locate(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        index = (columns // PAGE_POSITIONS).clamp_max(self.table.shape[1] - 1)
        return self.table[rows[:, None], index].long(), columns % PAGE_POSITIONS

    def blocks(self, rows: Tensor) -> Tensor:
        return self.table[rows]
