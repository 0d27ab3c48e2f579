"""The papers' claims, checked on the zoo's results as claims: each holds or does not, with the numbers that say so.

Nothing here is tuned until it fits; what does not hold is reported as not holding.
"""

from __future__ import annotations

from typing import Any

from benchmarks.scenarios import IN_DISTRIBUTION, OUT_OF_DISTRIBUTION

Cells = dict[str, Any]
SINGLE_CONTEXTS = ("sd_chain", "sd_chain_text", "sd_chain_pooled")
JUDGED = ("single", "two_images", "second_turn", "clip")
TIE = 0.005
"""Acceptance lengths closer than this are the same."""


def _lengths(methods: Cells, name: str) -> dict[str, float]:
    cells = methods[name]["scenarios"]
    return {key: cells[key]["mean_acceptance_length"] for key in (*IN_DISTRIBUTION, *OUT_OF_DISTRIBUTION)}


def _mean(methods: Cells, name: str, keys: tuple[str, ...] = JUDGED) -> float:
    lengths = _lengths(methods, name)
    return sum(lengths[key] for key in keys) / len(keys)


def _accuracy(methods: Cells, name: str) -> float:
    return float(methods[name]["scenarios"]["single"]["accuracy"])


def _claim(text: str, holds: bool, numbers: str) -> dict[str, Any]:
    return {"claim": text, "holds": holds, "numbers": numbers}


def check_claims(methods: Cells) -> list[dict[str, Any]]:
    """All claims whose methods were run."""
    checks = (_no_single_winner, _tabed_never_third, _sage_beats_static, _lvspec_longer, _lvspec_keeps, _random_loses,
              _pruning_keeps, _lossless_equal)  # fmt: skip
    found = []
    for check in checks:
        try:
            found.append(check(methods))
        except KeyError as missing:
            found.append(_claim(check.__doc__ or check.__name__, False, f"not run: {missing} is missing"))
    return found


def _no_single_winner(methods: Cells) -> dict[str, Any]:
    """No single context drafts best everywhere (TABED, Table 1)."""
    keys = (*IN_DISTRIBUTION, *OUT_OF_DISTRIBUTION)
    lengths = {name: _lengths(methods, name) for name in SINGLE_CONTEXTS}
    best = {key: max(lengths[name][key] for name in SINGLE_CONTEXTS) for key in keys}
    everywhere = [name for name in SINGLE_CONTEXTS if all(lengths[name][key] >= best[key] - TIE for key in keys)]
    numbers = f"best or level in all {len(keys)} scenarios: {', '.join(everywhere) or 'none'}"
    return _claim(str(_no_single_winner.__doc__), not everywhere, numbers)


def _tabed_never_third(methods: Cells) -> dict[str, Any]:
    """TABED is best or second best in every scenario (TABED, Table 1)."""
    ranks = {}
    for key in (*IN_DISTRIBUTION, *OUT_OF_DISTRIBUTION):
        own = _lengths(methods, "tabed_mt")[key]
        ranks[key] = 1 + sum(_lengths(methods, name)[key] > own + TIE for name in ("sd_chain", "sd_chain_text"))
    return _claim(str(_tabed_never_third.__doc__), max(ranks.values()) <= 2, f"rank among M, T and MT: {ranks}")


def _sage_beats_static(methods: Cells) -> dict[str, Any]:
    """SAGE accepts more per step than the static tree at an equal or smaller node budget (SAGE, Table 1)."""
    sage, static = _mean(methods, "sage"), _mean(methods, "specvlm")
    cells = [methods[name]["scenarios"]["single"]["drafted_per_step"] for name in ("sage", "specvlm")]
    numbers = f"{sage:.3f} with {cells[0]:.1f} nodes a step against {static:.3f} with {cells[1]:.1f}"
    return _claim(str(_sage_beats_static.__doc__), sage > static and cells[0] <= cells[1] + 0.5, numbers)


def _lvspec_longer(methods: Cells) -> dict[str, Any]:
    """LVSpec accepts at least 1.5 times as much as strict matching of the same pruned chain of 10 (LVSpec, Table 1)."""
    relaxed, strict = _mean(methods, "lvspec"), _mean(methods, "sd_chain_pruned")
    return _claim(
        str(_lvspec_longer.__doc__), relaxed >= 1.5 * strict, f"{relaxed:.3f} / {strict:.3f} = {relaxed / strict:.2f}"
    )


def _lvspec_keeps(methods: Cells) -> dict[str, Any]:
    """LVSpec keeps at least 98 % of the attribute accuracy (LVSpec, Table 1)."""
    kept = _accuracy(methods, "lvspec") / _accuracy(methods, "plain")
    alone = _accuracy(methods, "drafter_alone")
    return _claim(str(_lvspec_keeps.__doc__), kept >= 0.98, f"retention {kept:.3f}; the drafter alone has {alone:.3f}")


def _random_loses(methods: Cells) -> dict[str, Any]:
    """Random relaxation of as much acceptance loses accuracy where LVSpec does not (LVSpec, Figure 4)."""
    relaxed, control = (methods[name]["scenarios"]["single"] for name in ("lvspec", "random"))
    numbers = (
        f"accuracy {relaxed['accuracy']:.3f} at length {relaxed['mean_acceptance_length']:.2f} against "
        f"{control['accuracy']:.3f} at {control['mean_acceptance_length']:.2f}"
    )
    near = (
        abs(relaxed["mean_acceptance_length"] - control["mean_acceptance_length"])
        <= 0.15 * relaxed["mean_acceptance_length"]
    )
    holds = near and control["accuracy"] < relaxed["accuracy"]
    return _claim(str(_random_loses.__doc__), holds, numbers + ("" if near else "; the lengths are not equal"))


def _pruning_keeps(methods: Cells) -> dict[str, Any]:
    """Pruning 90 % of the drafter's visual columns keeps its acceptance (SpecVLM; within 5 %)."""
    pruned, whole = _mean(methods, "specvlm"), _mean(methods, "sd_tree")
    return _claim(str(_pruning_keeps.__doc__), pruned >= 0.95 * whole, f"{pruned:.3f} against {whole:.3f}")


def _lossless_equal(methods: Cells) -> dict[str, Any]:
    """Every lossless method with exact acceptance gives plain decoding's tokens."""
    unequal = [
        f"{name}/{key}"
        for name, result in methods.items()
        if result["verify_mode"] == "lossless" and result["acceptance"] == "exact"
        for key, cell in result["scenarios"].items()
        if cell["equal_share"] < 1.0
    ]
    return _claim(str(_lossless_equal.__doc__), not unequal, ", ".join(unequal) or "all equal")
