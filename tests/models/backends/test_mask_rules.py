"""Tests that a node of a tree reads what the same token reads as the last one of a prompt."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import models.backends.rule_attention as module
from models.backends.attention import ancestors
from models.backends.mask_rules import PLAIN, LayerRule, TreePositions, masked_rules, tree_rule
from models.backends.rule_attention import attend_prompt, weigh

WINDOW = 40
RULES = st.one_of(
    st.integers(1, 12).map(lambda size: LayerRule(window=size)),
    st.integers(1, 12).map(lambda size: LayerRule(chunk=size)),
    st.builds(LayerRule, st.integers(1, 9), st.integers(1, 9)),
    st.just(PLAIN),
)


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    """Parents of the nodes of a tree, which come before their children."""
    number = draw(st.integers(1, 8))
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, number))]


@given(rule=RULES, parents=trees(), length=st.integers(0, 25), offset=st.integers(0, 3))
def test_a_node_reads_what_the_last_token_of_a_prompt_reads(
    rule: LayerRule, parents: list[int], length: int, offset: int
) -> None:
    """Of `offset` nodes before, which are the first ones, only scratch positions are given."""
    visible = ancestors(torch.tensor([parents]))
    depth, lens = visible.sum(2) - 1, torch.tensor([length])
    start = min(offset, len(parents) - 1)
    some = visible[:, start:]
    places = TreePositions.of(lens, depth[:, start:], some)
    mask = places.mask(rule, lens, some, WINDOW)[0, 0]
    first = places.first_read(rule)[0]
    for row, node in enumerate(range(start, len(parents))):
        path = [index for index in range(len(parents)) if visible[0, node, index]]
        positions = torch.arange(length + len(path))
        expected = rule.prompt_mask(positions[-1:], positions)[0, 0, 0]
        columns = [*range(length), *(length + index for index in path)]
        assert torch.equal(mask[row, columns], expected)
        assert int(mask[row].sum()) == int(expected.sum()), "it reads nothing else"
        committed = expected[:length].nonzero()
        assert committed.numel() == 0 or int(committed[0]) == int(first[row])


@given(rule=RULES, length=st.integers(1, 30), seed=st.integers(0, 99), has_blocks=st.booleans())
def test_prompts_are_attended_in_parts_as_under_one_mask(
    rule: LayerRule, length: int, seed: int, has_blocks: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(2, heads, length, 4, generator=generator) for heads in (4, 2, 2))
    numbers = torch.arange(length)
    groups = torch.where(numbers % 11 < 6, numbers // 11 * 100, 1000 + numbers).expand(2, -1) if has_blocks else None
    if has_blocks:
        rule = LayerRule(rule.window, rule.chunk, in_blocks=True)

    def in_parts(size: int) -> Tensor:
        before, module.QUERY_CHUNK = module.QUERY_CHUNK, size
        try:
            return attend_prompt(query, key, value, rule, groups, 0.5)
        finally:
            module.QUERY_CHUNK = before

    whole = weigh(query, key, value, rule.prompt_mask(numbers, numbers, groups), 0.5).transpose(1, 2)
    torch.testing.assert_close(in_parts(7), whole)
    torch.testing.assert_close(in_parts(512), whole)


def test_rules_that_need_masks_are_listed_once() -> None:
    rules = [LayerRule(window=4, has_softcap=True), PLAIN, LayerRule(window=4, in_blocks=True), LayerRule(owner=1)]
    assert masked_rules(rules) == [LayerRule(window=4)]
    assert tree_rule(LayerRule(in_blocks=True)) == PLAIN
