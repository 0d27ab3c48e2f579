"""The controller on simulated machines and texts: it finds the best depth with little exploration cost."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from decoding.controllers.base import PrefillTime, StepOutcome
from decoding.controllers.goodput import CHECK_STEPS, LADDER, START_STEPS, TRIAL_STEPS, GoodputController

pytestmark = pytest.mark.slow

Cost = Callable[[int, int], float]


class World:
    """A machine with a cost for every shape, texts with a rate for every depth, a drafter that has to catch up."""

    def __init__(self, controller: GoodputController, cost: Cost, rates: Sequence[float], seed: int = 0) -> None:
        self.controller, self.cost, self.rates = controller, cost, list(rates)
        self.random = random.Random(seed)
        self.noise = 0.0
        self.missed_s = 0.0
        self.behind = 0
        self.chosen: list[tuple[int, str]] = []
        self.spent_s = 0.0
        self.num_tokens = 0

    def accepted(self, levels: int) -> int:
        for depth in range(levels):
            if self.random.random() >= self.rates[depth]:
                return depth
        return levels

    def run(self, num_steps: int, num_active: int, max_levels: int | None = None) -> None:
        for _ in range(num_steps):
            most = self.controller.depths[-1] if max_levels is None else max_levels
            choice = self.controller.choose(num_active, most, self.behind * num_active, 0)
            assert 0 <= choice.levels <= most
            missed = self.behind * num_active if choice.levels else 0
            # A text is a hundred tokens long: a drafter never misses more of one.
            self.behind = 0 if choice.levels else min(self.behind + 1, 100)
            accepted = [self.accepted(choice.levels) for _ in range(num_active)]
            seconds = self.cost(num_active, choice.levels) * (1.0 + abs(self.random.gauss(0.0, self.noise)))
            seconds += missed * self.missed_s
            self.chosen.append((choice.levels, choice.reason))
            self.spent_s += seconds
            self.num_tokens += sum(accepted) + num_active
            self.controller.learn(
                StepOutcome(choice.levels, seconds, accepted, [choice.levels] * num_active, missed),
                choice,
            )

    def speeds(self, num_active: int) -> dict[int, float]:
        """Tokens per second of every depth: the truth, by brute force."""
        results = {}
        for levels in self.controller.depths:
            tokens = survival = 1.0
            for depth in range(levels):
                survival *= self.rates[depth]
                tokens += survival
            results[levels] = num_active * tokens / self.cost(num_active, levels)
        return results

    def usual(self, last: int = 200) -> int:
        """The depth that was chosen most of late, trials left out."""
        kept = [levels for levels, reason in self.chosen[-last:] if reason == "best"]
        return max(set(kept), key=kept.count)


class Job:
    """Samples that follow one another through the slots of such a machine, each with a prompt that a drafter reads."""

    def __init__(self, world: World, num_prompt: int, num_tokens: int, token_read_s: float) -> None:
        self.world, self.num_prompt, self.num_tokens, self.token_read_s = world, num_prompt, num_tokens, token_read_s
        self.num_read = 0
        self.held_up_s: dict[int, float] = {}
        """What readings take besides, the first by the number 0."""
        self.num_readings = 0

    def run(self, num_samples: int, num_slots: int) -> float:
        """Seconds of all steps and readings."""
        world, controller, waiting, spent_s = self.world, self.world.controller, num_samples, 0.0
        left: list[int] = []
        unread: list[int] = []
        while waiting or left:
            num_new = min(waiting, num_slots - len(left))
            waiting -= num_new
            left += [self.num_tokens] * num_new
            unread += [self.num_prompt] * num_new
            num_read = 0 if controller.is_off else sum(unread[len(unread) - num_new :])
            unread = unread if controller.is_off else [*unread[: len(unread) - num_new], *[0] * num_new]
            most = min(controller.depths[-1], max(left) - 1)
            choice = controller.choose(len(left), most, 0, sum(unread))
            if choice.levels:
                num_read += sum(unread)
                unread = [0] * len(left)
            offered = [min(choice.levels, num_tokens - 1) for num_tokens in left]
            accepted = [world.accepted(most) for most in offered]
            prefill_s_of = num_read * self.token_read_s
            if num_read:
                prefill_s_of += self.held_up_s.get(self.num_readings, 0.0)
                self.num_readings += 1
            seconds, reading = world.cost(len(left), choice.levels), PrefillTime(num_read, prefill_s_of)
            left = [num_tokens - taken - 1 for num_tokens, taken in zip(left, accepted, strict=True)]
            ended = [self.num_prompt for num_tokens in left if num_tokens == 0]
            unread = [num_unread for num_unread, tokens in zip(unread, left, strict=True) if tokens]
            left = [tokens for tokens in left if tokens]
            world.chosen.append((choice.levels, choice.reason))
            controller.learn(
                StepOutcome(choice.levels, seconds, accepted, offered, prefill=reading, ended=ended),
                choice,
            )
            spent_s += seconds + reading.seconds
            self.num_read += num_read
        return spent_s


def linear(base: float, per_level: float, per_token: float, free_tokens: int = 40) -> Cost:
    """A forward costs `base` up to some tokens and more beyond them; a level costs a forward of the drafter."""
    return lambda rows, levels: base + per_level * levels + per_token * max(0, rows * (levels + 1) - free_tokens)


@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    rates=st.lists(st.floats(0.0, 1.0), min_size=8, max_size=8).map(lambda rates: sorted(rates, reverse=True)),
    per_level=st.floats(0.0, 0.02),
    per_token=st.floats(0.0, 0.001),
    num_active=st.sampled_from([1, 3, 8, 32]),
    max_levels=st.integers(1, 8),
)
@example(rates=[0.9] * 8, per_level=0.0002, per_token=0.0, num_active=1, max_levels=8)
@example(rates=[0.9] * 8, per_level=0.02, per_token=0.0, num_active=8, max_levels=8)
@example(rates=[0.8] * 8, per_level=0.001, per_token=0.001, num_active=32, max_levels=5)
def test_the_controller_finds_the_best_depth_for_linear_costs(
    rates: list[float], per_level: float, per_token: float, num_active: int, max_levels: int
) -> None:
    world = World(GoodputController(max_levels, max_exploration=0.05), linear(0.01, per_level, per_token), rates)
    world.run(1000, num_active)
    speeds = world.speeds(num_active)
    # Two depths may differ by less than the switching margin, or by less than the noise.
    assert speeds[world.usual()] >= 0.85 * max(speeds.values())


@settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(steps=st.lists(st.floats(0.001, 0.03), min_size=6, max_size=6), rate=st.floats(0.2, 0.95))
@example(steps=[0.001, 0.001, 0.001, 0.03, 0.03, 0.001], rate=0.95)
def test_the_controller_finds_the_best_depth_for_nonlinear_costs(steps: list[float], rate: float) -> None:
    controller = GoodputController(8, max_exploration=0.05)
    table = {levels: 0.01 + sum(steps[:index]) for index, levels in enumerate(controller.depths)}
    world = World(controller, lambda rows, levels: table[levels], [rate] * 8)
    world.run(1500, 4)
    speeds = world.speeds(4)
    assert speeds[world.usual()] >= 0.85 * max(speeds.values())


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("num_active", [1, 32])
def test_trials_take_no_more_than_their_share_of_steps_and_of_time(num_active: int, noise: float) -> None:
    controller = GoodputController(8, max_exploration=0.02)
    world = World(controller, linear(0.01, 0.004, 0.001), [0.3] * 8)
    world.noise = noise
    world.missed_s = 1e-5
    for steps in (150, 500, 3000):
        world.run(steps, num_active)
        trials = sum(reason == "explore" for _, reason in world.chosen)
        assert trials == controller.num_explored_steps
        assert trials <= 0.02 * controller.num_steps
        # One trial may turn out dearer than it was thought to be; the next waits until that is paid off.
        dearest = TRIAL_STEPS * world.cost(num_active, 8) * (1 + noise) + 100 * num_active * world.missed_s
        assert controller.explored_s <= 0.02 * controller.spent_s + dearest
    assert controller.num_start_steps == 4 * START_STEPS


def test_the_controller_turns_drafting_off_if_plain_decoding_is_faster_at_little_cost() -> None:
    world = World(GoodputController(5), linear(0.01, 0.002, 0.0005), [0.5] * 5)
    world.missed_s = 2e-5
    world.run(4000, 32)
    assert world.usual() == 0
    assert world.controller.is_off
    assert world.spent_s <= 1.02 * world.num_tokens * world.cost(32, 0) / 32


def test_a_depth_that_cannot_pay_off_is_abandoned_after_its_first_measurements() -> None:
    world = World(GoodputController(5), linear(0.01, 0.05, 0.001), [0.5] * 5)
    world.run(30, 32)
    assert [levels for levels, _ in world.chosen[:3]] == [0] * 3
    assert sum(levels > 0 for levels, _ in world.chosen) <= 6


def job(controller: GoodputController, num_prompt: int, num_tokens: int = 48) -> Job:
    """Steps of 10 ms, with drafts of 13.5 ms for 3.7 tokens; a thousand tokens of prompts are read in 40 ms."""
    return Job(World(controller, linear(0.01, 0.0007, 0.0), [0.8] * 5), num_prompt, num_tokens, 4e-5)


def test_the_drafter_does_not_prefill_prompts_that_take_longer_than_drafts_save() -> None:
    # 16 rows: reading 1,600 tokens takes 64 ms, and drafts spare 20 ms of the 30 that a sample takes.
    reading = job(GoodputController(5), 1600)
    assert reading.run(3000, 16) <= 1.03 * 3000 * 48 * 0.01 / 16
    assert reading.world.usual() == 0
    assert reading.num_read <= 100 * 1600, "those of the first steps, and of trials"


def test_the_drafter_prefills_prompts_that_are_prefilled_quickly() -> None:
    reading = job(GoodputController(5), 100)
    spent_s = reading.run(1000, 16)
    assert reading.world.usual() == 5
    assert reading.num_read == 1000 * 100
    assert spent_s <= 0.6 * 1000 * 48 * 0.01 / 16


def test_long_outputs_pay_for_long_prompts() -> None:
    reading = job(GoodputController(5), 1600, num_tokens=480)
    reading.run(200, 16)
    assert reading.world.usual() == 5
    assert reading.num_read >= 199 * 1600


@pytest.mark.parametrize(("num_unread", "drafts"), [(8 * 1600, False), (8 * 100, True), (0, True)])
def test_a_draining_batch_prefills_only_prompts_that_pay_off_within_its_last_tokens(
    num_unread: int, drafts: bool
) -> None:
    reading = job(GoodputController(5), 1600)
    reading.run(400, 16)
    controller = reading.world.controller
    controller._current = {16: 0}
    # 8 samples are left, halfway through: in 0.24 s, of which drafts spare two thirds.
    chosen = [controller.choose(8, 5, 0, num_unread).levels for _ in range(3)]
    assert all(levels > 0 for levels in chosen) == drafts
    assert any(levels > 0 for levels in chosen) == drafts


def test_the_controller_drafts_again_when_acceptance_rises() -> None:
    world = World(GoodputController(5, max_exploration=0.02), linear(0.01, 0.003, 0.0), [0.05] * 5)
    world.run(1500, 4)
    assert world.usual() == 0
    world.rates = [0.95] * 5
    world.run(2000, 4)
    assert world.usual() == 5


def test_the_controller_follows_changes_of_the_cost_of_drafting() -> None:
    world = World(GoodputController(5, max_exploration=0.02), linear(0.01, 0.02, 0.0), [0.8] * 5)
    world.run(1500, 4)
    assert world.usual() == 0
    world.cost = linear(0.01, 0.001, 0.0)
    world.run(4000, 4)
    assert world.usual() == 5
    world.cost = linear(0.01, 0.02, 0.0)
    world.run(300, 4)
    assert world.usual() == 0


def run_at_changing_pace(cost: Cost, num_active: int, paces: Sequence[float], seed: int) -> tuple[float, float]:
    """A machine that takes another pace now and then: what a thousand steps took, in shares of what their tokens would
    have taken plainly, and at the best depth."""
    pace, chance = [1.0], random.Random(seed)
    world = World(GoodputController(5), lambda rows, k: pace[0] * cost(rows, k), [0.87, 0.85, 0.8, 0.8, 0.8], seed)
    world.noise = 0.02
    truth = World(world.controller, cost, world.rates).speeds(num_active)
    left_s = spent_s = plain_s = best_s = 0.0
    for _ in range(1000):
        if left_s <= 0.0:
            pace[0], left_s = chance.choice(paces), chance.expovariate(1.0 / (100 * cost(num_active, 0)))
        before_s, before = world.spent_s, world.num_tokens
        world.run(1, num_active)
        step_s, tokens = world.spent_s - before_s, world.num_tokens - before
        left_s -= step_s
        spent_s += step_s
        plain_s += pace[0] * tokens / truth[0]
        best_s += pace[0] * tokens / max(truth.values())
    return spent_s / plain_s, spent_s / best_s


@pytest.mark.parametrize("paces", [(1.0,), (1.0, 1.45), (0.7, 1.0, 1.4), (0.9, 1.0, 1.1)])
def test_a_machine_of_changing_speed_costs_the_controller_little(paces: Sequence[float]) -> None:
    """It once took a slow minute for what plain decoding takes, and drafted where that loses until the next trial."""
    losing = [run_at_changing_pace(lambda b, k: 0.02 + 0.002 * b * (k + 1) + 0.01 * k, 128, paces, s) for s in range(8)]
    assert max(share for share, _ in losing) < 1.035, "of which the clock's noise is 0.016"
    winning = [run_at_changing_pace(lambda b, k: 0.02 + 0.0022 * b * (k + 1), 1, paces, s) for s in range(8)]
    assert max(share for _, share in winning) < 1.05
    assert max(share for share, _ in winning) < 0.45


def test_a_depth_that_wins_a_trial_is_used_after_the_former_best_is_measured_again() -> None:
    world = World(GoodputController(5, max_exploration=0.02), linear(0.01, 0.02, 0.0), [0.8] * 5)
    world.run(1500, 4)
    assert world.usual() == 0
    world.cost = linear(0.01, 0.001, 0.0)
    at = len(world.chosen)
    world.run(400, 4)
    tried = TRIAL_STEPS + CHECK_STEPS
    choices = [
        world.chosen[index - tried - 1 : index + 1]
        for index in range(at + tried + 1, len(world.chosen))
        if world.chosen[index][1] == "best" and world.chosen[index - 1][1] == "explore"
    ]
    changes = [steps for steps in choices if steps[0][1] == "best" and steps[0][0] != steps[-1][0]]
    assert changes, "a trial that was worth it"
    for (before, _), *trial, (after, _) in changes:
        assert trial == [(after, "explore")] * TRIAL_STEPS + [(before, "explore")] * CHECK_STEPS


@pytest.mark.parametrize("index", [0, 1, 2, 40])
def test_a_prompt_that_waits_for_a_compiler_does_not_end_drafting(index: int) -> None:
    world = World(GoodputController(5), linear(0.02, 0.003, 0.0), [0.9] * 5)
    job = Job(world, 60, 16, 0.0001)
    job.held_up_s = {index: 6.0}
    job.run(100, 1)
    assert job.num_readings > index
    assert world.usual() == 5


def test_trees_grow_as_the_batch_drains() -> None:
    cost = linear(0.01, 0.0005, 0.0006)
    deepest = 0
    for seed in range(10):
        world = World(GoodputController(8), cost, [0.8] * 8, seed)
        world.noise = 0.03
        used = {}
        world.run(1200, 32)
        for num_active in (32, 16, 8, 4, 2, 1):
            world.run(60, num_active)
            used[num_active] = world.usual(30)
            if num_active <= 8:
                share = world.speeds(num_active)[used[num_active]] / max(world.speeds(num_active).values())
                assert share >= 0.9, used
        assert used[32] < used[8] <= used[1], used
        deepest += used[1] == 8
    # It is 5 % better than the next, and the clock's noise is 3 %.
    assert deepest >= 8


def test_a_larger_batch_is_measured_without_drafts_before_the_depth_of_a_small_one_is_used() -> None:
    world = World(GoodputController(8), linear(0.01, 0.001, 0.002), [0.8] * 8)
    world.run(100, 1)
    assert world.usual() == 5
    world.run(12, 32)
    assert (0, "start") in world.chosen[100:]
    world.run(40, 32)
    assert world.speeds(32)[world.usual(20)] >= 0.9 * max(world.speeds(32).values())


def test_a_slow_first_step_of_each_shape_is_ignored() -> None:
    seen = set()
    usual = linear(0.01, 0.001, 0.0)

    def compiling(rows: int, levels: int) -> float:
        is_first = (rows, levels) not in seen
        seen.add((rows, levels))
        return 30.0 if is_first else usual(rows, levels)

    world = World(GoodputController(5), compiling, [0.9] * 5)
    world.run(40, 4)
    assert world.usual(20) == 5


def test_the_depth_rarely_changes_under_noisy_step_times() -> None:
    world = World(GoodputController(8), linear(0.01, 0.0028, 0.0), [0.75] * 8)
    world.noise = 0.1
    world.run(4000, 4)
    kept = [levels for levels, reason in world.chosen[1000:] if reason == "best"]
    assert sum(first != other for first, other in itertools.pairwise(kept)) <= 6


def test_the_controller_keeps_drafting_if_no_batch_size_repeats() -> None:
    controller = GoodputController(5)
    world = World(controller, linear(0.01, 0.001, 0.0), [0.8] * 5)
    for num_active in range(1, 200):
        world.run(1, num_active)
    world.run(100, 50)
    assert world.usual(50) == 5


def test_remaining_tokens_bound_the_depth() -> None:
    world = World(GoodputController(8), linear(0.01, 0.0002, 0.0), [0.9] * 8)
    world.run(60, 2)
    world.run(5, 2, max_levels=4)
    assert {levels for levels, _ in world.chosen[-5:]} == {3}, "a depth that is not compared is not run"
    world.run(5, 2, max_levels=0)
    assert world.chosen[-5:] == [(0, "last")] * 5
    assert not world.controller.is_off


@pytest.mark.parametrize(("max_levels", "depths"), [(1, (0, 1)), (4, (0, 1, 2, 3, 4)), (8, (0, 1, 2, 3, 5, 8))])
def test_the_trees_own_depth_is_always_compared(max_levels: int, depths: tuple[int, ...]) -> None:
    assert GoodputController(max_levels).depths == depths
    assert set(depths) - {max_levels} <= set(LADDER)
