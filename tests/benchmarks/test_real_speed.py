"""Speeds of the pretrained pairs: every method decodes the same other prompts in each round, over one target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from actors.loading.pair import Pair
from benchmarks.harness.markdown import Results
from benchmarks.real import speed, text, vision_settings
from benchmarks.real.contenders import OfEngine, OfTransformers, load_all
from benchmarks.tables.parts import PARTS
from configs.load import load_job
from configs.schema import CaptionJobConfig
from decoding import Request, Sampling
from zoo.pair import CHECKPOINTS
from zoo.text import held_out_prompts


def job(method: str) -> CaptionJobConfig:
    models = {
        role: f"{{path: {CHECKPOINTS / f'text_{role}'}, dtype: float32, device: cpu}}" for role in ("target", "drafter")
    }
    overrides = [f"method={method}", *(f"model.{role}={value}" for role, value in models.items())]
    return load_job(CaptionJobConfig, text.CONFIG, tuple(overrides))


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    return load_all({name: job(name) for name in ("plain", "suffix", "sd_chain", "sd_tree")})


def make_requests(pair: Pair, num: int, max_new_tokens: int) -> list[Request]:
    prompts = held_out_prompts(num, 0)
    return [Request(str(i), prompt, sampling=Sampling(max_new_tokens)) for i, prompt in enumerate(prompts)]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "MAX_NEW_TOKENS", 6)
    monkeypatch.setattr(speed, "MIN_PROMPTS", 3)


def test_all_methods_share_one_target_and_each_drafter_is_loaded_once(pairs: dict[str, Pair]) -> None:
    assert len({id(pair.target) for pair in pairs.values()}) == 1
    assert pairs["suffix"].drafter is None
    assert pairs["sd_chain"].drafter is pairs["sd_tree"].drafter is not None
    assert pairs["plain"].target._features._recent.max_bytes == 0, "visual features are cached"


def test_every_method_decodes_the_same_other_prompts_in_each_round(
    pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[Any, list[str]]] = []
    decode = OfEngine.decode

    def recorded(self: OfEngine, requests: Sequence[Request]) -> Any:
        read.append((self, [request.prompt for request in requests]))
        return decode(self, requests)

    monkeypatch.setattr(OfEngine, "decode", recorded)
    saved: list[int] = []
    measured = speed.measure_speed(
        pairs, make_requests, (1, 2), save=lambda results: saved.append(len(results["rows"]))
    )
    assert saved == [4, 8]
    assert [(row["method"], row["batch"]) for row in measured["rows"]] == [(name, b) for b in (1, 2) for name in pairs]
    assert all(row["num_equal"] == row["num_prompts"] == 3 * max(3, 2 * row["batch"]) for row in measured["rows"])
    assert measured["rows"][2]["mean_acceptance_length"] > 1.0
    assert measured["left_out"] == []
    by_engine: dict[int, list[list[str]]] = {}
    for engine, prompts in read:
        by_engine.setdefault(id(engine), []).append(prompts)
    for num_slots in (1, 2):
        num = max(3, 2 * num_slots)
        passes = [requests_of_engine for requests_of_engine in by_engine.values() if len(requests_of_engine[0]) == num]
        assert len(passes) == len(pairs)
        assert all(outputs == passes[0] for outputs in passes)
        whole = [prompt for outputs in passes[0] for prompt in outputs]
        assert len(whole) == len(set(whole)) == 4 * num, "a prompt is decoded twice"


def test_an_engine_copies_nothing_from_an_earlier_one_over_the_same_prompts(pairs: dict[str, Pair]) -> None:
    some = {name: pairs[name] for name in ("plain", "suffix")}
    first, again = speed.measure_speed(some, make_requests, (2, 2))["rows"][1::2]
    assert first["method"] == "suffix"
    assert first["mean_acceptance_length"] == again["mean_acceptance_length"]


def test_generate_of_transformers_gives_the_same_outputs_and_leaves_the_engine_as_it_was(
    pairs: dict[str, Pair],
) -> None:
    requests = make_requests(pairs["plain"], 5, 6)
    engine = OfEngine(pairs["plain"], 2)
    expected, completions = engine.decode(requests)
    assert completions is not None
    outputs, none = OfTransformers(pairs["plain"], 2).decode(requests)
    assert none is None
    assert outputs == expected
    again, _ = engine.decode(
        [Request(f"again {i}", request.prompt, sampling=request.sampling) for i, request in enumerate(requests)]
    )
    assert again == expected


@pytest.mark.parametrize(("pair", "device"), list(speed.METHODS))
def test_every_method_is_a_job_that_compares_with_plain_decoding(pair: str, device: str) -> None:
    names = speed.methods_of(pair, device)
    assert names[0] == speed.PLAIN
    assert len(set(names)) == len(names)
    make = text.job_of if pair == "text" else lambda name, *rest: vision_settings.job_of(SETTINGS[name], *rest)
    for name in names:
        pair_of_models = make(name, "bfloat16", device)
        assert pair_of_models.model.target.device == device
        assert pair_of_models.model.drafter is None or pair_of_models.model.drafter.device == device


SETTINGS = vision_settings.settings()


def test_replayed_steps_are_compared_with_launched_ones_of_batch_1() -> None:
    def part(*speeds: float) -> Results:
        spread = [{"median": speed, "low": speed, "high": speed} for speed in speeds]
        names = [("plain", 1), ("a", 1), ("a", 32)]
        return {
            "rows": [
                {
                    "method": name,
                    "batch": batch,
                    "mean_acceptance_length": 2,
                    "tokens_per_s": values,
                    "over_plain": values,
                }
                for (name, batch), values in zip(names, spread, strict=False)
            ]
        }

    table = PARTS["real_step_replay"].render({"vision": {"cuda": part(4, 6, 9), "cuda_launched": part(2, 5)}})
    assert table.splitlines()[2:] == [
        "| plain | 2.00 / 2.00 | 2 (2–2) | 4 (4–4) | 2.00 | 4.00 (4.00–4.00) |",
        "| a | 2.00 / 2.00 | 5 (5–5) | 6 (6–6) | 1.20 | 6.00 (6.00–6.00) |",
    ]
