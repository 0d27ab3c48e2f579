"""Measures how well visual relevance (LVSpec, Eq. 8) separates attribute words from fillers.

    python -m benchmarks.real.relevance                 # the shipped pair; writes results/relevance.json
    python -m benchmarks.real.relevance --pair vision   # the vision pair of `python -m zoo.real_vision` as well

LVSpec relaxes the drafts with the lowest relevance. Its premise holds if relevance is higher at attribute words than at
fillers. The figure is the area under the ROC curve over the drafts that a strict chain proposes: 0.5 for no relation,
1 for a complete separation. Its interval is a bootstrap over samples.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.loading.method import build_method
from actors.loading.pair import Pair, load
from benchmarks.harness.engines import run_requests
from benchmarks.harness.results import command_line, progress, read_results, results_file
from benchmarks.methods.runs import MAX_CONTEXT_TOKENS, MAX_NEW_TOKENS
from benchmarks.methods.scenarios import Case, build_scenarios
from benchmarks.real.vision_settings import MAX_CONTEXT_TOKENS as VISION_TOKENS
from benchmarks.real.vision_settings import SEED, Setting, build_cases, job_of
from benchmarks.tables.parts import finish
from configs.load import load_preset
from configs.schema import CaptionJobConfig
from decoding import Engine, Request, Sampling
from decoding.acceptance.lvspec import LVSpec
from decoding.acceptance.relaxed import Mismatches
from decoding.contracts import Method, VerificationOutput
from zoo.quality import ATTRIBUTE_WORDS, MAX_DENSE_TOKENS
from zoo.samples import FILLER_WORDS

RESULTS = results_file("relevance")
Of = Literal["draft", "before", "embedding"]
TOPS = (5, 10)
NUM_RESAMPLES = 400
NUM_CASES = {"zoo": 48, "vision": 12}


class Recorder(LVSpec):
    """LVSpec that relaxes nothing and records (token, relevance) of every draft."""

    def __init__(self, of: Of, top: int) -> None:
        super().__init__(0.0, top, position_shift=False, relevance_of=of)
        self.drafts: list[tuple[int, float]] = []

    def pardon(self, verification: VerificationOutput, mismatches: Mismatches) -> Tensor:
        tree, slots = verification.tree, verification.slots
        relevance = self._visual.relevance(slots, self._states(verification), self.top_visual)
        for row, node in tree.valid[:, 1:].nonzero().tolist():
            self.drafts.append((int(tree.tokens[row, node + 1]), float(relevance[row, node + 1])))
        return torch.zeros_like(mismatches.match)


def record(
    pair: Pair, cases: Sequence[Case], of: Of, top: int, max_context_tokens: int, max_new_tokens: int
) -> list[list[tuple[str, float]]]:
    """Return the (word, relevance) of every draft by case."""
    built = build_method(pair.config.method, pair.drafter, pair.target)
    recorder, decode = Recorder(of, top), pair.target.front_end.tokenizer.decode
    words = []
    for case in cases:
        engine = Engine(pair.target, Method(built.drafter, built.tree, recorder), 1, max_context_tokens)
        request = Request(case.case_id, pair.render(case.messages), case.images, Sampling(max_new_tokens))
        recorder.drafts = []
        run_requests(engine, [request])
        words.append([(decode([token]).strip(" .,:;").lower(), value) for token, value in recorder.drafts])
    return words


def area(attributes: NDArray[np.float64], fillers: NDArray[np.float64]) -> float:
    """Return the probability that a random attribute has a higher value than a random filler; ties count half."""
    values = np.concatenate([attributes, fillers])
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    num = len(attributes)
    return float((ranks[:num].sum() - num * (num + 1) / 2) / (num * len(fillers)))


def separation(words: Sequence[Sequence[tuple[str, float]]], seed: int = 0) -> dict[str, Any]:
    """Return the area over all drafts, its 95 % interval over samples, and the numbers behind it."""
    sides = [
        tuple(np.array([value for word, value in case if word in group]) for group in (ATTRIBUTE_WORDS, FILLER_WORDS))
        for case in words
    ]
    rng = np.random.default_rng(seed)
    draws = [rng.integers(0, len(sides), len(sides)) for _ in range(NUM_RESAMPLES)]
    areas = [area(*(np.concatenate([sides[i][side] for i in draw]) for side in (0, 1))) for draw in draws]
    attributes, fillers = (np.concatenate([pair[side] for pair in sides]) for side in (0, 1))
    return {
        "auc": area(attributes, fillers),
        "low": float(np.quantile(areas, 0.025)),
        "high": float(np.quantile(areas, 0.975)),
        "num_attributes": len(attributes),
        "num_fillers": len(fillers),
        "num_cases": len(sides),
    }


def run_pair(name: str) -> list[dict[str, Any]]:
    """Measure all definitions of relevance on one pair."""
    if name == "zoo":
        pair = load(load_preset(CaptionJobConfig, "zoo_sd_chain_pruned"))
        cases, limits = build_scenarios(NUM_CASES[name], 0)["single"], (MAX_CONTEXT_TOKENS, MAX_NEW_TOKENS)
    else:
        pair = load(job_of(Setting("sd_chain_pruned", "strong"), "float32"))
        cases, limits = build_cases("dense", NUM_CASES[name]), (VISION_TOKENS["dense"], MAX_DENSE_TOKENS)
    rows = []
    for of in get_args(Of):
        for top in TOPS:
            found = separation(record(pair, cases, of, top, *limits), SEED)
            progress(f"{name:8s} {of:10s} N = {top:3d}  {found['auc']:.3f} ({found['low']:.3f}–{found['high']:.3f})")
            rows.append({"pair": name, "of": of, "top": top, **found})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line("real.relevance", __doc__)
    parser.add_argument("--pair", choices=NUM_CASES, default="zoo")
    options = parser.parse_args(arguments)
    old = read_results(RESULTS)["rows"] if RESULTS.exists() else []
    rows = [row for row in old if row["pair"] != options.pair] + run_pair(options.pair)
    return finish(RESULTS, {"torch": torch.__version__, "rows": sorted(rows, key=lambda row: row["pair"] != "zoo")})


if __name__ == "__main__":
    sys.exit(main())
