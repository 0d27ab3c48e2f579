"""Tests that samples which share the pages of a KV cache get the tokens of samples with rows of their own."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from decoding import Engine, Sampling
from decoding.errors import CONTEXT_TOO_LONG
from models.backends import pages
from models.backends.cuda.backend import CudaBackend
from models.backends.pages import PagedCache, PagePool
from tests import toys
from tests.conformance import checks
from tests.conformance.methods import FAST, METHODS
from tests.covering import tiers
from tests.decoding.scheduling.test_replay import CASES, MODES, NUM_SLOTS, backend

__all__ = ["backend"]
PAGE = 16
NUM_PAGES = 22
"""Fewer than three contexts of 160 positions; prompts are short, so that up to five samples share them."""


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PAGE_POSITIONS", PAGE)


def decode(
    name: str, family: str, sampling: Sampling, num_pages: int | None, count: int = 10, slots: int = NUM_SLOTS
) -> tuple[dict[str, Any], Engine]:
    engine = Engine(toys.target(family), METHODS[name][0](family), slots, 160, num_pages=num_pages)
    done = checks.run(engine, checks.requests(family, count, sampling, longest=40))
    return {key: completion.token_ids for key, completion in done.items()}, engine


def pool_of(engine: Engine) -> PagePool:
    cache = engine._lanes.cache
    assert isinstance(cache, PagedCache)
    return cache.pool


@tiers("name, family, mode", CASES, list(MODES), strength=1, fast=FAST)
def test_samples_that_share_pages_have_the_same_tokens(name: str, family: str, mode: str, backend: CudaBackend) -> None:
    got, engine = decode(name, family, MODES[mode], NUM_PAGES * engine_lanes(family))
    assert engine._runner.recorder is not None, "a recording failed"
    assert pool_of(engine).num_free == pool_of(engine).num_pages
    assert not engine._lanes.cache.table[:, 0].any()  # type: ignore[attr-defined]
    assert got == decode(name, family, MODES[mode], None)[0]


def engine_lanes(family: str) -> int:
    return int(toys.target(family).num_lanes)


def test_a_sample_waits_for_pages_and_none_is_preempted(backend: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    target, encoded = toys.target("llama"), []
    encode = type(target).encode_prompts

    def counted(self: Any, prompts: Any, *rest: Any) -> Any:
        some = list(prompts)
        encoded.extend(some if self is target else ())  # the drafter encodes its own prompts
        return encode(self, iter(some), *rest)

    monkeypatch.setattr(type(target), "encode_prompts", counted)
    engine = Engine(target, METHODS["sd-chain"][0]("llama"), NUM_SLOTS, 160, num_pages=12)
    requests = checks.requests("llama", 8, Sampling(ignore_eos=True), longest=40)
    for request in requests:
        engine.submit(request)
    pool, rows = pool_of(engine), engine._lanes.rows
    done, most = [], 0
    while engine.has_work:
        done += engine.step()
        held = [page for row in rows._pages.values() for some in row for page in some]
        assert len(held) == len(set(held)) == pool.num_pages - pool.num_free
        assert 0 not in held
        most = max(most, len(rows._pages))
    assert 1 < most < NUM_SLOTS
    assert [completion.error for completion in done] == [None] * 8
    assert len(encoded) == 8, "a prompt that waits for pages is encoded once"


def test_a_sample_that_can_never_have_its_pages_is_an_error_row_with_the_numbers(backend: CudaBackend) -> None:
    engine = Engine(toys.target("llama"), METHODS["plain"][0]("llama"), 2, 160, num_pages=4)
    short, long = (Sampling(max_new_tokens=number, ignore_eos=True) for number in (10, 100))
    first, second = checks.requests("llama", 2, short)
    done = {completion.sample_id: completion for completion in engine.run([replace(first, sampling=long), second])}
    error = done[first.sample_id].error
    assert error is not None
    assert error.code == CONTEXT_TOO_LONG
    assert "pages of 16 KV positions for prompt, longest output and drafts, and the KV cache has 4" in error.message
    assert done[second.sample_id].error is None


def break_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pass


def keep_the_table_of_ended_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spare row writes to a page that belongs to another sample by then."""

    def kept(self: PagedCache, first_row: int, pages_of_rows: Any) -> None:
        for some in pages_of_rows:
            self.pool.give_back(some)

    monkeypatch.setattr(PagedCache, "release", kept)


def swap_two_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reads two pages of a row in the wrong order."""
    blocks = PagedCache.blocks

    def swapped(self: PagedCache, rows: torch.Tensor) -> torch.Tensor:
        return blocks(self, rows)[:, [1, 0, *range(2, self.table.shape[1])]]

    monkeypatch.setattr(PagedCache, "blocks", swapped)


def write_to_a_page_of_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows without pages write to page 1, which a sample holds, and not to page 0."""
    locate = PagedCache.locate

    def located(self: PagedCache, rows: torch.Tensor, columns: torch.Tensor) -> Any:
        blocks, offsets = locate(self, rows, columns)
        return blocks.clamp_min(1), offsets

    monkeypatch.setattr(PagedCache, "locate", located)


def give_pages_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are free again while their sample decodes."""
    take = PagePool.take

    def taken(self: PagePool, number: int) -> list[int] | None:
        result = take(self, number)
        self._free += [] if result is None else result
        return result

    monkeypatch.setattr(PagePool, "take", taken)


FAULTS = [
    break_nothing,
    keep_the_table_of_ended_samples,
    swap_two_pages,
    write_to_a_page_of_a_sample,
    give_pages_twice,
]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(
    fault: Callable[[pytest.MonkeyPatch], None], backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = decode("sd-chain", "llava", Sampling(), None, 30, 8)
    with monkeypatch.context() as planted:
        fault(planted)
        try:
            got, _ = decode("sd-chain", "llava", Sampling(), NUM_PAGES, 30, 8)
        except Exception:
            got = {}
    assert (got == expected) == (fault is break_nothing)


def test_nan_in_free_pages_changes_no_token(backend: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = decode("sd-tree", "llama", Sampling(), None)
    release = PagedCache.release

    def poisoned(self: PagedCache, first_row: int, pages_of_rows: Any) -> None:
        release(self, first_row, pages_of_rows)
        for memory in (*self.keys, *self.values):
            assert memory is not None
            memory[torch.tensor([page for some in pages_of_rows for page in some])] = torch.nan

    monkeypatch.setattr(PagedCache, "release", poisoned)
    assert decode("sd-tree", "llama", Sampling(), NUM_PAGES)[0] == expected


def test_pages_hold_four_times_the_samples_of_slots_for_mixed_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """85 % of the samples have 200 to 800 positions, the others 800 to 4,000; `max_context_tokens` is 4,096."""
    monkeypatch.setattr(pages, "PAGE_POSITIONS", 64)
    num_slots, context, generator = 32, 4096, random.Random(45)
    pool = PagePool(num_slots * pages.num_pages_of(context))

    def length() -> int:
        low, high = (200, 800) if generator.random() < 0.85 else (800, 4000)
        return generator.randint(low, high)

    running: list[tuple[int, list[int]]] = []
    held: list[int] = []
    waiting = pages.num_pages_of(length())
    for step in range(4_000):
        for sample in [sample for sample in running if sample[0] <= step]:
            running.remove(sample)
            pool.give_back(sample[1])
        while (taken := pool.take(waiting)) is not None:
            running.append((step + generator.randint(64, 512), taken))
            waiting = pages.num_pages_of(length())
        used = [page for _, sample in running for page in sample]
        assert len(used) == len(set(used)) <= pool.num_pages
        held += [len(running)] if step >= 1_000 else []
    assert sum(held) / len(held) >= 4 * num_slots
