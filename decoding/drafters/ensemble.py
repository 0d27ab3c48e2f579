"""TABED: drafts several contexts in one forward and mixes them by weights adapted to each sample (Algorithm 1).

q = Σ w_m · softmax(logits_m). After each step, every candidate weighting is scored at the positions that the target
judged, up to and including the first mismatch, without the bonus token. The window's scores give the next weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from decoding.contracts import EngineSpec, VerificationOutput
from decoding.drafters.merge import Merge
from decoding.noise import Stream
from decoding.tree import AcceptanceResult
from models.kv.lanes import SlotBatch

Policy = Literal["static", "random", "matches", "error", "inverse_softmax", "inverse_linear", "adaboost"]
Distance = Literal["kl", "tvd"]
MAX_MIXED = 1 << 24
"""Maximum number of probabilities of candidate mixtures in memory at once: 64 MB."""
TIE = 1e-5
"""Errors of candidates that differ by at most this much per position are equal: rounding depends on the batch."""
FLOOR = 1e-10
"""Minimum probability inside a logarithm; a lane that gives a token probability 0 would make the sum infinite."""


@dataclass(frozen=True)
class EnsembleOptions:
    """Options: `window` is the number of last scored positions that count, 0 for all; `steps` is the n of the weight
    grid; `static_weights` are the initial lane weights, fixed for policy `static` (equal if empty)."""

    policy: Policy = "matches"
    distance: Distance = "kl"
    window: int = 0
    steps: int = 10
    temperature: float = 1.0
    adaboost_constant: float = 1.0
    static_weights: tuple[float, ...] = ()


class Ensemble(Merge):
    """Merge of R lanes by adaptive weights.

    State per slot: `_weights` (S, R); `_matches` and `_errors` (S, W, J), scores of the last W positions, or running
    sums (S, 1, J) if `window` is 0; `_seen` (S,), the number of scored positions. The J candidates are the rows of the
    weight grid for policies `matches` and `error`, else the single lanes.
    """

    def __init__(self, options: EnsembleOptions) -> None:
        self.options = options
        self.learns = options.policy != "static"

    def open(self, spec: EngineSpec, num_lanes: int) -> None:
        options = self.options
        searched = options.policy in ("matches", "error")
        grid = simplex_grid(num_lanes, options.steps) if searched else torch.eye(num_lanes)
        self._candidates = grid.to(spec.device)
        start = torch.tensor(options.static_weights or [1.0] * num_lanes, dtype=torch.float32, device=spec.device)
        assert start.shape == (num_lanes,), f"{num_lanes} lanes, but {start.shape[0]} static weights"
        self._start = start / start.sum()
        self._weights = self._start.repeat(spec.num_slots, 1)
        shape = (spec.num_slots, max(1, options.window), grid.shape[0])
        self._matches = torch.zeros(shape, device=spec.device)
        self._errors = torch.zeros(shape, device=spec.device)
        self._seen = torch.zeros(spec.num_slots, dtype=torch.long, device=spec.device)
        self._vocab_size = spec.vocab_size
        self._probs: list[Tensor] = []

    def reset(self, slots: SlotBatch) -> None:
        self._weights[slots.index] = self._start
        self._matches[slots.index] = 0.0
        self._errors[slots.index] = 0.0
        self._seen[slots.index] = 0

    def merge(self, slots: SlotBatch, logits: Tensor, depth: int) -> Tensor:
        probs = logits.softmax(dim=-1)  # (b, R, F, V)
        if depth == 0:
            self._probs = []
        self._probs.append(probs)
        mixed = torch.einsum("br,brfv->bfv", self._weights[slots.index], probs)
        # Only tokens that are −inf in all lanes get −inf; probabilities that underflow do not.
        impossible = (logits == -torch.inf).all(dim=1)
        return mixed.clamp_min_(torch.finfo(mixed.dtype).tiny).log_().masked_fill_(impossible, -torch.inf)

    def learn(self, verification: VerificationOutput, result: AcceptanceResult, merge_index: Tensor) -> None:
        tokens, path, is_chain = result.produced(verification.tree), result.path, verification.tree.is_chain
        # Nodes that were run only because of other rows are not scored.
        offered = verification.tree.has_drafts()
        row = torch.arange(path.shape[0], device=path.device)
        # A chain's node of each depth is the only one of its forward; its last node was not run.
        probs = None if is_chain else torch.cat(self._probs, dim=2)  # (b, R, G, V)
        num_scored = min(path.shape[1], len(self._probs)) if is_chain else path.shape[1]
        for depth in range(num_scored):
            node, at = path[:, depth], merge_index[:, depth]
            lanes = self._probs[depth][:, :, 0] if probs is None else probs[row, :, at.clamp_min(0)]  # (b, R, V)
            judged = (depth < result.n) & (at >= 0) & offered.gather(1, node[:, None])[:, 0]
            self._score(verification.slots, lanes, verification.target_logits[row, node], tokens[:, depth], judged)
        self._choose(verification, offered[:, 0])

    def _score(self, slots: SlotBatch, lanes: Tensor, target_logits: Tensor, token: Tensor, judged: Tensor) -> None:
        """Add the scores of all candidates at one position, for the rows in the mask `judged` (b,).

        `lanes` (b, R, V) are the lanes' distributions, `target_logits` (b, V) the target's logits.
        """
        target = target_logits.softmax(dim=-1)
        entropy = -(target * target.clamp_min(FLOOR).log()).sum(-1, keepdim=True)
        matches, errors = [], []
        # Candidates × vocabulary may be larger than the weights of a model, so their number at once has a bound.
        for candidates in torch.split(self._candidates, max(1, MAX_MIXED // target.numel())):
            mixed = torch.matmul(candidates, lanes)  # (b, J', V)
            matches.append((mixed.argmax(dim=-1) == token[:, None]).float())
            if self.options.distance == "kl":
                logs = mixed.clamp_min_(FLOOR).log_()
                errors.append(-torch.matmul(logs, target[:, :, None])[:, :, 0] - entropy)
            else:
                errors.append(0.5 * mixed.sub_(target[:, None]).abs_().sum(-1))
        match, error = torch.cat(matches, dim=1), torch.cat(errors, dim=1)
        index = slots.index
        # The next entry of the ring buffer; with window 0 there is one entry, which accumulates.
        at = self._seen[index] % self._matches.shape[1]
        for memory, value in ((self._matches, match), (self._errors, error)):
            old = memory[index, at]
            new = old + value if self.options.window == 0 else value
            memory[index, at] = torch.where(judged[:, None], new, old)
        self._seen[index] += judged.long()

    def _choose(self, verification: VerificationOutput, took_part: Tensor) -> None:
        """Set the weights of the next step for the rows in the mask `took_part` (b,), which had drafts."""
        index, options = verification.slots.index, self.options
        matches, errors = self._matches[index].sum(1), self._errors[index].sum(1)
        num_scored = self._seen[index]
        counted = num_scored if options.window == 0 else num_scored.clamp_max(options.window)
        if options.policy in ("matches", "error"):
            weights = pick_candidate(self._candidates, matches, errors, counted, options.policy == "matches")
            weights = torch.where((num_scored > 0)[:, None], weights, self._start)
        elif options.policy == "random":
            draws = [verification.noise.uniform(Stream.RULE, lane)[:, 0] for lane in range(self._start.shape[0])]
            weights = random_weights(torch.stack(draws, dim=1))
        elif options.policy == "adaboost":
            weights = adaboost(matches, counted, self._vocab_size, options.adaboost_constant)
        else:
            linear = options.policy == "inverse_linear"
            weights = inverse_error(errors, num_scored > 0, options.temperature, linear)
        self._weights[index] = torch.where(took_part[:, None], weights, self._weights[index])

    def extras(self, slot: int) -> dict[str, Any]:
        return {"ensemble_weights": [round(value, 4) for value in self._weights[slot].tolist()]}


# --- weights: b rows, J candidates, R lanes ------------------------------------------------------------------------


def simplex_grid(num_lanes: int, steps: int) -> Tensor:
    """Return all weights (J, R) that are multiples of 1 / `steps` and sum to 1 (policy S_W of MT*, Appendix B.2)."""
    rows = []
    for bars in combinations(range(steps + num_lanes - 1), num_lanes - 1):
        edges = (-1, *bars, steps + num_lanes - 1)
        rows.append([right - left - 1 for left, right in pairwise(edges)])
    return torch.tensor(rows, dtype=torch.float32) / steps


def pick_candidate(grid: Tensor, matches: Tensor, errors: Tensor, counted: Tensor, by_matches: bool) -> Tensor:
    """Return the best row of `grid` (J, R) for each sample, (b, R).

    `matches` and `errors` (b, J) are summed over the `counted` (b,) positions of the window. With `by_matches` the most
    argmax matches win and the smaller error breaks ties; otherwise the smaller error wins. Remaining ties go to the
    weights closest to equal weights, so that a sample without history, or whose lanes are equal, gets these.
    """
    if by_matches:
        errors = errors.masked_fill(matches < matches.amax(dim=1, keepdim=True), torch.inf)
    least = errors.amin(dim=1, keepdim=True)
    imbalance = (grid - 1.0 / grid.shape[1]).square().sum(1)
    tied = imbalance.masked_fill(errors > least + TIE * (1.0 + counted[:, None]), torch.inf)
    return grid[tied.argmin(dim=1)]


def inverse_error(errors: Tensor, is_scored: Tensor, temperature: float, linear: bool) -> Tensor:
    """Return weights (b, R) from the lanes' errors (b, R); equal weights if the mask `is_scored` (b,) is False.

    Paper (B.2): softmax(1 / e / τ). With `linear`, as in the code: softmax(log(1 / e) / τ), at τ = 1 normalised 1 / e.
    """
    inverse = 1.0 / errors.clamp_min(1e-6)
    scores = inverse.log() if linear else inverse
    weights = (scores / temperature).softmax(dim=1)
    return torch.where(is_scored[:, None], weights, torch.full_like(weights, 1.0 / errors.shape[1]))


def adaboost(matches: Tensor, num_scored: Tensor, vocab_size: int, constant: float) -> Tensor:
    """Return weights (b, R) ∝ ln(1/ε − 1) + C·ln(K − 1), at least 0, with ε the lane's share of mismatches (Eq. 2).

    `matches` (b, R) counts matches among `num_scored` (b,) positions; one match and one mismatch are added, so that ε
    is never 0 or 1. Without positive weights or positions, the weights are equal.
    """
    epsilon = 1.0 - (matches + 1.0) / (num_scored[:, None] + 2.0)
    weights = ((1.0 / epsilon - 1.0).log() + constant * torch.log(torch.tensor(vocab_size - 1.0))).clamp_min(0.0)
    total = weights.sum(1, keepdim=True)
    equal = torch.full_like(weights, 1.0 / matches.shape[1])
    return torch.where((total > 0) & (num_scored[:, None] > 0), weights / total.clamp_min(1e-9), equal)


def random_weights(uniform: Tensor) -> Tensor:
    """Convert uniform numbers (b, R) to weights (b, R), uniform on the simplex: the baseline Random^MT."""
    exponential = -torch.log1p(-uniform)
    return (exponential / exponential.sum(1, keepdim=True)).float()
