"""Defines the rows of the image benchmark: methods of the papers and their settings.

Values of k are the papers', of 16,384 codes; `World.share` scales them to the codebook.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from configs.method import MethodConfig
from models.llamagen.neighbours import Metric

DELTAS = (0.05, 0.1, 0.2, 0.4)
KS = (100, 300, 1000)
METRICS: tuple[Metric, ...] = ("l2", "cosine", "random")
# As many drafts as LANTERN++'s smaller static tree; the paper's tree has 59.
TREE = {"kind": "dynamic", "top_k": 8, "depth": 4, "total_tokens": 26}
STATIC_TREE = {"kind": "static", "name": "mc_sim_7b_63"}
# LANTERN++'s public code (run.sh): k neighbours besides the draft.
STATIC_K, STATIC_LAMBDA = 10, 5.0
TREES: dict[str, dict[str, Any]] = {
    "dynamic": TREE,
    "static": STATIC_TREE,
    "chain": {"kind": "chain", "length": 5},
    "heads": {"kind": "static", "branching": (3, 2, 2)},  # 21 drafts
    "window": {"kind": "chain", "length": 16},
}
PLAIN = "plain"


@dataclass(frozen=True)
class Row:
    """One row of the tables; plain decoding if `acceptance` is None. k is scaled unless `published_k`; `options` are
    those of the drafter."""

    name: str
    label: str
    acceptance: dict[str, Any] | None = None
    tree: str = "dynamic"
    other_seed: bool = False
    drafter: str = "eagle"
    published_k: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def method(self, share: Callable[[int], int]) -> MethodConfig:
        """Return the configured method; `share` scales k to the codebook."""
        if self.acceptance is None:
            return MethodConfig()
        acceptance = dict(self.acceptance)
        if "k" in acceptance and not self.published_k:
            acceptance["k"] = share(acceptance["k"])
        drafter = {"kind": self.drafter, **self.options}
        return MethodConfig.model_validate({"drafter": drafter, "tree": TREES[self.tree], "acceptance": acceptance})


def _lantern(name: str, label: str, draw: str, k: int = 1000, delta: float = 0.1, **more: Any) -> Row:
    # The public code takes k neighbours besides the draft; the paper counts the draft among the k.
    rule = {"kind": "lantern", "draw": draw, "k": k, "k_counts_draft": draw != "code", "delta": delta, **more}
    return Row(name, label, rule)


def _plus(name: str, what: str, published_k: bool) -> Row:
    label = f"LANTERN++, k = {STATIC_K} {what}, λ = {STATIC_LAMBDA:g}"
    row = _lantern(name, label, "code", k=STATIC_K, delta=STATIC_LAMBDA, divergence="multiplicative")
    return replace(row, tree="static", published_k=published_k)


def _jacobi(name: str, what: str, fill: str) -> Row:
    return Row(
        name, f"Jacobi, 16 drafts, {what}", {"kind": "exact"}, tree="window", drafter="jacobi", options={"fill": fill}
    )


_JACOBI = _jacobi("jacobi", "last code repeated", "repeat")
_PLUS = (_plus("lantern_pp", "as published", True), _plus("lantern_pp_scaled", "scaled", False))
_NAMES = {"coupled": "coupled", "paper": "residual of the paper", "code": "residual of the code"}

MAIN: dict[float, tuple[Row, ...]] = {
    1.0: (
        Row(PLAIN, "plain"),
        Row("plain_other_seed", "plain, another seed", other_seed=True),
        Row("eagle2_rejection", "EAGLE-2, rejection sampling", {"kind": "rejection"}),
        Row("eagle2_coupled", "EAGLE-2, coupled noise", {"kind": "exact"}),
        *(
            _lantern(f"lantern_{draw}_{delta}", f"LANTERN, {_NAMES[draw]}, δ = {delta}", draw, delta=delta)
            for draw, delta in (("coupled", 0.1), ("coupled", 0.4), ("paper", 0.1), ("paper", 0.4), ("code", 0.4))
        ),
        Row("static_rejection", "static tree, rejection sampling", {"kind": "rejection"}, tree="static"),
        *_PLUS,
        _JACOBI,
        _jacobi("jacobi_above", "row above", "above"),
    ),
    0.0: (
        Row(PLAIN, "plain"),
        Row("eagle2", "EAGLE-2", {"kind": "exact"}),
        *(_lantern(f"lantern_{delta}", f"LANTERN, δ = {delta}", "coupled", delta=delta) for delta in (0.05, 0.2)),
        Row("static_exact", "static tree, exact", {"kind": "exact"}, tree="static"),
        *_PLUS,
        _JACOBI,
    ),
}
"""Rows of every kind of condition, by temperature."""

NAIVE = (
    Row("sd", "speculative decoding, chain of 5", {"kind": "exact"}, tree="chain", drafter="model"),
    Row("medusa", "Medusa, 3 heads", {"kind": "exact"}, tree="heads", drafter="medusa"),
)
"""The paper's Table 1 without EAGLE-2, greedy: drafting methods for text, applied to images."""

GUIDANCE = (1.0, 2.0, 4.0, 7.5)
"""Scales of guidance; the paper samples with 7.5, the zoo's models draw best at 2."""
LOSSLESS = (
    Row("eagle3_coupled", "EAGLE-3, coupled noise", {"kind": "exact"}, drafter="eagle3"),
    Row(
        "layer_skip",
        "layer skip, 4 of 6 layers, chain of 5",
        {"kind": "exact"},
        tree="chain",
        drafter="layer_skip",
        options={"layers": (0, 2, 3, 5)},
    ),
)
"""Further lossless rows at temperature 1."""
GUIDED_ROWS = (
    *(PLAIN, "eagle2_coupled", "eagle3_coupled", "layer_skip", "jacobi"),
    *("lantern_paper_0.4", "eagle2_rejection", "lantern_paper_0.1"),
)
"""Rows at temperature 1 for every scale of guidance, text-conditional."""

SWEEP = tuple(
    _lantern(f"sweep_{k}_{delta}", f"k = {k}, δ = {delta}", "coupled", k=k, delta=delta)
    for k, delta in ((1000, 0.05), (1000, 0.2), (100, 0.4), (300, 0.4))
)
"""Further points of the trade-off (the paper's Figure 5) at temperature 1."""

ABLATIONS = (
    _lantern("metric_l2", "ℓ2, δ = 0.2", "paper", delta=0.2),
    _lantern("metric_l2_0.05", "ℓ2, δ = 0.05", "paper", delta=0.05),
    _lantern("metric_cosine", "cosine, δ = 0.2", "paper", delta=0.2, metric="cosine"),
    _lantern("metric_random", "random, δ = 0.2", "paper", delta=0.2, metric="random"),
    _lantern("divergence_jsd", "JSD, δ = 0.2", "paper", delta=0.2, divergence="jsd"),
)
"""The paper's Table 4, with its own residual, at temperature 1."""


def rows_of(kind: str) -> list[tuple[float, Row]]:
    """Return all rows of a kind with their temperature; some settings and drafters exist for text conditions only."""
    main = [(temperature, row) for temperature, rows in MAIN.items() for row in rows]
    if kind != "text":
        return main
    return [*main, *((0.0, row) for row in NAIVE), *((1.0, row) for row in (*LOSSLESS, *SWEEP, *ABLATIONS))]


def row_named(name: str) -> Row:
    """Return a row at temperature 1."""
    return next(row for temperature, row in rows_of("text") if temperature > 0 and row.name == name)
