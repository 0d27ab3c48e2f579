"""Advice on huge pages never changes the contents of memory, and does nothing on systems without it."""

from __future__ import annotations

import pytest
import torch

from models.backends.cpu import huge_pages
from models.backends.cpu.huge_pages import PAGE_BYTES, advise_huge_pages


@pytest.mark.parametrize("num_bytes", [1, 5 * PAGE_BYTES + 77])
def test_advice_keeps_the_contents(num_bytes: int) -> None:
    memory = torch.arange(num_bytes, dtype=torch.int64).to(torch.uint8)
    expected = memory.clone()
    assert advise_huge_pages(memory.data_ptr(), num_bytes) in (True, False)
    assert torch.equal(memory, expected)


def test_partial_pages_at_unmapped_ends_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int, int]] = []
    page = PAGE_BYTES

    def madvise(start: int, size: int, advice: int) -> int:
        calls.append((start, size, advice))
        # Pages 10.5 to 14.5 are mapped.
        return 0 if 10.5 * page <= start and start + size <= 14.5 * page else -1

    monkeypatch.setattr(huge_pages, "_madvise", lambda: madvise)
    assert advise_huge_pages(int(10.5 * page), 4 * page)
    assert calls[-1] == (11 * page, 3 * page, huge_pages._COLLAPSE)
    calls.clear()
    assert advise_huge_pages(int(11.25 * page), page)
    assert calls == [(11 * page, 2 * page, huge_pages._HUGEPAGE), (11 * page, 2 * page, huge_pages._COLLAPSE)]
    assert not advise_huge_pages(int(10.6 * page), page // 10), "less than a page, at the edge"


def test_systems_without_madvise_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages.sys, "platform", "darwin")
    huge_pages._madvise.cache_clear()
    assert not advise_huge_pages(PAGE_BYTES, PAGE_BYTES)
    huge_pages._madvise.cache_clear()
