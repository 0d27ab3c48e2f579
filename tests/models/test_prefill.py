"""Which prompts are run together: every one once, within the bound, with little padding."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from models.lanes import LaneModel, SlotBatch
from models.prefill import MAX_PADDING, group_by_length
from models.prefix import Prefix
from tests import toys


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40), st.integers(1, 4000))
@example([900, 10, 880, 12], 2000)
@example([5], 1)
@example([100] * 8, 300)
@example([600, 500, 400, 300], 10_000)
def test_every_prompt_is_in_one_group_and_groups_keep_to_their_bounds(lengths: list[int], bound: int) -> None:
    groups = group_by_length(lengths, bound)
    assert sorted(place for group in groups for place in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[place] for place in group)
        assert len(group) == 1 or longest * len(group) <= bound
        assert sum(longest - lengths[place] for place in group) <= MAX_PADDING
    # One group is not begun while the one before it has room: what comes next would not have fitted.
    for one, after in pairwise(groups):
        more = [*one, after[0]]
        longest = max(lengths[place] for place in more)
        padding = sum(longest - lengths[place] for place in more)
        assert longest * len(more) > bound or padding > MAX_PADDING


def test_prompts_of_like_length_are_together_and_a_longer_one_than_the_bound_is_alone() -> None:
    assert group_by_length([900, 10, 880, 12], 2000) == [[0, 2], [3, 1]]
    assert group_by_length([9000, 10], 2000) == [[0], [1]]
    assert group_by_length([3, 9, 5], 2000) == [[0, 1, 2]]
    assert group_by_length([3000, 9], None) == [[0, 1]]


def prefix(length: int, seed: int) -> Prefix:
    embeds = torch.randn(length, 32, generator=torch.Generator().manual_seed(seed))
    places = torch.arange(length)
    return Prefix(places, embeds, places, torch.zeros(length, dtype=torch.bool))


def lanes() -> LaneModel:
    target = toys.target("llama")
    return LaneModel(target.decoder, target.head, 6, 1, 700)


@torch.inference_mode()
def test_groups_leave_the_same_rows_and_states_as_one_forward() -> None:
    prompts = [prefix(length, length) for length in (4, 600, 9, 600, 5, 590)]
    prompts[3] = prompts[1]
    slots = SlotBatch(torch.tensor([3, 0, 5, 1, 2, 4]), (3, 0, 5, 1, 2, 4), (0,) * 6)
    whole, grouped = lanes(), lanes()
    one = whole.admit(slots, [[prompt] for prompt in prompts], True)
    some = grouped.admit(slots, [[prompt] for prompt in prompts], True, True, 1200)
    assert (one.num_forwards, some.num_forwards) == (1, 2)
    torch.testing.assert_close(some.last, one.last)
    for row, prompt in enumerate(prompts):
        torch.testing.assert_close(some.hidden_of(row), one.hidden_of(row))
        torch.testing.assert_close(some.attention_of(row), one.attention_of(row))
        assert some.hidden_of(row).shape[1] == prompt.length
    torch.testing.assert_close(grouped.cache.lens, whole.cache.lens)
    assert whole.cache.lens.tolist() == [600, 600, 5, 4, 590, 9]
    for row, length in enumerate([600, 600, 5, 4, 590, 9]):
        for mine, theirs in zip(grouped.cache.keys, whole.cache.keys, strict=True):
            assert mine is not None
            assert theirs is not None
            torch.testing.assert_close(mine[row, :, :length], theirs[row, :, :length])
