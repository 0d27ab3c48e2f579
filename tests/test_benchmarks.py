"""The documents match the committed results, and the arithmetic of the benchmarks is right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import ablations, decode
from benchmarks.harness.plots import weight_traces
from benchmarks.lantern import __main__ as lantern
from benchmarks.lantern import claims as lantern_claims
from benchmarks.lantern import tables as lantern_tables
from benchmarks.methods import __main__ as methods
from benchmarks.methods.claims import check_claims
from benchmarks.methods.scenarios import attribute_overlap, build_scenarios
from benchmarks.tables import __main__ as tables

METHODS = json.loads(methods.RESULTS.read_text())
LANTERN = json.loads(lantern.RESULTS.read_text())
ABLATIONS = json.loads(ablations.RESULTS.read_text())
DECODE = json.loads(decode.RESULTS.read_text())
SCHEDULING = tables.read_results()["scheduling"]
FLEET = tables.read_results()["autoscaling"]


@pytest.mark.parametrize("document", tables.DOCUMENTS, ids=str)
def test_generated_parts_are_those_of_the_committed_results(document: Path) -> None:
    assert tables.fill(document.read_text(), tables.read_results()) == document.read_text()


def test_a_benchmark_that_was_not_run_has_a_note_instead_of_a_table() -> None:
    text = "before\n<!-- table: engine -->\nold figures\n<!-- end -->\nafter"
    result = "`python -m benchmarks.engine` was not run yet."
    assert tables.fill(text, {}) == text.replace("old figures", result)


def test_the_plot_of_the_relaxed_rules_is_that_of_the_committed_results() -> None:
    assert tables.LOSSY_TRADE_OFF.read_text() == ablations.draw_trade_off(ABLATIONS, METHODS)


def test_the_committed_claims_follow_from_the_committed_numbers() -> None:
    assert METHODS["claims"] == check_claims(METHODS)


def test_the_claims_about_lantern_follow_from_the_committed_numbers() -> None:
    assert LANTERN["claims"] == lantern_claims.check_claims(LANTERN["kinds"])
    assert lantern_tables.draw_trade_off(LANTERN) == tables.TRADE_OFF.read_text()


def test_a_claim_about_lantern_falls_when_its_numbers_do() -> None:
    changed = json.loads(json.dumps(LANTERN["kinds"]))
    changed["text"]["rows"]["1/eagle2_coupled"]["equal_share"] = 0.9
    changed["text"]["rows"]["1/lantern_paper_0.1"]["mean_acceptance_length"] = 1.0
    fallen = [
        claim["claim"].split(",")[0]
        for claim, before in zip(lantern_claims.check_claims(changed), LANTERN["claims"], strict=True)
        if before["holds"] and claim["holds"] is False
    ]
    assert {"Sampling", "Exact acceptance gives plain decoding's images"} <= set(fallen)


def test_the_images_of_the_documents_are_small() -> None:
    sheets = sorted(Path("docs/results").glob("images_*.png"))
    assert len(sheets) == 4
    assert all(sheet.stat().st_size <= 400 * 1024 for sheet in sheets)


def test_a_claim_falls_when_its_numbers_do() -> None:
    changed = json.loads(json.dumps(METHODS))
    changed["methods"]["sd_chain"]["scenarios"]["single"]["equal_share"] = 0.9
    for cell in changed["methods"]["lvspec"]["scenarios"].values():
        cell["mean_acceptance_length"] = 1.0
    by_text = {claim["claim"]: claim for claim in check_claims(changed)}
    equal = "Every lossless method with exact acceptance gives plain decoding's tokens, videos included."
    assert by_text[equal]["holds"] is False
    assert next(claim for text, claim in by_text.items() if "1.5 times" in text)["holds"] is False


def test_a_claim_whose_method_was_not_run_is_marked() -> None:
    without = {name: result for name, result in METHODS["methods"].items() if name != "sage"}
    claims = check_claims({**METHODS, "methods": without})
    (found,) = [
        claim for claim in claims if claim["claim"].startswith("SAGE accepts more per step than the static tree at")
    ]
    assert found["holds"] is None
    assert "not run" in found["numbers"]


def test_every_preset_of_the_zoo_is_in_the_results() -> None:
    assert set(METHODS["methods"]) == set(methods.presets()) | {"drafter_alone", "pruned_drafter_alone"}
    others = {"video_drafter_alone", "video_pruned_drafter_alone", *methods.BUILT}
    assert set(METHODS["video"]["methods"]) == set(methods.presets(video=True)) | others


def test_the_expected_speed_up_is_that_of_the_paper() -> None:
    # 2.29 / (5 · 0.063 + 1) = 1.74, TABED's own example.
    assert ablations.expected_speedup(2.29, 5, 0.063) == pytest.approx(1.7414, abs=1e-4)


def test_autocorrelation_is_that_of_neighbouring_steps() -> None:
    assert ablations.autocorrelation({"a": [0.0, 1.0, 0.0, 1.0], "b": [1.0, 0.0, 1.0]}) == pytest.approx(-1.0)
    assert ablations.autocorrelation({"a": [0.0, 1.0, 2.0, 3.0]}) == pytest.approx(1.0)


def test_attribute_words_are_counted_as_often_as_they_occur() -> None:
    assert attribute_overlap("a small red star, red.", "one small red ring") == (2, 4, 3)


def test_scenarios_are_repeated_by_their_seed_and_hold_the_images_they_should() -> None:
    one, again, other = (build_scenarios(2, seed) for seed in (0, 0, 1))
    assert {name: len(cases[0].images) for name, cases in one.items()} == {
        "single": 1, "two_images": 2, "second_turn": 1, "text_only": 0, "clip": 3, "story": 5, "long_clip": 6,
    }  # fmt: skip
    assert all((a.images[0] == b.images[0]).all() for a, b in zip(one["story"], again["story"], strict=True))
    assert any((a.images[0] != b.images[0]).any() for a, b in zip(one["story"], other["story"], strict=True))


def test_a_picture_of_weights_escapes_names() -> None:
    assert "&lt;b&gt;" in weight_traces({"<b>": [0.0, 1.0]}, "title")


def test_memory_is_constant_and_a_slow_actor_rarely_waits_in_the_committed_results() -> None:
    for run in DECODE["memory"]["runs"].values():
        assert run["num_videos"] == 2010
        assert run["peak_mib_after"] <= 1.1 * run["peak_mib_first_100"]
        assert run["parent_peak_mib_after"] <= 1.05 * run["parent_peak_mib_first_100"]
    assert DECODE["waits"]["cells"]["actor_at_0.5_of_the_limit"]["actors_waited_share"] < 0.05


def test_the_committed_overhead_reaches_its_goal() -> None:
    for cell in SCHEDULING["cells"].values():
        assert cell["share_of_ideal"] >= SCHEDULING["goal"], "docs/design/log.md claims it for all of them"


def test_the_committed_fleet_grew_to_its_maximum_and_went_back_to_one_node() -> None:
    line = FLEET["time_line"]
    assert [moment["at_s"] for moment in line] == sorted(moment["at_s"] for moment in line)
    assert (line[0]["num_nodes"], line[0]["num_actors"]) == (1, 0)
    assert max(moment["num_nodes"] for moment in line) == max(moment["num_actors"] for moment in line) == 3
    assert (line[-1]["num_nodes"], line[-1]["num_actors"]) == (1, 0)
    assert tables.fill("<!-- table: autoscaling -->\n<!-- end -->", {"autoscaling": FLEET}).count("has ended") == 1
