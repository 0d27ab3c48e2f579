"""Tests the rule that decides claims, at its limits, and that the claims of the documents follow it."""

from __future__ import annotations

import copy
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.claims import load
from benchmarks.claims.checks import Compare, Frontier, Printed
from benchmarks.claims.load import claims_table, decide_claim, load_claims
from benchmarks.claims.reader import DRAFTS, LENGTH, Reader, Samples, steps_error
from benchmarks.claims.verdict import (
    MIN_SAMPLES,
    GapEstimate,
    Holds,
    all_of,
    any_of,
    enough,
    judge,
    paired_gap,
    quantile,
)
from benchmarks.harness.verdict import ratio_error
from benchmarks.tables import lantern, methods, real
from benchmarks.tables.parts import read_all

RESULTS = read_all()
MODULES: dict[str, Any] = {
    "methods": methods,
    "lantern": lantern,
    "real_vision": real,
    "real_vision_clips": real,
}
"""Results, which are also the name of a file of claims → the module that reads them."""
SURE = quantile(MIN_SAMPLES)


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
    assert judge(GapEstimate(gap, 0.1, num)) is expected


def test_the_factor_of_an_interval_is_students() -> None:
    assert [round(quantile(num), 3) for num in (2, 31, 10_000)] == [12.706, 2.042, 1.960]


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


def test_a_paired_gap_is_the_mean_difference_and_its_error_that_of_the_differences() -> None:
    rng = random.Random(3)
    hard = [rng.uniform(0, 10) for _ in range(40)]
    own = {str(i): (value + 1 + rng.uniform(-0.1, 0.1), 1) for i, value in enumerate(hard)}
    other = {str(i): (value, 1) for i, value in enumerate(hard)}
    gap = paired_gap(own, other, 1.0, 0.0)
    differences = [own[name][0] - other[name][0] for name in own]
    mean = sum(differences) / 40
    expected = math.sqrt(sum((d - mean) ** 2 for d in differences) / 39 / 40)
    assert (gap.gap, gap.error) == (pytest.approx(mean), pytest.approx(expected))
    assert gap.error < 0.1 * ratio_error([value for value, _ in own.values()], [1] * 40)


def test_pairs_are_the_common_samples_and_the_offset_counts_with_the_factor() -> None:
    own = {"a": (2, 1), "b": (4, 1), "only": (100, 1)}
    gap = paired_gap(own, {"a": (1, 1), "b": (1, 1), "other": (50, 1)}, 2.0, 1.0)
    assert gap.gap == pytest.approx((3 + 1) - 2 * (1 + 1))
    assert (gap.num, gap.paired) == (2, True)
    with pytest.raises(KeyError, match="common samples"):
        paired_gap(own, {"z": (1, 1)}, 1.0, 0.0)


def reader(**cells: tuple[float, float]) -> Reader:
    """Return a reader of acceptance lengths and their errors, which are accuracies and F1 too."""
    results = {
        name: {
            **{LENGTH: value, "acceptance_length_se": error, "num_cases": 36},
            **dict.fromkeys(("accuracy", "attribute_f1"), value / 10),
            **{f"{share}_se": error / 10 for share in ("accuracy", "attribute_f1")},
        }
        for name, (value, error) in cells.items()
    }
    return Reader({}, lambda _, key: [results[key]])


def test_comparisons_apply_factor_slack_direction_and_number_of_rivals() -> None:
    read = reader(a=(3.0, 0.1), b=(2.0, 0.1), c=(4.0, 0.1))
    holds, numbers = Compare("a", {"": "b"})(read)
    assert holds is True
    assert numbers.startswith("3.00 against 2.00 [+1.000 ± ")
    assert numbers.endswith("n 36, unpaired]")
    assert Compare("a", {"": "b"}, factor=2.0)(read)[0] is False
    assert Compare("a", {"": "c"}, slack=2.0)(read)[0] is True
    assert Compare("a", {"": "c"}, below=True)(read)[0] is True
    both = {"B": "b", "C": "c"}
    assert Compare("a", both, "x")(read)[0] is False
    assert Compare("a", both, one_is_enough=True)(read)[0] is True


def test_accepted_drafts_exclude_the_bonus_token() -> None:
    read = reader(a=(4.0, 0.01), b=(2.5, 0.01))
    holds, numbers = Compare("a", {"": "b"}, metric=DRAFTS, factor=1.9)(read)
    assert holds is True  # 3.0 is 2.0 times 1.5; with the bonus token it would be 1.6 times
    assert "3.00 against 1.50, 2.00 times as much (1.60 with the bonus token)" in numbers


def test_the_number_that_would_decide_a_gap_follows_from_its_error() -> None:
    read = reader(a=(3.1, 0.1), b=(3.0, 0.0), c=(3.1, 0.1))
    holds, numbers = Compare("a", {"": "b"})(read)
    num = math.ceil(36 * (quantile(36) * 0.1 / (3.1 - 3.0)) ** 2)
    assert holds is None
    assert abs(int(numbers.rsplit("(", 1)[1].split()[0]) - num) <= 1
    assert "would decide" not in Compare("a", {"": "c"})(read)[1]


def test_a_printed_figure_is_reproduced_within_its_tolerance_only() -> None:
    read = reader(near=(1.22, 0.01), far=(1.5, 0.01), unsure=(1.31, 0.02))
    assert [Printed(key, 1.2)(read)[0] for key in ("near", "far", "unsure")] == [True, False, None]


def test_a_frontier_counts_controls_that_accept_no_less() -> None:
    read = reader(own=(5.0, 0.01), less=(4.0, 0.01), worse=(5.0, 0.01), better=(9.0, 0.01))
    kept = {"own": 0.5, "worse": 0.2}
    swapped = Reader({}, lambda _, key: [read.cells({}, key)[0] | {"attribute_f1": kept.get(key, 0.9)}])
    assert Frontier("own", ["less"])(swapped)[0] is None
    assert Frontier("own", ["less", "worse"])(swapped)[0] is True
    assert Frontier("own", ["worse", "better"])(swapped)[0] is False


def test_the_table_has_three_verdicts_and_marks_claims_that_were_not_run(tmp_path: Path, monkeypatch: Any) -> None:
    read = reader(a=(3.0, 0.1), b=(2.0, 0.1), c=(3.05, 0.1))
    pairs = (("a", "b"), ("b", "a"), ("a", "c"), ("d", "a"))
    entries = [{"claim": own, "ours": True, "checks": [{"own": own, "above": other}]} for own, other in pairs]
    (tmp_path / "some.yaml").write_text(yaml.safe_dump({"test_bed": "A toy.", "claims": entries}))
    monkeypatch.setattr(load, "DATA", tmp_path)
    monkeypatch.setattr(load, "load_claims", lambda name, special: load_claims(name, special, tmp_path))
    lines = claims_table("some", {}, read).splitlines()
    assert lines[0] == "Test-bed: A toy."
    rows = [line.split(" | ") for line in lines[4:]]
    assert [row[2] for row in rows] == ["yes", "**no**", "not decided", "not decided"]
    assert rows[-1][4] == "not run: 'd' is missing"


def verdicts(name: str, results: dict[str, Any], samples: bool = False) -> dict[str, Holds]:
    """Return the verdicts of a file; without `samples` from the cells alone, so that changed cells count."""
    module = MODULES[name]
    read = module.reader(results) if samples else Reader(results, module.reader(results).cells)
    return {claim.text: decide_claim(claim, read)[0] for claim in load_claims(name, module.CHECKS)}


def thin_out(data: Any) -> Any:
    """The same results as of one sample too few."""
    if isinstance(data, dict):
        few = ("num_cases", "num_images")
        return {name: 1 if name in few else thin_out(value) for name, value in data.items()}
    return [thin_out(entry) for entry in data] if isinstance(data, list) else data


@pytest.mark.parametrize("name", MODULES)
def test_every_claim_reads_results_that_exist_and_none_is_decided_by_too_few(name: str) -> None:
    module = MODULES[name]
    read = module.reader(RESULTS[name])
    decided = [decide_claim(claim, read) for claim in load_claims(name, module.CHECKS)]
    assert [numbers for _, numbers in decided if "not run" in numbers] == []
    assert {True, False} <= {holds for holds, _ in decided}
    assert set(verdicts(name, thin_out(RESULTS[name])).values()) == {None}


ACCEPTED = {f"methods.lvspec.scenarios.{scenario}.{LENGTH}": 1.0 for scenario in methods.SCENARIOS}


@pytest.mark.parametrize(
    ("name", "changes", "fallen"),
    [
        ("methods", {"methods.sd_chain.scenarios.single.equal_share": 0.9}, "Every lossless"),
        ("methods", ACCEPTED, "LVSpec accepts"),
        ("lantern", {"kinds.text.rows.1/eagle2_coupled.equal_share": 0.9}, "Exact acceptance"),
        ("lantern", {f"kinds.text.rows.1/lantern_paper_0!1.{LENGTH}": 1.0}, "Sampling, LANTERN"),
        ("real_vision", {f"methods.sd_chain_caption/strong.scenarios.dense.{LENGTH}": 2.0}, "Of the four"),
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
    start = "LVSpec accepts at least 1.5 times as many drafts as strict matching of"
    (text,) = [text for text in verdicts("methods", results) if text.startswith(start)]
    assert verdicts("methods", results)[text] is True
    for cell in results["methods"]["lvspec"]["scenarios"].values():
        cell["acceptance_length_se"] = 100.0
    assert verdicts("methods", results)[text] is None


# Mistakes of earlier versions of the claims, planted again.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of the claims."""
    return Path(shutil.copytree(load.DATA, tmp_path / "claims"))


def plant(folder: Path, name: str, old: str, new: str) -> None:
    path = folder / f"{name}.yaml"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "old", "new", "error"),
    [
        # wrong metric: lengths with the bonus token, multiplied
        ("methods", "factor: 1.5, metric: mean_accepted_drafts", "factor: 1.5", "the paper counts accepted drafts"),
        # wrong citation: another figure, and one that does not exist
        ("methods", "cites: lvspec.Figure 7", "cites: lvspec.Table 8", "is about 'random relaxation'"),
        ("methods", "cites: lvspec.Figure 7", "cites: lvspec.Figure 4", "which data/citations.yaml lacks"),
        # position-wise score alone
        ("real_vision", "metric: [accuracy, attribute_f1]", "metric: [accuracy]", "by position only"),
        ("real_vision_clips", "metric: [accuracy, attribute_f1]", "metric: [accuracy]", "by position only"),
    ],
)
def test_a_wrong_metric_citation_or_score_is_refused(folder: Path, name: str, old: str, new: str, error: str) -> None:
    load_claims(name, MODULES[name].CHECKS, folder)
    plant(folder, name, old, new)
    with pytest.raises(ValueError, match=error):
        load_claims(name, MODULES[name].CHECKS, folder)


def test_a_scenario_in_which_all_contexts_are_the_same_decides_nothing() -> None:
    read = methods.reader(RESULTS["methods"])
    others = {"M": "sd_chain:text_only", "T": "sd_chain_text:text_only"}
    holds, numbers = Compare("tabed_mt:text_only", others, slack=0.005, one_is_enough=True)(read)
    assert holds is None
    assert "all sides have the same counts in every sample" in numbers


def test_a_saturated_tree_decides_nothing() -> None:
    read = methods.reader(RESULTS["methods"])
    others = {"M": "tabed_m_tree", "T": "tabed_t_tree"}
    holds, numbers = Compare("tabed_mt_tree", others, slack=0.2, one_is_enough=True)(read)
    assert holds is None
    assert "accepts its whole depth in" in numbers


def test_samples_are_paired_if_both_sides_have_them() -> None:
    full = methods.reader(RESULTS["methods"])
    for other, expected in (("specvlm", True), ("video_eagle2:describe", False)):
        key = "sage" if expected else "video_sd:describe"
        assert full.gap(key, other, DRAFTS).paired is expected
    unpaired = Reader(RESULTS["methods"], full.cells)
    assert full.gap("sage_expansion", "sage", DRAFTS).error < unpaired.gap("sage_expansion", "sage", DRAFTS).error


def test_cells_are_the_sums_of_their_samples() -> None:
    """Recompute every figure of every cell from the committed samples."""
    read, num_figures = methods.reader(RESULTS["methods"]), 0
    for group in (RESULTS["methods"], RESULTS["methods"]["video"]):
        for name, method in group["methods"].items():
            for scenario, cell in method["scenarios"].items():
                (samples,) = read.samples(f"{name}:{scenario}")
                if not samples:
                    assert name.startswith("video_eagle")  # heads that do not ship
                    continue
                recomputed = {
                    LENGTH: 1 + total(samples, "num_accepted") / max(1, total(samples, "num_steps")),
                    "num_cases": len(samples),
                    "num_tokens": total(samples, "num_tokens"),
                    "equal_share": sum(row["equal"] for row in samples.values()) / len(samples),
                }
                for share, (above, below) in (("accuracy", RIGHT), ("attribute_f1", WORDS)):
                    if share in cell:
                        recomputed[share] = total(samples, above) / max(1, total(samples, below))
                assert {key: cell[key] for key in recomputed} == pytest.approx(recomputed), (name, scenario)
                num_figures += len(recomputed)
    assert num_figures > 1_000


RIGHT, WORDS = ("num_right", "num_stated"), ("words_shared", "words_total")


def total(samples: Samples, column: str) -> int:
    return sum(row[column] for row in samples.values())
