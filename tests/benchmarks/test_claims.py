"""Tests the rule that decides claims, at its limits, and that the claims of the documents follow it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from benchmarks.harness.verdict import ratio_error
from benchmarks.tables import lantern, methods, real
from benchmarks.tables.claims import (
    MIN_SAMPLES,
    SURE,
    Compare,
    Holds,
    Reader,
    all_of,
    any_of,
    claims_table,
    decide,
    decide_claim,
    enough,
    load_claims,
    random_loses,
    steps_error,
)
from benchmarks.tables.parts import read_all

RESULTS = read_all()
MODULES: dict[str, Any] = {
    "methods": methods,
    "lantern": lantern,
    "real_vision": real,
    "real_vision_clips": real,
}
"""Results, which are also the name of a file of claims → the module that reads them."""


@pytest.mark.parametrize(
    ("gap", "num", "expected"),
    [
        (SURE * 0.1 + 1e-9, MIN_SAMPLES, True),
        (SURE * 0.1, MIN_SAMPLES, None),  # the interval ends at zero
        (-SURE * 0.1, MIN_SAMPLES, None),
        (-SURE * 0.1 - 1e-9, MIN_SAMPLES, False),
        (1.0, MIN_SAMPLES - 1, None),  # one sample too few
        (-1.0, MIN_SAMPLES - 1, None),
    ],
)
def test_a_gap_is_decided_by_its_interval_and_only_with_enough_samples(gap: float, num: int, expected: Holds) -> None:
    assert decide(gap, 0.1, num) is expected


def test_facts_are_rejected_with_any_number_of_samples_and_accepted_with_enough() -> None:
    assert [enough(True, num) for num in (MIN_SAMPLES, MIN_SAMPLES - 1)] == [True, None]
    assert [enough(False, num) for num in (MIN_SAMPLES, 1)] == [False, False]


def test_the_verdict_of_a_claim_follows_from_its_parts() -> None:
    assert [all_of(p) for p in ([True, True], [True, None], [None, False], [])] == [True, None, False, None]
    assert [any_of(p) for p in ([None, True], [False, None], [False, False], [])] == [True, None, False, None]


def test_errors_of_ratios_and_over_steps() -> None:
    # Ratios 1, 1, 0, 0 of equal weight: √(4 · 0.5²) / 4.
    assert ratio_error([1, 1, 0, 0], [1, 1, 1, 1]) == pytest.approx(0.25)
    assert ratio_error([3, 6], [1, 2]) == ratio_error([0], [0]) == 0.0
    # Half of four steps took nothing, half took two: a deviation of 1, over √4.
    assert steps_error([2, 0, 2]) == pytest.approx(0.5)
    assert steps_error([]) == 0.0


def reader(**cells: tuple[float, float]) -> Reader:
    """Return a reader of acceptance lengths and their errors, which are accuracies too."""
    results = {
        name: {
            **{"mean_acceptance_length": value, "acceptance_length_se": error, "num_cases": 36},
            **{"accuracy": value / 10, "accuracy_se": error / 10},
        }
        for name, (value, error) in cells.items()
    }
    return Reader({}, lambda _, key: [results[key]])


def test_comparisons_apply_factor_slack_direction_and_number_of_rivals() -> None:
    read = reader(a=(3.0, 0.1), b=(2.0, 0.1), c=(4.0, 0.1))
    assert Compare("a", {"": "b"})(read) == (True, "3.00 against 2.00")
    assert Compare("a", {"": "b"}, factor=2.0)(read)[0] is False
    assert Compare("a", {"": "c"}, slack=2.0)(read)[0] is True
    assert Compare("a", {"": "c"}, below=True)(read)[0] is True
    both = {"B": "b", "C": "c"}
    assert Compare("a", both, "x")(read) == (False, "x: 3.00 against B 2.00, C 4.00")
    assert Compare("a", both, one_is_enough=True)(read)[0] is True


def test_the_number_that_would_decide_a_gap_follows_from_its_error() -> None:
    # The error falls with the root of the number: 2 · 0.1 / 0.1 = 2 needs four times as many.
    read = reader(a=(3.1, 0.1), b=(3.0, 0.0), c=(3.1, 0.1))
    assert Compare("a", {"": "b"})(read) == (None, "3.10 against 3.00 (144 samples would decide)")
    assert Compare("a", {"": "c"})(read) == (None, "3.10 against 3.10")


def test_a_control_must_accept_as_much_unless_it_accepts_more_and_is_right_more_often() -> None:
    check = random_loses("own", "control")
    assert check(reader(own=(5.0, 0.01), control=(4.9, 0.01)))[0] is True
    assert check(reader(own=(5.0, 0.01), control=(4.0, 0.01)))[0] is None
    assert check(reader(own=(5.0, 0.01), control=(9.0, 0.01)))[0] is False


def test_the_table_has_three_verdicts_and_marks_claims_that_were_not_run() -> None:
    read = reader(a=(3.0, 0.1), b=(2.0, 0.1), c=(3.05, 0.1))
    claims = [(own, [Compare(own, {"": other})]) for own, other in (("a", "b"), ("b", "a"), ("a", "c"), ("d", "a"))]
    words = [line.split(" | ")[1:] for line in claims_table(claims, read).splitlines()[2:]]
    assert [word for word, _ in words] == ["yes", "**no**", "not decided", "not decided"]
    assert words[-1][1] == "not run: 'd' is missing |"


def verdicts(name: str, results: dict[str, Any]) -> dict[str, Holds]:
    module = MODULES[name]
    read = module.reader(results)
    return {text: decide_claim(checks, read)[0] for text, checks in load_claims(name, module.CHECKS)}


def thin_out(data: Any) -> Any:
    """The same results as of one sample too few."""
    if isinstance(data, dict):
        few = ("num_cases", "num_images")
        return {name: MIN_SAMPLES - 1 if name in few else thin_out(value) for name, value in data.items()}
    return [thin_out(entry) for entry in data] if isinstance(data, list) else data


@pytest.mark.parametrize("name", MODULES)
def test_every_claim_reads_results_that_exist_and_none_is_decided_by_too_few(name: str) -> None:
    module = MODULES[name]
    decided = [decide_claim(checks, module.reader(RESULTS[name])) for _, checks in load_claims(name, module.CHECKS)]
    assert [numbers for _, numbers in decided if "not run" in numbers] == []
    assert {True, False} <= {holds for holds, _ in decided}
    assert set(verdicts(name, thin_out(RESULTS[name])).values()) == {None}


LENGTH = "mean_acceptance_length"
ACCEPTED = {f"methods.lvspec.scenarios.{scenario}.{LENGTH}": 1.0 for scenario in methods.SCENARIOS}


@pytest.mark.parametrize(
    ("name", "changes", "fallen"),
    [
        ("methods", {"methods.sd_chain.scenarios.single.equal_share": 0.9}, "Every lossless"),
        ("methods", ACCEPTED, "LVSpec accepts"),
        ("lantern", {"kinds.text.rows.1/eagle2_coupled.equal_share": 0.9}, "Exact acceptance"),
        ("lantern", {f"kinds.text.rows.1/lantern_paper_0!1.{LENGTH}": 1.0}, "Sampling, LANTERN"),
        ("real_vision", {f"methods.sd_chain_caption/strong.scenarios.dense.{LENGTH}": 2.0}, "Of the four"),
        (
            "real_vision",
            {f"methods.tabed_mt_tree3/strong.scenarios.dense.{LENGTH}": 1.0},
            "TABED on token",
        ),
        ("real_vision", {f"methods.tabed_mt/strong.scenarios.dense.{LENGTH}": 1.0}, "TABED is best"),
        ("real_vision_clips", {f"methods.specvlm/weak.scenarios.clip.{LENGTH}": 2.0}, "Pruning 90 %"),
        ("real_vision_clips", {"methods.sd_tree/strong.scenarios.clip.equal_share": 0.9}, "Every lossless"),
    ],
)
def test_a_claim_is_rejected_if_its_numbers_become_worse(name: str, changes: dict[str, float], fallen: str) -> None:
    results = copy.deepcopy(RESULTS[name])
    for path, value in changes.items():
        *keys, last = (key.replace("!", ".") for key in path.split("."))
        cell = results
        for key in keys:
            cell = cell[key]
        cell[last] = value
    (holds,) = [holds for text, holds in verdicts(name, results).items() if text.startswith(fallen)][:1]
    assert holds is False


def test_a_wide_interval_leaves_a_claim_open() -> None:
    results = copy.deepcopy(RESULTS["methods"])
    (text,) = [text for text in verdicts("methods", results) if text.startswith("LVSpec accepts at least 1.5 times")]
    assert verdicts("methods", results)[text] is True
    for cell in results["methods"]["lvspec"]["scenarios"].values():
        cell["acceptance_length_se"] = 100.0
    assert verdicts("methods", results)[text] is None
