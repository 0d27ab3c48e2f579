"""Runs one method on scenarios, and computes acceptance, cost, quality and equality from its completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from actors.loading.method import build_method
from actors.loading.pair import Pair
from benchmarks.harness.engines import acceptance_of, run_requests, sum_histograms
from benchmarks.harness.samples import Row
from benchmarks.harness.verdict import ratio_error
from benchmarks.methods.scenarios import Case, attribute_overlap
from configs.method import MethodConfig
from decoding import Completion, Engine, Request, Sampling
from decoding.acceptance.walk import target_choice
from decoding.contracts import Acceptance, Method, VerificationOutput
from decoding.tree import AcceptanceResult

MAX_NEW_TOKENS = 160
SLOTS = 32
MAX_CONTEXT_TOKENS = 768
Completions = dict[str, dict[str, Completion]]
"""Scenario → case id → completion."""


class FollowDrafter(Acceptance):
    """Accept every draft of a chain, the last one as the token after the path, so that the target adds no token.

    The target chooses the first token (prefill) and the token of a step without drafts. No job can choose this rule.
    Raises ValueError if a tree is not a chain.
    """

    lossless = False

    def accept(self, verification: VerificationOutput) -> AcceptanceResult:
        tree = verification.tree
        if not tree.is_chain:
            raise ValueError("a drafter can be followed along chains only")
        choice = target_choice(verification)
        num_drafts = tree.valid[:, 1:].long().cumprod(dim=1).sum(dim=1)
        n = num_drafts.clamp_min(1)
        index = torch.arange(tree.num_levels + 1, device=n.device)
        path = torch.where(index < n[:, None], index, 0)
        last = tree.tokens.gather(1, num_drafts[:, None])[:, 0]
        return AcceptanceResult(path, n, torch.where(num_drafts > 0, last, choice[:, 0]), path > 0)


def run_cases(pair: Pair, engine: Engine, cases: list[Case], sampling: Sampling, seed: int) -> dict[str, Completion]:
    """Return all completions of one scenario by case id; raise RuntimeError if one failed."""
    requests = [Request(c.case_id, pair.render(c.messages), c.images, sampling, seed, videos=c.videos) for c in cases]
    return {completion.sample_id: completion for completion in run_requests(engine, requests)}


def measure(
    cases: list[Case], done: dict[str, Completion], plain: dict[str, Completion] | None, target_forwards: int
) -> dict[str, Any]:
    """Return the metrics of one method on one scenario; `…_se` are standard errors over cases."""
    completions = [done[case.case_id] for case in cases]
    telemetry = [completion.telemetry for completion in completions]
    tokens = sum(len(completion.token_ids) for completion in completions)
    steps = sum(entry.num_spec_steps for entry in telemetry)
    cell: dict[str, Any] = {
        "num_cases": len(cases),
        "num_tokens": tokens,
        **acceptance_of(completions),
        "target_forwards_per_token": sum(entry.target_forwards for entry in telemetry) / tokens,
        "drafter_forwards_per_step": sum(entry.drafter_forwards for entry in telemetry) / max(1, steps),
        "acceptance_histogram": sum_histograms(completions),
        "batch_forwards": target_forwards,
    }

    def add_share(name: str, above: Sequence[int], below: Sequence[int]) -> None:
        cell[name], cell[f"{name}_se"] = sum(above) / max(1, sum(below)), ratio_error(above, below)

    scores = [case.score(done[case.case_id].text) for case in cases if case.score is not None]
    if scores:
        add_share("accuracy", *zip(*scores, strict=True))
    words = [attribute_overlap(done[case.case_id].text, case.truth) for case in cases if case.truth]
    if words:
        add_share("attribute_f1", [2 * both for both, _, _ in words], [output + true for _, output, true in words])
    if plain is not None:
        same = sum(done[case.case_id].token_ids == plain[case.case_id].token_ids for case in cases)
        cell["equal_share"] = same / len(cases)
    return cell


def run_method(
    pair: Pair,
    choice: MethodConfig,
    scenarios: dict[str, list[Case]],
    sampling: Sampling,
    plain: Completions | None,
    seed: int,
    follow_drafter: bool = False,
    max_context_tokens: int = MAX_CONTEXT_TOKENS,
    slots: int = SLOTS,
) -> tuple[dict[str, Any], Completions]:
    """Run one method over all scenarios; return metrics and completions. `follow_drafter` accepts every draft."""
    cells: dict[str, Any] = {}
    completions: Completions = {}
    for name, cases in scenarios.items():
        method = build_method(choice, pair.drafter, pair.target)
        if follow_drafter:
            method = Method(method.drafter, method.tree, FollowDrafter())
        engine = Engine(pair.target, method, slots, max_context_tokens)
        completions[name] = run_cases(pair, engine, cases, sampling, seed)
        target_forwards = engine.stats.target_forwards
        cells[name] = measure(cases, completions[name], plain[name] if plain else None, target_forwards)
    return cells, completions


def sample_rows(
    method: str, scenario: str, cases: Sequence[Case], done: Mapping[str, Completion], plain: Mapping[str, Completion]
) -> list[Row]:
    """Return the rows of one method in one scenario; `plain` are the completions of plain decoding."""
    rows = []
    for case in cases:
        completion, telemetry = done[case.case_id], done[case.case_id].telemetry
        right, stated = case.score(completion.text) if case.score is not None else (None, None)
        shared, words = None, None
        if case.truth:
            both, output, true = attribute_overlap(completion.text, case.truth)
            shared, words = 2 * both, output + true
        rows.append(
            {
                "method": method,
                "scenario": scenario,
                "sample": case.case_id,
                "num_tokens": len(completion.token_ids),
                "num_steps": telemetry.num_spec_steps,
                "num_accepted": telemetry.num_accepted_draft_tokens,
                "num_drafted": telemetry.num_draft_tokens,
                "num_relaxed": telemetry.num_relaxed_accepts,
                "num_target_forwards": telemetry.target_forwards,
                "num_right": right,
                "num_stated": stated,
                "words_shared": shared,
                "words_total": words,
                "equal": completion.token_ids == plain[case.case_id].token_ids,
            }
        )
    return rows
