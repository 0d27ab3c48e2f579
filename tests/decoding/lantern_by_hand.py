"""LANTERN in plain Python, written from the paper's text: the oracle of the vectorised rules.

One node, one draft, lists of floats. Distributions are q (the target's) and p (the drafter's), as in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations

import torch

from decoding.tree import DraftTree

Probs = Sequence[float]


def tvd(first: Probs, other: Probs) -> float:
    return sum(abs(x - y) for x, y in zip(first, other, strict=True)) / 2


def jsd(first: Probs, other: Probs) -> float:
    def kl(x: Probs, y: Probs) -> float:
        return sum(a * math.log(a / b) for a, b in zip(x, y, strict=True) if a > 0)

    middle = [(x + y) / 2 for x, y in zip(first, other, strict=True)]
    return (kl(first, middle) + kl(other, middle)) / 2


def distorted(q: Probs, draft: int, lenders: Sequence[int]) -> list[float]:
    """q_{k,δ}: the neighbourhood's probability on the draft, none on the others of it."""
    out = [0.0 if token in lenders else share for token, share in enumerate(q)]
    out[draft] = q[draft] + sum(q[token] for token in lenders)
    return out


def divergence_of(kind: str, q: Probs, draft: int, lenders: Sequence[int]) -> float:
    """Return the divergence that is compared with the bound δ (or λ)."""
    moved = distorted(q, draft, lenders)
    if kind == "multiplicative":
        if q[draft] == 0:
            return math.inf if moved[draft] > 0 else 1.0
        return moved[draft] / q[draft]
    return tvd(moved, q) if kind == "tvd" else jsd(moved, q)


def lenders_of(q: Probs, draft: int, near: Sequence[int], kind: str, delta: float) -> list[int]:
    """A(k, δ) without the draft: neighbours are added, nearest first, until one more would exceed the bound."""
    lenders: list[int] = []
    for token in near:
        if divergence_of(kind, q, draft, [*lenders, token]) > delta:
            break
        lenders.append(token)
    return lenders


def greedy_passes(q: Probs, draft: int, lenders: Sequence[int]) -> bool:
    """The draft is the argmax of q_{k,δ}."""
    moved = distorted(q, draft, lenders)
    return moved.index(max(moved)) == draft


def coupled_output(q: Probs, siblings: Sequence[int], a: dict[int, list[int]]) -> list[float]:
    """Distribution of the token that follows: y drawn from q, the first sibling whose A holds y, or y itself."""
    out = [0.0] * len(q)
    for y, share in enumerate(q):
        taken = next((draft for draft in siblings if y == draft or y in a[draft]), y)
        out[taken] += share
    return out


def residual_output(
    q: Probs,
    siblings: Sequence[int],
    drafter: Probs | None,
    near: dict[int, list[int]],
    n: int,
    kind: str,
    delta: float,
    residual: str,
) -> list[float]:
    """Distribution of the token that follows, siblings tried in turn; `drafter` None makes them certain.

    `near` gives whole rows of the table, of which the first `n` are looked at.
    """
    out = [0.0] * len(q)
    reach = 1.0
    mass = list(q)
    p = list(drafter) if drafter is not None else None
    for draft in siblings:
        q_of_a = q if residual == "paper" else mass
        lenders = lenders_of(q_of_a, draft, near[draft][:n], kind, delta)
        lent = sum(mass[token] for token in lenders)
        chance = min(1.0, (mass[draft] + lent) / (1.0 if p is None else p[draft]))
        out[draft] += reach * chance
        reach *= 1.0 - chance
        if reach == 0:
            return out
        certain = [float(token == draft) for token in range(len(q))]
        whole = near[draft][: n + 1] if lent > 0 else []
        if residual == "paper":
            left = [max(0.0, x - y) for x, y in zip(distorted(mass, draft, lenders), p if p else certain, strict=True)]
        elif p is None:
            left = [0.0 if token == draft or token in whole else x for token, x in enumerate(mass)]
        else:
            left = [max(0.0, x - (0.0 if token in whole else p[token])) for token, x in enumerate(mass)]
        total = sum(left)
        mass = [x / total for x in left] if total > 0 else [1.0 / len(q)] * len(q)
        if p is not None:
            rest = 1.0 - p[draft]
            p = [0.0 if token == draft else x / rest for token, x in enumerate(p)]
    return [share + reach * x for share, x in zip(out, mass, strict=True)]


def drawn_output(
    q: Probs, drafter: Probs, count: int, near: dict[int, list[int]], n: int, kind: str, delta: float, residual: str
) -> list[float]:
    """As `residual_output`, over all siblings that the drafter may draw without replacement."""
    out = [0.0] * len(q)
    for siblings in permutations(range(len(q)), count):
        chance, rest = 1.0, 1.0
        for draft in siblings:
            chance *= drafter[draft] / rest
            rest -= drafter[draft]
        given = residual_output(q, siblings, drafter, near, n, kind, delta, residual)
        out = [share + chance * x for share, x in zip(out, given, strict=True)]
    return out


def longest_greedy(
    tree: DraftTree, row: int, logits: torch.Tensor, table: torch.Tensor, n: int, kind: str, delta: float
) -> list[list[int]]:
    """All longest paths of drafts that pass one after the other, as lists of nodes without the root."""
    parents, tokens = tree.parents[row].tolist(), tree.tokens[row].tolist()
    paths: list[list[int]] = [[]]
    best = [[]] if paths else []
    while paths:
        best, longer = paths, []
        for path in paths:
            above = path[-1] if path else 0
            q = logits[row, above].double().softmax(-1).tolist()
            for node, parent in enumerate(parents):
                if parent == above and node > 0 and tree.valid[row, node]:
                    near = table[tokens[node]][:n].tolist()
                    if greedy_passes(q, tokens[node], lenders_of(q, tokens[node], near, kind, delta)):
                        longer.append([*path, node])
        paths = longer
    return best
