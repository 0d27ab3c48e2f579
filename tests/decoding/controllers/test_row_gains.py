"""Rows that compete for the drafts of a step: expected tokens by brute force, and the controller in a simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.controllers.base import Outcome
from decoding.controllers.draft_shares import NODE_STEP, SHARES, round_drafts
from decoding.controllers.goodput import GoodputController
from decoding.controllers.row_gains import ACCEPTED, EDGES, NOT_VERIFIED, REJECTED, Drafts, RowGains

LEVELS = 6


def drafts(confidence: list[list[float]], outcome: list[list[int]]) -> Drafts:
    depth = np.tile(np.arange(1, len(confidence[0]) + 1), (len(confidence), 1))
    return Drafts(np.array(confidence), depth, np.array(outcome))


def test_gains_follow_what_was_verified_and_not_what_the_drafter_believed() -> None:
    low, high = RowGains(), RowGains()
    for _ in range(200):
        low.add(drafts([[0.97, 0.3]], [[REJECTED, REJECTED]]))
        high.add(drafts([[0.97, 0.3]], [[ACCEPTED, ACCEPTED]]))
        high.add(drafts([[0.97, 0.3]], [[NOT_VERIFIED, NOT_VERIFIED]]))
    assert low.gains()[np.searchsorted(EDGES, 0.97, side="right")] < 0.2
    assert high.gains()[np.searchsorted(EDGES, 0.3, side="right")] > 0.9
    for one in (low, high):
        assert len(one.gains()) == len(EDGES) + 1
        assert bool((np.diff(one.gains()) >= 0).all())
    assert low.tokens(2, 1.0) < 1.2


def test_shallow_steps_say_nothing_of_deep_ones() -> None:
    gains = RowGains()
    gains.add(drafts([[0.99, 0.98, 0.97]], [[ACCEPTED] * 3]))
    deep = gains.tokens(3, 1.0)
    for _ in range(40):
        gains.add(drafts([[0.99]], [[ACCEPTED]]))
    gains.refresh()
    assert gains.tokens(3, 1.0) == pytest.approx(deep, rel=0.02)
    assert gains.tokens(1, 1.0) < 2.0 < deep


@given(st.lists(st.lists(st.sampled_from([0.0, 0.01, 0.3, 0.6, 0.99]), min_size=3, max_size=3), min_size=1, max_size=6))
def test_expected_tokens_are_the_gains_of_the_best_drafts(confidence: list[list[float]]) -> None:
    gains = RowGains()
    gains.add(drafts(confidence, [[NOT_VERIFIED] * 3] * len(confidence)))
    num_rows = len(confidence)
    for levels in (1, 2, 3):
        each = sorted((one for row in confidence for one in row[:levels] if one > 0), reverse=True)
        worth = [float(gains.gains()[np.searchsorted(EDGES, one, side="right")]) for one in each]
        for share in SHARES:
            expected = 1.0 + sum(worth[: round(share * num_rows * levels)]) / num_rows
            assert gains.tokens(levels, share) == pytest.approx(expected)


@given(st.floats(0.0, 500.0), st.integers(1, 128))
def test_the_nodes_of_a_step_are_rounded_up(num_drafts: float, num_active: int) -> None:
    rounded = round_drafts(num_drafts, num_active)
    assert (rounded + num_active) % NODE_STEP == 0
    assert num_drafts - 1e-6 <= rounded <= num_drafts + NODE_STEP


class World:
    """Rows whose drafts are certain or hopeless, and a machine whose time grows with nodes that are verified."""

    def __init__(self, node_s: float, draft_s: float = 0.001, certain: float = 0.5) -> None:
        self.controller = GoodputController(LEVELS, max_drafts=LEVELS)
        self.random = np.random.default_rng(0)
        self.node_s, self.draft_s, self.certain = node_s, draft_s, certain
        self.num_tokens, self.spent_s = 0, 0.0
        self.choices: list[tuple[int, float]] = []

    def run(self, num_steps: int, num_active: int) -> None:
        for _ in range(num_steps):
            choice = self.controller.choose(num_active, LEVELS, 0, 0)
            self.choices.append((choice.levels, choice.share))
            is_certain = self.random.random(num_active) < self.certain
            rate = np.where(is_certain, 0.97, 0.2)
            levels = choice.levels
            confidence = rate[:, None] ** np.arange(1, levels + 1)
            num = num_active * levels if choice.num_drafts is None else min(choice.num_drafts, num_active * levels)
            kept = np.zeros(num_active * levels, bool)
            kept[np.argsort(-confidence.flatten(), kind="stable")[:num]] = True
            kept = kept.reshape(num_active, levels)
            accepted = []
            outcome = np.full(kept.shape, NOT_VERIFIED)
            for row in range(num_active):
                count = 0
                while count < kept[row].sum() and self.random.random() < rate[row]:
                    count += 1
                accepted.append(count)
                outcome[row, kept[row]] = REJECTED
                outcome[row, :count] = ACCEPTED
            found = None
            if levels:
                depth = np.tile(np.arange(1, levels + 1), (num_active, 1))
                found = Drafts(confidence, depth, outcome)
            seconds = 1.0 + self.node_s * (num_active + num) + self.draft_s * num_active * levels
            offered = [0] * num_active if found is None else found.verified_depths()
            self.num_tokens += sum(accepted) + num_active
            self.spent_s += seconds
            self.controller.learn(Outcome(levels, seconds, accepted, offered, drafts=found), choice)

    def speed(self) -> float:
        return self.num_tokens / self.spent_s


@pytest.mark.parametrize(("num_active", "gain"), [(16, 1.25), (64, 1.08)])
def test_rows_that_are_certain_get_the_drafts(num_active: int, gain: float) -> None:
    """A quarter of the rows accepts nearly everything: a small share is best, and better than any depth for all."""
    world = World(node_s=0.02, certain=0.25)
    world.run(400, num_active)
    world.num_tokens, world.spent_s = 0, 0.0
    world.run(400, num_active)
    shares = [share for levels, share in world.choices[-200:] if levels]
    assert len(shares) > 150
    assert np.mean(shares) < 0.8
    fixed = []
    for levels in range(LEVELS + 1):
        tokens = 1 + sum(0.25 * 0.97**i + 0.75 * 0.2**i for i in range(1, levels + 1))
        seconds = 1.0 + 0.02 * num_active * (1 + levels) + 0.001 * num_active * levels
        fixed.append(num_active * tokens / seconds)
    assert world.speed() > gain * max(fixed)


def test_all_drafts_are_verified_where_nodes_cost_nothing() -> None:
    world = World(node_s=0.0, draft_s=0.0, certain=1.0)
    world.run(300, 8)
    assert all(one == (LEVELS, 1.0) for one in world.choices[-100:])
