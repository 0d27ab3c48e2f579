"""LANTERN's claims, checked on the zoo's image models: each holds, does not, or is not decided, with the numbers.

Nothing here is tuned until it fits. What decides a claim is the rule of `benchmarks.deciding`; images are as good as
others within a margin.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from benchmarks.deciding import Holds, all_of, claim, decide, enough
from benchmarks.lantern_recorder import Setting, pick
from benchmarks.lantern_rows import DELTAS, GUIDANCE, KS

Kinds = dict[str, Any]
ATTRIBUTE_MARGIN = 0.05
"""Images are as good as others with at most so much less of the attributes right,"""
DISTANCE_MARGIN = 0.1
"""and a distance to real images that is larger by at most this share."""
LENGTH_MARGIN = 0.05
"""Acceptance lengths are the same if neither is shorter by more than this share."""


def check_claims(kinds: Kinds) -> list[dict[str, Any]]:
    """All claims; one that was not run says so and is not decided."""
    found = []
    for check in CHECKS:
        try:
            holds, numbers = check(kinds)
        except KeyError as missing:
            holds, numbers = None, f"not run: {missing} is missing"
        found.append(claim(check.__doc__ or check.__name__, holds, numbers))
    return found


def _row(kinds: Kinds, name: str, temperature: str = "1", kind: str = "text") -> dict[str, Any]:
    cell: dict[str, Any] = kinds[kind]["rows"][f"{temperature}/{name}"]
    return cell


def _length(cell: dict[str, Any]) -> str:
    return f"{cell['mean_acceptance_length']:.2f}"


def _above(one: dict[str, Any], other: dict[str, Any], name: str, factor: float = 1.0, slack: float = 0.0) -> Holds:
    """Whether `one` has more of `name` than `factor` times `other`, less `slack`."""
    error = "acceptance_length_se" if name == "mean_acceptance_length" else f"{name}_se"
    gap = one[name] - factor * other[name] + slack
    return decide(gap, math.hypot(one[error], factor * other[error]), min(one["num_images"], other["num_images"]))


def _longer(one: dict[str, Any], other: dict[str, Any]) -> Holds:
    return _above(one, other, "mean_acceptance_length")


def _same_length(one: dict[str, Any], other: dict[str, Any]) -> Holds:
    pairs = ((one, other), (other, one))
    return all_of(_above(a, b, "mean_acceptance_length", 1.0 - LENGTH_MARGIN) for a, b in pairs)


def _as_good(one: dict[str, Any], other: dict[str, Any]) -> Holds:
    """As many attributes right and as small a distance to real images, within the margins."""
    near = _above(other, one, "frechet_real", slack=DISTANCE_MARGIN * other["frechet_real"])
    return all_of((_above(one, other, "attributes", slack=ATTRIBUTE_MARGIN), near))


def _premise_cell(kinds: Kinds, name: str) -> dict[str, Any]:
    """One cell of the premise, which holds as many images as a row."""
    return {"num_images": kinds["text"]["settings"]["num_images"], **kinds["text"]["premise"][name]}


def _quality(cell: dict[str, Any]) -> str:
    return f"attributes {cell['attributes']:.3f}, distance {cell['frechet_real']:.2f}"


def _flat(kinds: Kinds) -> tuple[Holds, str]:
    """The target spreads its probability so thin that a strict test takes the first draft in at most one of ten steps
    (0.04 in Table 2)."""
    told = {kind: _row(kinds, "eagle2_rejection", kind=kind)["record"] for kind in kinds}
    numbers = "; ".join(
        f"{kind}: {r['strict_probability']:.3f}, top-1 mass {r['top1_guided']:.3f}, top-10 {r['top10_guided']:.3f}"
        for kind, r in told.items()
    )
    num = min(_row(kinds, "eagle2_rejection", kind=kind)["num_images"] for kind in kinds)
    return enough(all(record["strict_probability"] <= 0.1 for record in told.values()), num), numbers


def _premise(kinds: Kinds) -> tuple[Holds, str]:
    """Drawing every code anew from its 100 nearest leaves an image what it was (Figure 3), within 0.05 of the
    attributes and a tenth of the distance."""
    before = {"real": kinds["text"]["bounds"]["reconstructed"], "plain": _row(kinds, "plain")}
    after = {source: _premise_cell(kinds, f"{source}/drawn/100") for source in before}
    numbers = "; ".join(
        f"{source}: {_quality(before[source])} before and {_quality(after[source])} after" for source in before
    )
    return all_of(_as_good(after[source], before[source]) for source in before), numbers


def _near_beats_random(kinds: Kinds) -> tuple[Holds, str]:
    """A code's 1,000th neighbour in latent space stands for it better than a code drawn at random (section 3.1)."""
    near, other = (_premise_cell(kinds, f"real/{metric}/1000") for metric in ("l2", "random"))
    holds = all_of((_above(near, other, "attributes"), _above(other, near, "frechet_real")))
    return holds, f"ℓ2: {_quality(near)}; random: {_quality(other)}"


def _more_than_eagle(kinds: Kinds) -> tuple[Holds, str]:
    """Sampling, LANTERN accepts more than EAGLE-2, with the paper's residual, at δ = 0.1 and 0.4 (Table 3)."""
    verdicts: list[Holds] = []
    told = []
    for kind in kinds:
        strict = _row(kinds, "eagle2_rejection", kind=kind)
        relaxed = [_row(kinds, f"lantern_paper_{delta}", kind=kind) for delta in (0.1, 0.4)]
        verdicts += [_longer(cell, strict) for cell in relaxed]
        told.append(f"{kind}: {', '.join(map(_length, relaxed))} against {_length(strict)}")
    return all_of(verdicts), "; ".join(told)


def _more_than_eagle_greedy(kinds: Kinds) -> tuple[Holds, str]:
    """Greedy, LANTERN accepts more than EAGLE-2, at δ = 0.05 and 0.2 (Table 3)."""
    verdicts: list[Holds] = []
    told = []
    for kind in kinds:
        strict = _row(kinds, "eagle2", "0", kind)
        relaxed = [_row(kinds, f"lantern_{delta}", "0", kind) for delta in (0.05, 0.2)]
        verdicts += [_longer(cell, strict) for cell in relaxed]
        told.append(f"{kind}: {', '.join(map(_length, relaxed))} against {_length(strict)}")
    return all_of(verdicts), "; ".join(told)


def _greedy_accepts_more(kinds: Kinds) -> tuple[Holds, str]:
    """EAGLE-2 accepts more of a greedy target than of a sampled one (1.60 against 1.20 in Table 3)."""
    pairs = {kind: (_row(kinds, "eagle2", "0", kind), _row(kinds, "eagle2_rejection", kind=kind)) for kind in kinds}
    numbers = "; ".join(f"{kind}: {_length(cold)} against {_length(warm)}" for kind, (cold, warm) in pairs.items())
    return all_of(_longer(cold, warm) for cold, warm in pairs.values()), numbers


def _coupling(kinds: Kinds) -> tuple[Holds, str]:
    """Ours: at the zoo's guidance of 2, noise shared by drafter and target, without any relaxation, gains at least half
    of what LANTERN at δ = 0.4 gains over rejection sampling."""
    verdicts: list[Holds] = []
    told = []
    for kind in kinds:
        cells = [_row(kinds, name, kind=kind) for name in ("eagle2_rejection", "eagle2_coupled", "lantern_paper_0.4")]
        strict, coupled, relaxed = (cell["mean_acceptance_length"] for cell in cells)
        errors = [share * cell["acceptance_length_se"] for share, cell in zip((0.5, 1.0, 0.5), cells, strict=True)]
        num = min(cell["num_images"] for cell in cells)
        verdicts.append(decide(coupled - 0.5 * (strict + relaxed), math.hypot(*errors), num))
        told.append(f"{kind}: {strict:.2f} strict, {coupled:.2f} coupled, {relaxed:.2f} relaxed")
    return all_of(verdicts), "; ".join(told)


def reaches(guidance: dict[str, Any], scale: float, delta: str = "0.4") -> tuple[Holds, float, float]:
    """Whether EAGLE-2 under shared noise, which loses nothing, accepts more than LANTERN's residual; both lengths."""
    coupled, relaxed = (guidance[f"{scale:g}/{name}"] for name in ("eagle2_coupled", f"lantern_paper_{delta}"))
    return _longer(coupled, relaxed), coupled["mean_acceptance_length"], relaxed["mean_acceptance_length"]


def _sharing_reaches(kinds: Kinds) -> tuple[Holds, str]:
    """Ours: shared noise without any relaxation accepts more than LANTERN's residual at δ = 0.4, at every guidance."""
    verdicts: list[Holds] = []
    told = []
    for scale in GUIDANCE:
        holds, coupled, relaxed = reaches(kinds["text"]["guidance"], scale)
        verdicts.append(holds)
        told.append(f"{scale:g}: {coupled:.2f} against {relaxed:.2f}")
    return all_of(verdicts), "; ".join(told)


def _naive(kinds: Kinds) -> tuple[Holds, str]:
    """Greedy, speculative decoding and Medusa accept less of an image than EAGLE-2 (Table 1: 1.40, 1.38 and 2.11)."""
    eagle, *rest = (_row(kinds, name, "0") for name in ("eagle2", "sd", "medusa"))
    return all_of(_longer(eagle, cell) for cell in rest), (
        f"{_length(rest[0])} and {_length(rest[1])} against {_length(eagle)}"
    )


def _coupled_relaxed(kinds: Kinds) -> tuple[Holds, str]:
    """Ours: LANTERN accepts more than EAGLE-2 under coupled noise as well, at δ = 0.1 and 0.4."""
    verdicts: list[Holds] = []
    told = []
    for kind in kinds:
        strict = _row(kinds, "eagle2_coupled", kind=kind)
        relaxed = [_row(kinds, f"lantern_coupled_{delta}", kind=kind) for delta in (0.1, 0.4)]
        verdicts += [_longer(cell, strict) for cell in relaxed]
        told.append(f"{kind}: {', '.join(map(_length, relaxed))} against {_length(strict)}")
    return all_of(verdicts), "; ".join(told)


def _drawn(kinds: Kinds) -> tuple[Holds, str]:
    """Ours: rejection sampling of drafts that were drawn (static tree), which loses nothing, accepts more than LANTERN
    at δ = 0.1 of EAGLE-2's drafts, which are the drafter's likeliest."""
    verdicts: list[Holds] = []
    told = []
    for kind in kinds:
        drawn, relaxed = (_row(kinds, name, kind=kind) for name in ("static_rejection", "lantern_paper_0.1"))
        verdicts.append(_longer(drawn, relaxed))
        told.append(f"{kind}: {_length(drawn)} against {_length(relaxed)}")
    return all_of(verdicts), "; ".join(told)


def _grows(kinds: Kinds) -> tuple[Holds, str]:
    """The acceptance length grows with δ at k = 1,000 and with k at δ = 0.4 (Figure 5)."""
    by_delta = [_row(kinds, _point(1000, delta)) for delta in DELTAS]
    by_k = [_row(kinds, _point(k, 0.4)) for k in KS]
    holds = all_of(_longer(b, a) for line in (by_delta, by_k) for a, b in pairwise(line))
    return holds, f"over δ: {', '.join(map(_length, by_delta))}; over k: {', '.join(map(_length, by_k))}"


def _point(k: int, delta: float) -> str:
    return f"lantern_coupled_{delta}" if (k, delta) in ((1000, 0.1), (1000, 0.4)) else f"sweep_{k}_{delta}"


def _delta_matters_more(kinds: Kinds) -> tuple[Holds, str]:
    """From k = 100 and δ = 0.05, raising δ to 0.4 helps acceptance more than raising k to 1,000 (Table 2)."""
    row = _row(kinds, "eagle2_rejection")
    record = row["record"]
    share = kinds["text"]["settings"]["k"]
    base, wide, loose = (
        pick(record, "probability", Setting("l2", "tvd", share[k], delta))
        for k, delta in (("100", 0.05), ("1000", 0.05), ("100", 0.4))
    )
    return enough(
        loose > wide, row["num_images"]
    ), f"{base:.3f}; {wide:.3f} with the larger k, {loose:.3f} with the larger δ"


def _moderate_keeps(kinds: Kinds) -> tuple[Holds, str]:
    """A moderate δ (0.05 greedy, 0.1 sampled) costs little quality: at most 0.05 of the attributes and a distance that
    is larger by a tenth (Table 3)."""
    verdicts: list[Holds] = []
    told = []
    for kind in kinds:
        for temperature, names in (("1", ("lantern_paper_0.1", "lantern_coupled_0.1")), ("0", ("lantern_0.05",))):
            plain = _row(kinds, "plain", temperature, kind)
            told.append(f"{kind} T = {temperature}: {_quality(plain)} plain")
            for name in names:
                cell = _row(kinds, name, temperature, kind)
                verdicts.append(_as_good(cell, plain))
                told.append(f"{cell['label']} {_quality(cell)}")
    return all_of(verdicts), "; ".join(told)


def _large_costs(kinds: Kinds) -> tuple[Holds, str]:
    """A large δ costs quality: at 0.4 the distance to real images is larger than plain decoding's (Table 3)."""
    verdicts: list[Holds] = []
    told = []
    for kind in kinds:
        plain = _row(kinds, "plain", kind=kind)
        cells = [_row(kinds, f"lantern_{draw}_0.4", kind=kind) for draw in ("paper", "coupled")]
        verdicts += [_above(cell, plain, "frechet_real") for cell in cells]
        told.append(f"{kind}: " + ", ".join(f"{c['frechet_real']:.2f}" for c in cells))
        told[-1] += f" against {plain['frechet_real']:.2f}"
    return all_of(verdicts), "; ".join(told)


def _metrics_alike(kinds: Kinds) -> tuple[Holds, str]:
    """ℓ2 and cosine neighbours do equally well (Table 4)."""
    one, other = _row(kinds, "metric_l2"), _row(kinds, "metric_cosine")
    alike = all_of((_same_length(one, other), _as_good(one, other), _as_good(other, one)))
    overlap = kinds["text"]["premise"]["overlap"]["l2_cosine"]
    return alike, f"{_told(one)}; {_told(other)}; their tables share {100 * overlap:.1f} % of their entries"


def _told(cell: dict[str, Any]) -> str:
    return f"{cell['label']}: length {_length(cell)}, {_quality(cell)}"


def _random_accepts_less(kinds: Kinds) -> tuple[Holds, str]:
    """Random neighbours accept less than ℓ2's at the same δ, and less than ℓ2's at a quarter of it (Table 4)."""
    drawn, near, careful = (_row(kinds, name) for name in ("metric_random", "metric_l2", "metric_l2_0.05"))
    return all_of((_longer(near, drawn), _longer(careful, drawn))), "; ".join(map(_told, (drawn, near, careful)))


def _random_is_worse(kinds: Kinds) -> tuple[Holds, str]:
    """At no more acceptance, random neighbours give no better images than ℓ2's (Table 4)."""
    drawn, careful = _row(kinds, "metric_random"), _row(kinds, "metric_l2_0.05")
    if _longer(drawn, careful):
        careful = _row(kinds, "metric_l2")
    holds = all_of((_longer(drawn, careful) is not True, _as_good(careful, drawn)))
    return holds, "; ".join(map(_told, (drawn, careful)))


def _divergences(kinds: Kinds) -> tuple[Holds, str]:
    """JSD at 0.2 accepts more than TVD at 0.2 and less than TVD at 0.4 (Table 4)."""
    cells = [_row(kinds, name) for name in ("metric_l2", "divergence_jsd", "lantern_paper_0.4")]
    low, middle, high = (cell["mean_acceptance_length"] for cell in cells)
    return all_of(
        _longer(b, a) for a, b in pairwise(cells)
    ), f"TVD 0.2: {low:.2f}; JSD 0.2: {middle:.2f}; TVD 0.4: {high:.2f}"


def _plus_accepts_more(kinds: Kinds) -> tuple[Holds, str]:
    """LANTERN++'s bound, with k as published and with k scaled to the codebook, accepts more than the strict test of
    the same static tree, sampled and greedy (LANTERN++; text-conditional)."""
    verdicts: list[Holds] = []
    told = []
    for temperature, strict_name in (("1", "static_rejection"), ("0", "static_exact")):
        names = (strict_name, "lantern_pp", "lantern_pp_scaled")
        strict, *cells = (_row(kinds, name, temperature) for name in names)
        verdicts += [_longer(cell, strict) for cell in cells]
        told.append(f"T = {temperature}: {', '.join(map(_length, cells))} against {_length(strict)}")
    return all_of(verdicts), "; ".join(told)


def _lossless_equal(kinds: Kinds) -> tuple[Holds, str]:
    """Exact acceptance gives plain decoding's images, code by code, at every temperature and guidance."""
    cells = {
        f"{kind} {name} = {key}": cell
        for kind, data in kinds.items()
        for section, name in (("rows", "T"), ("guidance", "guidance"))
        for key, cell in data[section].items()
        if cell["acceptance"] == "exact" and not key.endswith("other_seed")
    }
    unequal = [name for name, cell in cells.items() if cell["equal_share"] < 1.0]
    num = min((cell["num_images"] for cell in cells.values()), default=0)
    return enough(not unequal, num), ", ".join(unequal) or f"all equal in {len(cells)} rows"


CHECKS: tuple[Callable[[Kinds], tuple[Holds, str]], ...] = (
    _flat,
    _premise,
    _near_beats_random,
    _more_than_eagle_greedy,
    _more_than_eagle,
    _greedy_accepts_more,
    _naive,
    _coupling,
    _sharing_reaches,
    _coupled_relaxed,
    _drawn,
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
