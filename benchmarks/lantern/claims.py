"""Checks LANTERN's claims on the zoo's image models by the rule of `benchmarks.harness.claims`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

from benchmarks.harness.claims import (
    Check,
    Finding,
    Holds,
    Measured,
    all_equal,
    all_of,
    check_all,
    claim,
    combine,
    decide,
    enough,
)
from benchmarks.lantern.recorder import Setting, pick
from benchmarks.lantern.rows import DELTAS, GUIDANCE, KS

Kinds = dict[str, Any]
Cell = dict[str, Any]
ATTRIBUTE_MARGIN = 0.05
"""Largest allowed loss of `attributes`, the share of right attributes, for images of equal quality."""
DISTANCE_MARGIN = 0.1
"""Largest allowed relative increase of `frechet_real`, the Fréchet distance to real images, for the same."""
LENGTH_MARGIN = 0.05
"""Largest relative difference of equal acceptance lengths."""


def _row(kinds: Kinds, key: str, kind: str = "text") -> Cell:
    cell: Cell = kinds[kind]["rows"][key]
    return cell


def _length(cell: Cell) -> str:
    return f"{cell['mean_acceptance_length']:.2f}"


def _quality(cell: Cell) -> str:
    return f"attributes {cell['attributes']:.3f}, distance {cell['frechet_real']:.2f}"


def _summary(cell: Cell) -> str:
    return f"{cell['label']}: length {_length(cell)}, {_quality(cell)}"


def _above(one: Cell, other: Cell, name: str, factor: float = 1.0, slack: float = 0.0) -> Holds:
    """Return whether metric `name` of `one` is more than `factor` times that of `other`, less `slack`."""
    error = "acceptance_length_se" if name == "mean_acceptance_length" else f"{name}_se"
    first, second = (Measured(cell[name], cell[error], cell["num_images"]) for cell in (one, other))
    return first.above(second, factor, slack)


def _longer(one: Cell, other: Cell, factor: float = 1.0) -> Holds:
    return _above(one, other, "mean_acceptance_length", factor)


def _as_good(one: Cell, other: Cell) -> Holds:
    """Return whether `one` is within the margins of `other` in `attributes` and `frechet_real`."""
    near = _above(other, one, "frechet_real", slack=DISTANCE_MARGIN * other["frechet_real"])
    return all_of((_above(one, other, "attributes", slack=ATTRIBUTE_MARGIN), near))


def _premise_cell(kinds: Kinds, name: str) -> Cell:
    return {"num_images": kinds["text"]["settings"]["num_images"], **kinds["text"]["premise"][name]}


def _part(label: str, cells: list[Cell], base: Cell) -> Finding:
    """Return whether all `cells` have a longer acceptance length than `base`."""
    numbers = f"{label}: {', '.join(map(_length, cells))} against {_length(base)}"
    return all_of(_longer(cell, base) for cell in cells), numbers


def _all_longer(keys: tuple[str, ...], base: str) -> Callable[[Kinds], Finding]:
    """Return a check that the rows `keys` accept more than the row `base`, for every kind of condition."""

    def check(kinds: Kinds) -> Finding:
        return combine(_part(kind, [_row(kinds, key, kind) for key in keys], _row(kinds, base, kind)) for kind in kinds)

    return check


def _flat(kinds: Kinds) -> Finding:
    """The target spreads its probability so thin that a strict test takes the first draft in at most one of ten
    steps (0.04 in Table 2)."""
    parts = []
    for kind in kinds:
        cell = _row(kinds, "1/eagle2_rejection", kind)
        strict, top1, top10 = (cell["record"][name] for name in ("strict_probability", "top1_guided", "top10_guided"))
        numbers = f"{kind}: {strict:.3f}, top-1 mass {top1:.3f}, top-10 {top10:.3f}"
        parts.append((enough(strict <= 0.1, cell["num_images"]), numbers))
    return combine(parts)


def _premise(kinds: Kinds) -> Finding:
    """Drawing every code anew from its 100 nearest leaves an image what it was (Figure 3), within 0.05 of the
    attributes and a tenth of the distance."""
    parts = []
    for source, before in (("real", kinds["text"]["bounds"]["reconstructed"]), ("plain", _row(kinds, "1/plain"))):
        after = _premise_cell(kinds, f"{source}/drawn/100")
        parts.append((_as_good(after, before), f"{source}: {_quality(before)} before and {_quality(after)} after"))
    return combine(parts)


def _near_beats_random(kinds: Kinds) -> Finding:
    """A code's 1,000th neighbour in latent space replaces it better than a code drawn at random (section 3.1)."""
    near, other = (_premise_cell(kinds, f"real/{metric}/1000") for metric in ("l2", "random"))
    holds = all_of((_above(near, other, "attributes"), _above(other, near, "frechet_real")))
    return holds, f"ℓ2: {_quality(near)}; random: {_quality(other)}"


def _coupling(kinds: Kinds) -> Finding:
    """Ours: at the zoo's guidance of 2, noise shared by drafter and target, without any relaxation, gains at
    least half of what LANTERN at δ = 0.4 gains over rejection sampling."""
    parts = []
    for kind in kinds:
        names = ("eagle2_rejection", "eagle2_coupled", "lantern_paper_0.4")
        cells = [_row(kinds, f"1/{name}", kind) for name in names]
        strict, coupled, relaxed = (cell["mean_acceptance_length"] for cell in cells)
        errors = [share * cell["acceptance_length_se"] for share, cell in zip((0.5, 1.0, 0.5), cells, strict=True)]
        num = min(cell["num_images"] for cell in cells)
        holds = decide(coupled - 0.5 * (strict + relaxed), math.hypot(*errors), num)
        parts.append((holds, f"{kind}: {strict:.2f} strict, {coupled:.2f} coupled, {relaxed:.2f} relaxed"))
    return combine(parts)


def reaches(
    guidance: dict[str, Any], scale: float, delta: str = "0.4", lossless: str = "eagle2_coupled"
) -> tuple[Holds, float, float]:
    """Return whether a lossless method accepts more than LANTERN's residual, and both acceptance lengths.

    The default is EAGLE-2 under shared noise.
    """
    exact, relaxed = (guidance[f"{scale:g}/{name}"] for name in (lossless, f"lantern_paper_{delta}"))
    return _longer(exact, relaxed), exact["mean_acceptance_length"], relaxed["mean_acceptance_length"]


def _sharing_reaches(kinds: Kinds) -> Finding:
    """Ours: shared noise without any relaxation accepts more than LANTERN's residual at δ = 0.4, at every guidance."""
    found = ((scale, reaches(kinds["text"]["guidance"], scale)) for scale in GUIDANCE)
    return combine((holds, f"{scale:g}: {own:.2f} against {other:.2f}") for scale, (holds, own, other) in found)


def _naive(kinds: Kinds) -> Finding:
    """Greedy, speculative decoding and Medusa accept less of an image than EAGLE-2 (Table 1: 1.40, 1.38 and 2.11)."""
    eagle, sd, medusa = (_row(kinds, f"0/{name}") for name in ("eagle2", "sd", "medusa"))
    numbers = f"{_length(sd)} and {_length(medusa)} against {_length(eagle)}"
    return all_of(_longer(eagle, cell) for cell in (sd, medusa)), numbers


def _grows(kinds: Kinds) -> Finding:
    """The acceptance length grows with δ at k = 1,000 and with k at δ = 0.4 (Figure 5)."""

    def cell(k: int, delta: float) -> Cell:
        name = f"lantern_coupled_{delta}" if (k, delta) in ((1000, 0.1), (1000, 0.4)) else f"sweep_{k}_{delta}"
        return _row(kinds, f"1/{name}")

    by_delta, by_k = [cell(1000, delta) for delta in DELTAS], [cell(k, 0.4) for k in KS]
    holds = all_of(_longer(b, a) for line in (by_delta, by_k) for a, b in pairwise(line))
    return holds, f"over δ: {', '.join(map(_length, by_delta))}; over k: {', '.join(map(_length, by_k))}"


def _delta_matters_more(kinds: Kinds) -> Finding:
    """From k = 100 and δ = 0.05, raising δ to 0.4 helps acceptance more than raising k to 1,000 (Table 2)."""
    row, share = _row(kinds, "1/eagle2_rejection"), kinds["text"]["settings"]["k"]
    base, wide, loose = (
        pick(row["record"], "probability", Setting("l2", "tvd", share[k], delta))
        for k, delta in (("100", 0.05), ("1000", 0.05), ("100", 0.4))
    )
    numbers = f"{base:.3f}; {wide:.3f} with the larger k, {loose:.3f} with the larger δ"
    return enough(loose > wide, row["num_images"]), numbers


def _moderate_keeps(kinds: Kinds) -> Finding:
    """A moderate δ (0.05 greedy, 0.1 sampled) costs little quality: at most 0.05 of the attributes and a
    distance that is larger by a tenth (Table 3)."""
    parts: list[Finding] = []
    for kind in kinds:
        for temperature, names in (("1", ("lantern_paper_0.1", "lantern_coupled_0.1")), ("0", ("lantern_0.05",))):
            plain, *cells = (_row(kinds, f"{temperature}/{name}", kind) for name in ("plain", *names))
            parts.append((True, f"{kind} T = {temperature}: {_quality(plain)} plain"))
            parts += [(_as_good(cell, plain), f"{cell['label']} {_quality(cell)}") for cell in cells]
    return combine(parts)


def _large_costs(kinds: Kinds) -> Finding:
    """A large δ costs quality: at 0.4 the distance to real images is larger than plain decoding's (Table 3)."""
    parts = []
    for kind in kinds:
        names = ("plain", "lantern_paper_0.4", "lantern_coupled_0.4")
        plain, *cells = (_row(kinds, f"1/{name}", kind) for name in names)
        distances = ", ".join(f"{cell['frechet_real']:.2f}" for cell in cells)
        holds = all_of(_above(cell, plain, "frechet_real") for cell in cells)
        parts.append((holds, f"{kind}: {distances} against {plain['frechet_real']:.2f}"))
    return combine(parts)


def _metrics_alike(kinds: Kinds) -> Finding:
    """ℓ2 and cosine neighbours do equally well (Table 4)."""
    one, other = (_row(kinds, f"1/metric_{name}") for name in ("l2", "cosine"))
    lengths = (_longer(a, b, 1.0 - LENGTH_MARGIN) for a, b in ((one, other), (other, one)))
    overlap = kinds["text"]["premise"]["overlap"]["l2_cosine"]
    alike = all_of((*lengths, _as_good(one, other), _as_good(other, one)))
    return alike, f"{_summary(one)}; {_summary(other)}; their tables share {100 * overlap:.1f} % of their entries"


def _random_accepts_less(kinds: Kinds) -> Finding:
    """Random neighbours accept less than ℓ2's at the same δ, and less than ℓ2's at a quarter of it (Table 4)."""
    drawn, near, careful = (_row(kinds, f"1/{name}") for name in ("metric_random", "metric_l2", "metric_l2_0.05"))
    return all_of((_longer(near, drawn), _longer(careful, drawn))), "; ".join(map(_summary, (drawn, near, careful)))


def _random_is_worse(kinds: Kinds) -> Finding:
    """At no more acceptance, random neighbours give no better images than ℓ2's (Table 4)."""
    drawn, careful = _row(kinds, "1/metric_random"), _row(kinds, "1/metric_l2_0.05")
    if _longer(drawn, careful):
        careful = _row(kinds, "1/metric_l2")
    holds = all_of((_longer(drawn, careful) is not True, _as_good(careful, drawn)))
    return holds, "; ".join(map(_summary, (drawn, careful)))


def _divergences(kinds: Kinds) -> Finding:
    """JSD at 0.2 accepts more than TVD at 0.2 and less than TVD at 0.4 (Table 4)."""
    cells = [_row(kinds, f"1/{name}") for name in ("metric_l2", "divergence_jsd", "lantern_paper_0.4")]
    labels = zip(("TVD 0.2", "JSD 0.2", "TVD 0.4"), cells, strict=True)
    holds = all_of(_longer(b, a) for a, b in pairwise(cells))
    return holds, "; ".join(f"{label}: {_length(cell)}" for label, cell in labels)


def _plus_accepts_more(kinds: Kinds) -> Finding:
    """LANTERN++'s bound, with k as published and with k scaled to the codebook, accepts more than the strict
    test of the same static tree, sampled and greedy (LANTERN++; text-conditional)."""
    parts = []
    for t, name in (("1", "static_rejection"), ("0", "static_exact")):
        cells = [_row(kinds, f"{t}/{plus}") for plus in ("lantern_pp", "lantern_pp_scaled")]
        parts.append(_part(f"T = {t}", cells, _row(kinds, f"{t}/{name}")))
    return combine(parts)


def _lossless_equal(kinds: Kinds) -> Finding:
    """Exact acceptance gives plain decoding's images, code by code, at every temperature and guidance."""
    cells = {
        f"{kind} {name} = {key}": cell
        for kind, data in kinds.items()
        for section, name in (("rows", "T"), ("guidance", "guidance"))
        for key, cell in data[section].items()
        if cell["acceptance"] == "exact" and not key.endswith("other_seed")
    }
    return all_equal(cells, "num_images", "rows")


CHECKS: tuple[Check, ...] = (
    _flat,
    _premise,
    _near_beats_random,
    claim(
        "Greedy, LANTERN accepts more than EAGLE-2, at δ = 0.05 and 0.2 (Table 3).",
        _all_longer(("0/lantern_0.05", "0/lantern_0.2"), "0/eagle2"),
    ),
    claim(
        "Sampling, LANTERN accepts more than EAGLE-2, with the paper's residual, at δ = 0.1 and 0.4 (Table 3).",
        _all_longer(("1/lantern_paper_0.1", "1/lantern_paper_0.4"), "1/eagle2_rejection"),
    ),
    claim(
        "EAGLE-2 accepts more of a greedy target than of a sampled one (1.60 against 1.20 in Table 3).",
        _all_longer(("0/eagle2",), "1/eagle2_rejection"),
    ),
    _naive,
    _coupling,
    _sharing_reaches,
    claim(
        "Ours: LANTERN accepts more than EAGLE-2 under coupled noise as well, at δ = 0.1 and 0.4.",
        _all_longer(("1/lantern_coupled_0.1", "1/lantern_coupled_0.4"), "1/eagle2_coupled"),
    ),
    claim(
        "Ours: rejection sampling of drafts that were drawn (static tree), which loses nothing, accepts more than"
        " LANTERN at δ = 0.1 of EAGLE-2's drafts, which are the drafter's likeliest.",
        _all_longer(("1/static_rejection",), "1/lantern_paper_0.1"),
    ),
    _grows,
    _delta_matters_more,
    _moderate_keeps,
    _large_costs,
    _metrics_alike,
    _random_accepts_less,
    _random_is_worse,
    _divergences,
    _plus_accepts_more,
    _lossless_equal,
)
check_claims = partial(check_all, CHECKS)
"""Check all claims on the `kinds` of results/lantern.json."""
