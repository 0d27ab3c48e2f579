"""TABED's weights by hand, and its lanes inside the engine."""

from __future__ import annotations

import math

import pytest
import torch

from decoding import Engine, Method
from decoding.acceptance import Exact
from decoding.contexts import Full, Pooled, Pruned, TextOnly
from decoding.contracts import EngineSpec, StepNoise, VerificationOutput
from decoding.drafters import ModelDrafter
from decoding.drafters import ensemble as ensemble_module
from decoding.drafters.ensemble import (
    Distance,
    Ensemble,
    EnsembleOptions,
    Policy,
    adaboost,
    inverse_error,
    pick_candidate,
    simplex_grid,
)
from decoding.noise import Noise
from decoding.sampling import RowSampling
from decoding.tree import AcceptanceResult, DraftTree
from decoding.trees import Chain, StaticTree
from models.kv.lanes import SlotBatch
from tests import toys
from tests.conformance import checks

pytestmark = pytest.mark.slow

POLICIES: tuple[Policy, ...] = (
    "static", "random", "matches", "error", "inverse_softmax", "inverse_linear", "adaboost",
)  # fmt: skip
V = 4


def test_the_grid_of_two_lanes_has_eleven_weights_and_of_four_two_hundred_and_eighty_six() -> None:
    two = simplex_grid(2, 10)
    assert sorted(round(float(row[0]), 4) for row in two) == [round(i / 10, 4) for i in range(11)]
    four = simplex_grid(4, 10)
    assert four.shape == (286, 4)
    assert len({tuple(row.tolist()) for row in four}) == 286
    torch.testing.assert_close(four.sum(1), torch.ones(286))


def test_matches_decide_errors_break_ties_and_equal_weights_break_those() -> None:
    grid = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
    matches = torch.tensor([[2.0, 1.0, 2.0], [1.0, 1.0, 1.0]])
    errors, counted = torch.tensor([[0.4, 0.1, 0.3], [0.2, 0.2, 0.2]]), torch.tensor([3, 3])
    assert pick_candidate(grid, matches, errors, counted, by_matches=True).tolist() == [[0.0, 1.0], [0.5, 0.5]]
    assert pick_candidate(grid, matches, errors, counted, by_matches=False).tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_errors_that_differ_by_rounding_are_ties() -> None:
    """Lanes of equal prompts give all candidates one error, up to the rounding of the batch's shape."""
    grid, counted = simplex_grid(4, 4), torch.tensor([5, 5])
    noise = 1e-6 * torch.rand(2, grid.shape[0], generator=torch.Generator().manual_seed(0))
    for by_matches in (True, False):
        picked = pick_candidate(grid, torch.ones_like(noise), 2.5 + noise, counted, by_matches)
        assert picked.tolist() == [[0.25] * 4] * 2


def test_inverse_error_is_a_softmax_in_the_paper_and_linear_in_the_code() -> None:
    errors, seen = torch.tensor([[0.5, 1.0]]), torch.tensor([True])
    paper = inverse_error(errors, seen, 1.0, linear=False)
    assert paper[0, 0].item() == pytest.approx(math.exp(2) / (math.exp(2) + math.exp(1)))
    code = inverse_error(errors, seen, 1.0, linear=True)
    assert code.tolist()[0] == pytest.approx([2 / 3, 1 / 3])
    assert inverse_error(errors, torch.tensor([False]), 1.0, linear=True).tolist() == [[0.5, 0.5]]


def test_adaboost_weighs_by_log_odds_and_cuts_negative_weights() -> None:
    # 8 of 10 and 3 of 10 hits, one of each added: ε = 3/12 and 8/12.
    weights = adaboost(torch.tensor([[8.0, 3.0]]), torch.tensor([10]), vocab_size=V, constant=0.0)
    assert weights.tolist() == [[1.0, 0.0]]
    weights = adaboost(torch.tensor([[8.0, 3.0]]), torch.tensor([10]), vocab_size=V, constant=1.0)
    first, second = math.log(3) + math.log(3), math.log(0.5) + math.log(3)
    assert weights.tolist()[0] == pytest.approx([first / (first + second), second / (first + second)])


def one_step(
    options: EnsembleOptions,
    lanes: list[list[float]],
    target: list[float],
    target_token: int,
    ensemble: Ensemble | None = None,
) -> Ensemble:
    """A block of one draft: `lanes` are the two lanes' distributions after the root."""
    slots = SlotBatch(torch.tensor([0]), (0,), (1,))
    if ensemble is None:
        ensemble = Ensemble(options)
        ensemble.open(EngineSpec(1, 8, V, 2, torch.device("cpu"), frozenset(), frozenset(), 1, 2, 1), 2)
        ensemble.reset(slots)
    mixed = ensemble.merge(slots, torch.tensor([lanes]).log()[:, :, None], depth=0)
    assert mixed.shape == (1, 1, V)
    tree = DraftTree(
        torch.tensor([[0, 3]]), torch.tensor([[-1, 0]]), torch.tensor([[0, 1]]), torch.ones(1, 2, dtype=torch.bool),
        torch.tensor([[0, 1]]), 1, is_chain=True,
    )  # fmt: skip
    target_logits = torch.tensor([[target, target]]).log()
    ones = torch.ones(1)
    rows = RowSampling(0 * ones, torch.zeros(1, dtype=torch.long), ones, ones, None, False, 0, False)
    noise = StepNoise(Noise(torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, dtype=torch.long)), 2, V)
    states = torch.zeros(1, 1, 2, 2)
    verification = VerificationOutput(slots, tree, target_logits, target_logits, states, states, noise, rows)
    result = AcceptanceResult(
        torch.tensor([[0, 0]]), torch.tensor([1]), torch.tensor([target_token]), torch.zeros(1, 2, dtype=torch.bool)
    )
    if ensemble.learns:
        ensemble.learn(verification, result, torch.tensor([[0, -1]]))
    return ensemble


GOOD, BAD = [0.7, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.7]


def weights_of(ensemble: Ensemble) -> list[float]:
    weights: list[float] = ensemble.extras(0)["ensemble_weights"]
    return weights


def test_a_step_moves_the_weight_to_the_lane_with_the_correct_prediction() -> None:
    # Candidates w·GOOD + (1−w)·BAD put token 0 first for w > 0.5; among those, w = 1 has the smallest KL to the target.
    assert weights_of(one_step(EnsembleOptions("matches"), [GOOD, BAD], GOOD, 0)) == [1.0, 0.0]
    assert weights_of(one_step(EnsembleOptions("matches"), [BAD, GOOD], GOOD, 0)) == [0.0, 1.0]


def test_the_kl_optimum_lies_inside_when_the_target_lies_between_the_lanes() -> None:
    between = [0.4, 0.1, 0.1, 0.4]
    assert weights_of(one_step(EnsembleOptions("error"), [GOOD, BAD], between, 0)) == [0.5, 0.5]
    near_good = [0.58, 0.1, 0.1, 0.22]  # = 0.8·GOOD + 0.2·BAD
    assert weights_of(one_step(EnsembleOptions("error"), [GOOD, BAD], near_good, 0)) == pytest.approx([0.8, 0.2])
    assert weights_of(one_step(EnsembleOptions("error", "tvd"), [GOOD, BAD], near_good, 0)) == pytest.approx([0.8, 0.2])


@pytest.mark.parametrize("distance", ["kl", "tvd"])
@pytest.mark.parametrize("policy", ["matches", "error"])
def test_candidates_are_scored_in_parts_of_bounded_size(
    policy: Policy, distance: Distance, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes, target = torch.rand(2, 2, V, generator=torch.Generator().manual_seed(5)).softmax(dim=-1)
    options = EnsembleOptions(policy, distance)
    sizes: list[int] = []
    multiply = torch.matmul

    def recorded(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        sizes.append(multiply(tensor, other).numel())
        return multiply(tensor, other)

    monkeypatch.setattr(torch, "matmul", recorded)
    results = []
    # All eleven candidates, six and then five, and one at a time although it exceeds the bound.
    for bound, num_parts in ((1 << 20, 1), (6 * V + 1, 2), (1, 11)):
        sizes.clear()
        monkeypatch.setattr(ensemble_module, "MAX_MIXED", bound)
        results.append(weights_of(one_step(options, lanes.tolist(), target[0].tolist(), 1)))
        assert max(sizes) <= max(bound, V)
        assert len([size for size in sizes if size >= V]) >= num_parts
    assert results[0] == results[1] == results[2]


def test_a_window_of_one_forgets_and_an_unbounded_one_remembers() -> None:
    # An even mixture is always wrong, so the lane that was right twice outweighs the one that was right last.
    worse = [0.05, 0.05, 0.1, 0.8]
    first_weight = {}
    for window in (1, 2, 3, 0):
        options = EnsembleOptions("matches", window=window)
        ensemble = one_step(options, [GOOD, worse], GOOD, 0)
        ensemble = one_step(options, [GOOD, worse], GOOD, 0, ensemble)
        ensemble = one_step(options, [worse, GOOD], GOOD, 0, ensemble)
        first_weight[window] = weights_of(ensemble)[0]
    assert first_weight[1] == 0.0
    assert first_weight[3] == first_weight[0] > 0.5


def test_the_merge_mixes_probabilities_not_logits() -> None:
    ensemble = one_step(EnsembleOptions("static", static_weights=(3.0, 1.0)), [GOOD, BAD], GOOD, 0)
    slots = SlotBatch(torch.tensor([0]), (0,), (1,))
    mixed = ensemble.merge(slots, torch.tensor([[GOOD, BAD]]).log()[:, :, None], depth=0)[0, 0].exp()
    assert mixed.tolist() == pytest.approx([0.55, 0.1, 0.1, 0.25])
    assert weights_of(ensemble) == [0.75, 0.25]


def engine(options: EnsembleOptions, slots: int, tree: object = None, rule: object = None) -> Engine:
    contexts = [Full(), TextOnly(), Pruned(0.5), Pooled()]
    drafter = ModelDrafter(toys.perturbed("llava", 0.02), contexts, toys.VOCAB_SIZE, Ensemble(options))
    return Engine(toys.target("llava"), Method(drafter, tree or Chain(4), rule or Exact()), slots, 128)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", POLICIES)
def test_an_ensemble_of_four_contexts_is_lossless_and_independent_of_the_batch(policy: Policy) -> None:
    wanted = checks.requests("llava", 9)
    target = toys.target("llava")
    outputs = []
    for slots in (1, 4):
        done = checks.run(engine(EnsembleOptions(policy, steps=4), slots), wanted)
        for request in wanted:
            assert done[request.sample_id].token_ids == checks.generated("llava", request, target.eos_ids)
        outputs.append({key: c.telemetry for key, c in done.items()})
    for key, telemetry in outputs[0].items():
        assert telemetry.acceptance_histogram == outputs[1][key].acceptance_histogram
        weights = outputs[1][key].extras["ensemble_weights"]
        assert telemetry.extras["ensemble_weights"] == pytest.approx(weights, abs=1e-3)
    assert max(c.telemetry.mean_acceptance_length for c in done.values()) > 1.5


def test_the_kv_cache_of_every_lane_equals_a_fresh_prefill_of_its_own_prompt() -> None:
    made = engine(EnsembleOptions(steps=4), 3, StaticTree(checks.RAGGED_PATHS))
    drafter = made.method.drafter
    assert isinstance(drafter, ModelDrafter)
    for request in checks.requests("llava", 12):
        made.submit(request)
    num_compared = 0
    while made.has_work:
        made.step()
        for slot, progress in enumerate(made._slots.progress):
            if progress is None:
                continue
            held = progress.token_ids[: len(progress.token_ids) - int(drafter._num_pending[slot])]
            target_prefix = made.target.encode(progress.request.prompt, progress.request.images)
            for lane, prefix in enumerate(drafter.prefixes(progress.request, checks.PrefillOutput(target_prefix))):
                checks.compare_row(drafter.lanes, drafter.lanes.rows.first_of(slot) + lane, prefix, held)
                num_compared += 1
    assert num_compared > 40
