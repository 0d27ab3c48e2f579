"""Which prompts are run together: every one once, within the bound, with little padding."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from decoding.contexts.pruned import prune
from models.backends.base import MAX_PREFILL_PADDING, REFERENCE
from models.backends.cpu.backend import CpuBackend
from models.heads.training.teacher import extend
from models.inputs.prefix import Prefix
from models.kv import prefill_batching
from models.kv.lanes import LaneModel, SlotBatch
from models.kv.prefill_batching import Stem, find_stems, group_by_length
from tests import toys


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40), st.integers(1, 4000))
@example([900, 10, 880, 12], 2000)
@example([5], 1)
@example([100] * 8, 300)
@example([600, 500, 400, 300], 10_000)
def test_every_prompt_is_in_one_group_and_groups_keep_to_their_bounds(lengths: list[int], bound: int) -> None:
    groups = group_by_length(lengths, bound)
    assert sorted(member for group in groups for member in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[member] for member in group)
        assert len(group) == 1 or longest * len(group) <= bound
        assert sum(longest - lengths[member] for member in group) <= MAX_PREFILL_PADDING
    # One group is not begun while the one before it has room: what comes next would not have fitted.
    for first, after in pairwise(groups):
        more = [*first, after[0]]
        longest = max(lengths[member] for member in more)
        padding = sum(longest - lengths[member] for member in more)
        assert longest * len(more) > bound or padding > MAX_PREFILL_PADDING


def test_prompts_of_like_length_are_together_and_a_longer_one_than_the_bound_is_alone() -> None:
    assert group_by_length([900, 10, 880, 12], 2000) == [[0, 2], [3, 1]]
    assert group_by_length([9000, 10], 2000) == [[0], [1]]
    assert group_by_length([3, 9, 5], 2000) == [[0, 1, 2]]
    assert group_by_length([3000, 9], None) == [[0, 1]]


def test_a_cpu_takes_small_groups_with_little_padding() -> None:
    bounds = CpuBackend().prefill_limits(8192)
    assert group_by_length([67, 47, 63, 49, 47, 63, 67, 56], *bounds) == [[0, 6], [2, 5, 7], [3, 1, 4]]
    assert group_by_length([67] * 4, *bounds) == [[0, 1], [2, 3]]
    assert CpuBackend().prefill_limits(100)[0] == 100
    assert CpuBackend().prefill_limits(None)[0] is None
    assert REFERENCE.prefill_limits(8192) == (8192, MAX_PREFILL_PADDING)


def kin(tokens: list[int], origin: object = "one", last_visual: int = 0) -> Prefix:
    ids = torch.tensor(tokens)
    positions = torch.arange(len(tokens))
    deepstack = (torch.zeros(last_visual, 1),) if last_visual else ()
    made = Prefix(ids, torch.zeros(len(tokens), 1), positions, positions < last_visual, deepstack)
    return made.of(origin)


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=2, max_size=6), st.integers(0, 9))
@example([[0, 1, 0, 1], [0, 1, 0, 0], [0, 1, 0]], 0)
@example([[0, 1, 0, 1], [0, 1, 0, 1]], 3)
@example([[0, 1, 0, 1], [0, 1, 0, 1]], 4)
@example([[0], [0]], 0)
def test_a_stem_is_what_all_tokens_begin_with_and_leaves_each_prompt_a_column(
    tokens: list[list[int]], last_visual: int
) -> None:
    shortest = min(len(some) for some in tokens)
    last_visual = min(last_visual, shortest)
    wanted = min(shortest - 1, next((i for i in range(shortest) if len({some[i] for some in tokens}) > 1), shortest))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_batching, "MIN_SAVING", 1)
        stems = find_stems([kin(some, last_visual=last_visual) for some in tokens], range(len(tokens)))
    is_one = wanted >= max(1, last_visual) and 2 * wanted >= max(map(len, tokens))
    assert stems == ([Stem(tuple(range(len(tokens))), wanted)] if is_one else [])


def test_prompts_of_different_or_no_origin_have_no_stem_and_small_savings_are_left() -> None:
    long = [1] * 300
    prompts = [kin([*long, 2]), kin([*long, 3], "other"), kin([*long, 4], None), kin([*long, 5]), kin([*long, 6], None)]
    assert find_stems(prompts, range(5)) == [Stem((0, 3), 300)]
    assert find_stems(prompts, [1, 2, 3, 4]) == []
    assert find_stems([kin([1] * 100 + [2]), kin([1] * 100 + [3])], [0, 1]) == []
    assert find_stems([kin([1] * 100 + [i]) for i in range(4)], range(4)) == [Stem((0, 1, 2, 3), 100)]
    # What follows would be read under masks, which whole prompts do without.
    assert find_stems([kin(long + [i] * 400) for i in range(4)], range(4)) == []


def test_a_prompt_that_is_changed_has_no_origin_any_more() -> None:
    prompt = kin([1, 2, 3])
    assert prompt.origin == "one"
    assert replace(prompt, embeds=prompt.embeds + 1).origin is None
    assert extend(prompt, torch.tensor([4]), torch.zeros(1, 1)).origin is None
    assert prune(kin([1, 2, 3, 4], last_visual=2), torch.tensor([0]), False).origin is None


@torch.inference_mode()
def test_long_stems_are_read_once_and_what_follows_in_bounded_forwards() -> None:
    torch.manual_seed(0)
    embeds = torch.randn(300, 32)
    prompts = []
    for i, length in enumerate((3, 40, 7, 3)):
        ids = torch.cat([torch.arange(300), torch.full((length,), 300 + i)])
        whole = torch.cat([embeds, torch.randn(length, 32)])
        prompts.append(Prefix(ids, whole, torch.arange(300 + length), ids < 0))
    slots = SlotBatch(torch.tensor([2, 0, 3, 1]), (2, 0, 3, 1), (0,) * 4)
    alone, together = lanes(), lanes()
    states = alone.admit(slots, [[prompt] for prompt in prompts])
    some = together.admit(slots, [[prompt.of("one")] for prompt in prompts], max_tokens=50)
    # The stem, the longest alone, the other three.
    assert (states.num_forwards, some.num_forwards) == (1, 3)
    torch.testing.assert_close(some.last, states.last, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(some.hidden, states.hidden, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(together.cache.lens, alone.cache.lens)
    assert together.cache.lens.tolist()[:4] == [340, 303, 303, 307]


def prefix(length: int, seed: int) -> Prefix:
    embeds = torch.randn(length, 32, generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(length)
    return Prefix(positions, embeds, positions, torch.zeros(length, dtype=torch.bool))


def lanes() -> LaneModel:
    target = toys.target("llama")
    return LaneModel(target.decoder, target.head, 6, 1, 700)


@torch.inference_mode()
def test_groups_leave_the_same_rows_and_states_as_one_forward() -> None:
    prompts = [prefix(length, length) for length in (4, 600, 9, 600, 5, 590)]
    prompts[3] = prompts[1]
    slots = SlotBatch(torch.tensor([3, 0, 5, 1, 2, 4]), (3, 0, 5, 1, 2, 4), (0,) * 6)
    whole, grouped = lanes(), lanes()
    states = whole.admit(slots, [[prompt] for prompt in prompts], True)
    some = grouped.admit(slots, [[prompt] for prompt in prompts], True, True, 1200)
    # A CPU has nothing of several long prompts in one forward.
    assert (states.num_forwards, some.num_forwards) == (1, 3)
    torch.testing.assert_close(some.last, states.last)
    for row, prompt in enumerate(prompts):
        torch.testing.assert_close(some.hidden_of(row), states.hidden_of(row))
        torch.testing.assert_close(some.attention_of(row), states.attention_of(row))
        assert some.hidden_of(row).shape[1] == prompt.length
    torch.testing.assert_close(grouped.cache.lens, whole.cache.lens)
    assert whole.cache.lens.tolist() == [600, 600, 5, 4, 590, 9]
    for row, length in enumerate([600, 600, 5, 4, 590, 9]):
        for mine, theirs in zip(grouped.cache.keys, whole.cache.keys, strict=True):
            assert mine is not None
            assert theirs is not None
            torch.testing.assert_close(mine[row, :, :length], theirs[row, :, :length])
