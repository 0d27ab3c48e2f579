"""The image benchmark on toy models: a complete run, resuming after a stop, and its arithmetic."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.lantern import __main__ as lantern
from benchmarks.lantern.quality import (
    count_class,
    count_prompt,
    measure_quality,
)
from benchmarks.lantern.recorder import Setting, pick, record
from benchmarks.lantern.rows import DELTAS, GUIDANCE, LOSSLESS, row_named, rows_of
from benchmarks.lantern.store import Store
from benchmarks.lantern.world import ImagePrompt, World
from benchmarks.tables.parts import PARTS
from benchmarks.tables.plots import plots_of
from decoding import Sampling
from decoding.acceptance import Exact
from decoding.contracts import Method, VerificationOutput
from decoding.drafters import EagleDrafter
from decoding.tree import AcceptanceResult
from decoding.trees import DynamicTree
from models.heads.medusa import MedusaHeads, MedusaShape
from models.llamagen.neighbours import Proximity, nearest_codes
from models.llamagen.shape import VqShape
from models.llamagen.vq import Vq
from tests.toys import images
from zoo.image.quality import Seen
from zoo.world.scene import Thing

pytestmark = pytest.mark.slow

PROMPT = "a large red circle at the top left on pale ground"
CIRCLE = Thing(0, "large", "red", "circle")
NUM_IMAGES = 6


class ToyJudge:
    """Reads a red circle in bright images, and nothing in dark ones; features are a few pixels."""

    def read(self, pictures: Sequence[NDArray[np.uint8]]) -> list[Seen | None]:
        return [((CIRCLE,), "pale") if picture.mean() > 128 else None for picture in pictures]

    def features(self, pictures: Sequence[NDArray[np.uint8]]) -> NDArray[np.float64]:
        return np.stack([picture[:2, :2].reshape(-1) for picture in pictures]).astype(np.float64)


@pytest.fixture(autouse=True)
def _layers_of_toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows skip layers of the shipped target, and toys have fewer."""
    rows = [replace(row, options={"layers": (0,)}) if row.drafter == "layer_skip" else row for row in LOSSLESS]
    monkeypatch.setattr("benchmarks.lantern.rows.LOSSLESS", tuple(rows))


def world(kind: str) -> World:
    target = images.target(kind)
    torch.manual_seed(0)
    vq = Vq(VqShape(images.CODES, channels=8, multipliers=(1, 2), num_res_blocks=1, latent_dim=8))
    vq.codebook.data.normal_()
    shown = list(np.random.default_rng(0).integers(0, 255, (NUM_IMAGES + 6, 8, 8, 3), dtype=np.uint8))
    score = count_prompt(PROMPT)
    prompts = [ImagePrompt(f"image-{i}", PROMPT, images.condition(kind, i), score) for i in range(NUM_IMAGES)]
    sampling = Sampling(images.GRID**2, top_k=40, guidance_scale=2.0)
    drafters: dict[str, Any] = {"eagle": (images.eagle_network(target), "")}
    if kind == "text":
        drafters["eagle3"] = (images.eagle3_network(target), "")
        torch.manual_seed(1)
        shape = MedusaShape(num_heads=3, num_blocks=1, state_size=32, vocab_size=images.CODES)
        drafters["medusa"] = (MedusaHeads(shape).eval().requires_grad_(False), "heads")
        drafters["model"] = (images.target(kind, noise=0.1), "smaller")
    judge: Any = ToyJudge()
    real, reference = shown[:NUM_IMAGES], shown[NUM_IMAGES:]
    return World(kind, target, vq.eval(), prompts, real, reference, judge, sampling, {"a": "b"}, drafters)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "lantern.json"


def test_a_whole_run_on_toys_fills_every_table_and_every_claim_is_decided(results: Path) -> None:
    for kind in images.KINDS:
        lantern.run_kind(world(kind), 0, Store(results, kind))
    data = json.loads(results.read_text())
    for kind in images.KINDS:
        for temperature, row in rows_of(kind):
            cell = data["kinds"][kind]["rows"][f"{temperature:g}/{row.name}"]
            if cell["acceptance"] == "exact" and not row.other_seed:
                assert cell["equal_share"] == 1.0, (kind, temperature, row.name)
            assert cell["equal_share"] < 1.0 or not row.other_seed
            assert cell["num_codes"] == cell["num_images"] * images.GRID**2
    # A greedy class has one image.
    assert data["kinds"]["class"]["rows"]["0/plain"]["num_images"] == 5
    tables = {name: part.render(data).splitlines() for name, part in PARTS.items() if part.source == "lantern"}
    (line,) = tables.pop("lantern_guidance_line")
    assert all(f"{scale:g} (" in line for scale in GUIDANCE)
    (line,) = tables.pop("lantern_detectable")
    assert re.search(r"text-conditional \d+ % \(\d+ images\), class-conditional \d+ %", line)
    assert tables["lantern_claims"].pop(0).startswith("Test-bed: ")
    assert tables["lantern_claims"].pop(0) == ""
    for lines in tables.values():
        assert len(lines) > 2
        assert len({line.count("|") for line in lines}) == 1
    assert not [line for line in tables["lantern_claims"] if "not run" in line]
    assert list(plots_of({"lantern": data})) == [Path("docs/results/lantern_trade_off.svg")]


def run_rows(toy: World, store: Store, *names: str) -> None:
    store.open(lantern.settings_of(toy, 0))
    for name in names:
        lantern.Bench(toy, 0, store).run_row(row_named(name), 1.0)


def test_a_run_resumes_and_restarts_under_other_settings(results: Path) -> None:
    toy, store = world("text"), Store(results, "text")
    run_rows(toy, store, "plain")
    data = json.loads(results.read_text())
    data["kinds"]["text"]["rows"]["1/plain"]["whole"] = "kept"
    results.write_text(json.dumps(data))
    run_rows(toy, store, "plain", "eagle2_coupled")
    result_rows = json.loads(results.read_text())["kinds"]["text"]["rows"]
    assert (result_rows["1/plain"]["whole"], list(result_rows)) == ("kept", ["1/plain", "1/eagle2_coupled"])
    run_rows(replace(toy, revisions={"a": "c"}), store, "plain")
    result_rows = json.loads(results.read_text())["kinds"]["text"]["rows"]
    assert list(result_rows) == ["1/plain"]
    assert result_rows["1/plain"]["whole"] != "kept"


def test_without_a_drafter_other_rows_are_measured_and_a_new_drafter_is_measured_again(results: Path) -> None:
    toy, store = world("text"), Store(results, "text")
    head, _ = toy.drafters["eagle"]
    for drafters, expected in (
        ({}, {"1/plain": ""}),
        ({"eagle": (head, "one")}, {"1/plain": "", "1/eagle2_coupled": "one"}),
        ({"eagle": (head, "two")}, {"1/plain": "", "1/eagle2_coupled": "two"}),
    ):
        run_rows(replace(toy, drafters=drafters), store, "plain", "eagle2_coupled")
        result_rows = json.loads(results.read_text())["kinds"]["text"]["rows"]
        assert {key: cell.get("drafter", "") for key, cell in result_rows.items()} == expected


# --- what is recorded ----------------------------------------------------------------------------------------------


def test_the_recorded_strict_hits_are_the_acceptance_of_a_single_draft(results: Path) -> None:
    toy = world("text")
    tables = {"l2": nearest_codes(toy.vq.codebook, 8, Proximity())}
    exact = toy.build(row_named("eagle2_coupled").method(toy.share))
    recorder = record(exact.acceptance, tables, [2, 4, 8], DELTAS)
    drafter = EagleDrafter(toy.drafters["eagle"][0], toy.target.head, 2, images.merge_of(toy.target))
    done = toy.decode(Method(drafter, DynamicTree(1, 0, 2), recorder), toy.requests(1.0, 0))
    telemetries = [completion.telemetry for completion in done]
    means = recorder.means()
    drafted, taken = sum(t.num_draft_tokens for t in telemetries), sum(t.num_accepted_draft_tokens for t in telemetries)
    assert means["num_steps"] == drafted
    assert means["strict_hit"] == pytest.approx(taken / drafted)
    for delta in DELTAS:
        probabilities = [pick(means, "probability", Setting("l2", "tvd", k, delta)) for k in (2, 4, 8)]
        assert probabilities == sorted(probabilities)
        assert means["strict_probability"] <= probabilities[0]
        assert probabilities[-1] <= means["strict_probability"] + delta + 1e-9


class FirstChildTaken(Exact):
    """Exact acceptance that counts the steps whose path begins with the root's first child."""

    def __init__(self) -> None:
        self.num_taken = 0

    def accept(self, verification: VerificationOutput) -> AcceptanceResult:
        result = super().accept(verification)
        self.num_taken += int(((result.n > 1)[:, None] & (result.path[:, 1:2] == 1)).sum())
        return result


def test_the_first_of_several_children_is_recorded(results: Path) -> None:
    toy = world("text")
    rule = FirstChildTaken()
    recorder = record(rule, {"l2": nearest_codes(toy.vq.codebook, 4, Proximity())}, [4], [0.1])
    drafter = EagleDrafter(toy.drafters["eagle"][0], toy.target.head, 2, images.merge_of(toy.target))
    toy.decode(Method(drafter, DynamicTree(3, 0, 4), recorder), toy.requests(1.0, 0))
    means = recorder.means()
    assert rule.num_taken > 0
    assert means["strict_hit"] == pytest.approx(rule.num_taken / means["num_steps"])


def test_recording_changes_no_image(results: Path) -> None:
    toy = world("text")
    method = toy.build(row_named("eagle2_rejection").method(toy.share))
    tables = {"l2": nearest_codes(toy.vq.codebook, 4, Proximity())}
    recorder = record(method.acceptance, tables, [4], [0.1])
    done = toy.decode(Method(method.drafter, method.tree, recorder), toy.requests(1.0, 0))
    again = toy.decode(toy.build(row_named("eagle2_rejection").method(toy.share)), toy.requests(1.0, 0))
    assert [a.token_ids for a in done] == [b.token_ids for b in again]


# --- arithmetic ----------------------------------------------------------------------------------------------------


def test_cost_counts_bonus_tokens_and_forwards_of_an_image(results: Path) -> None:
    toy = world("text")
    plain = toy.decode(toy.build(row_named("plain").method(toy.share)), toy.requests(1.0, 0))
    cell = lantern.measure_cost(plain, plain)
    assert (cell["mean_acceptance_length"], cell["acceptance_length_se"]) == (1.0, 0.0)
    assert cell["target_forwards_per_image"] == images.GRID**2
    assert cell["equal_share"] == 1.0
    other = lantern.measure_cost(plain, plain[1:] + plain[:1])
    assert other["equal_share"] < 1.0


def test_quality_counts_attributes_over_all_images() -> None:
    bright, dark = np.full((4, 4, 3), 200, np.uint8), np.zeros((4, 4, 3), np.uint8)
    features = np.random.default_rng(0).standard_normal((8, 12))
    quality = measure_quality(ToyJudge(), [bright, bright, dark, dark], [count_prompt(PROMPT)] * 4, {"real": features})
    assert (quality["whole"], quality["attributes"]) == (0.5, 0.5)
    assert quality["whole_se"] == pytest.approx(0.25)
    # Four ratios of 1, 1, 0, 0 with equal weights: √(4 · 0.5²) / 4.
    assert quality["attributes_se"] == pytest.approx(0.25)
    assert quality["frechet_real"] > 0


def test_a_class_asks_for_one_object_of_its_colour_and_shape() -> None:
    score = count_class("red", "circle")
    assert score(((CIRCLE,), "dark")) == (True, 2, 2)
    assert score(((CIRCLE, replace_thing(cell=4)), "dark")) == (False, 2, 2)
    assert score(((replace_thing(colour="blue"),), "dark")) == (False, 1, 2)
    assert score(None) == (False, 0, 2)


def replace_thing(cell: int = 0, colour: str = "red") -> Thing:
    return Thing(cell, "large", colour, "circle")
