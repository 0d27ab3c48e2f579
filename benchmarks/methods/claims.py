"""Checks the papers' claims on the zoo's results by the rule of `benchmarks.harness.claims`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.harness.claims import (
    TIE,
    Check,
    Finding,
    Holds,
    Measured,
    all_equal,
    all_of,
    check_all,
    claim,
    combine,
    never_third,
    steps_error,
)
from benchmarks.methods.scenarios import IN_DISTRIBUTION, OUT_OF_DISTRIBUTION, VIDEO

Results = dict[str, Any]
Keys = tuple[str, ...]
SCENARIOS = (*IN_DISTRIBUTION, *OUT_OF_DISTRIBUTION)
TURNS = {"first turn": ("single", "two_images", "clip"), "second turn": ("second_turn",), "OOD": OUT_OF_DISTRIBUTION}
"""Scenarios of the columns of TABED's Table 3."""
SINGLES = {"M": "sd_chain", "T": "sd_chain_text", "C": "sd_chain_caption", "P": "sd_chain_pooled"}


def length_error(cell: Results) -> float:
    """Return the standard error of an acceptance length over samples, or over steps for results without it."""
    error = cell.get("acceptance_length_se")
    return steps_error(cell["acceptance_histogram"]) if error is None else float(error)


def mean_length(methods: Results, name: str, keys: Keys = IN_DISTRIBUTION) -> Measured:
    """Return the mean acceptance length of a method over scenarios of equal weight."""
    cells = [methods[name]["scenarios"][key] for key in keys]
    error = math.sqrt(sum(length_error(cell) ** 2 for cell in cells)) / len(cells)
    value = sum(cell["mean_acceptance_length"] for cell in cells) / len(cells)
    return Measured(value, error, min(cell["num_cases"] for cell in cells))


def _nodes(methods: Results, name: str, key: str = "single") -> float:
    return float(methods[name]["scenarios"][key]["drafted_per_step"])


def _quality(methods: Results, name: str, what: str, key: str = "single") -> Measured:
    cell = methods[name]["scenarios"][key]
    return Measured(cell[what], cell[f"{what}_se"], cell["num_cases"])


def _no_single_winner(results: Results) -> Finding:
    """No single context drafts best everywhere (TABED, Table 1)."""
    names = ("sd_chain", "sd_chain_text", "sd_chain_pooled")
    lengths = {(name, key): mean_length(results["methods"], name, (key,)) for name in names for key in SCENARIOS}

    def loses(name: str) -> Holds:
        """Return whether another context accepts more in some scenario."""
        pairs = [(lengths[name, key], lengths[o, key]) for o in names if o != name for key in SCENARIOS]
        if any(other.above(own) for own, other in pairs):
            return True
        return False if all(own.above(other, slack=TIE) for own, other in pairs) else None

    best = {key: max(lengths[name, key].value for name in names) for key in SCENARIOS}
    everywhere = [name for name in names if all(lengths[name, key].value >= best[key] - TIE for key in SCENARIOS)]
    numbers = f"best or level in all {len(SCENARIOS)} scenarios: {', '.join(everywhere) or 'none'}"
    return all_of(map(loses, names)), numbers


def _tabed_never_third(results: Results) -> Finding:
    """TABED is best or second best in every scenario (TABED, Table 1)."""
    names = ("sd_chain", "sd_chain_text", "tabed_mt")
    each = {key: [mean_length(results["methods"], name, (key,)) for name in names] for key in SCENARIOS}
    return combine((never_third(lengths, key) for key, lengths in each.items()), "M / T / MT: ")


def _tabed_trees(results: Results) -> Finding:
    """TABED on token trees of width 2 and 3 is best or second best, on benchmarks and out of distribution
    (TABED, Table 2)."""
    parts = []
    for width, last in ((2, "tree"), (3, "tree3")):
        names = (f"tabed_m_{last}", f"tabed_t_{last}", f"tabed_mt_{last}")
        for group, keys in (("benchmarks", IN_DISTRIBUTION), ("OOD", OUT_OF_DISTRIBUTION)):
            lengths = [mean_length(results["methods"], name, keys) for name in names]
            parts.append(never_third(lengths, f"d = {width}, {group}:"))
    return combine(parts, "M / T / MT: ")


def _beats(name: str, others: str) -> Callable[[Results], Finding]:
    """Return a check that a method accepts more than single contexts in both turns and out of distribution."""

    def check(results: Results) -> Finding:
        parts = []
        for turn, keys in TURNS.items():
            one = mean_length(results["methods"], name, keys)
            rest = {letter: mean_length(results["methods"], SINGLES[letter], keys) for letter in others}
            shown = ", ".join(f"{letter} {length.value:.2f}" for letter, length in rest.items())
            parts.append((all_of(map(one.above, rest.values())), f"{turn}: {one.value:.2f} against {shown}"))
        return combine(parts)

    return check


def _beats_static(methods: Results, names: tuple[str, str], keys: Keys = IN_DISTRIBUTION) -> Finding:
    own, static = (mean_length(methods, name, keys) for name in names)
    nodes = [_nodes(methods, name, keys[0]) for name in names]
    numbers = f"{own.value:.2f} with {nodes[0]:.1f} nodes a step against {static.value:.2f} with {nodes[1]:.1f}"
    return all_of((own.above(static), nodes[0] <= nodes[1] + 0.5)), numbers


def _sage_readings(results: Results) -> Finding:
    """Ours: of the two readings the prose accepts more, and takes more nodes for it."""
    names = ("sage_expansion", "sage")
    prose, definition = (mean_length(results["methods"], name) for name in names)
    nodes = [_nodes(results["methods"], name) for name in names]
    numbers = f"{prose.value:.2f} with {nodes[0]:.1f} nodes against {definition.value:.2f} with {nodes[1]:.1f}"
    return all_of((prose.above(definition), nodes[0] > nodes[1])), numbers


def _ratio(methods: Results, names: tuple[str, str], keys: Keys = IN_DISTRIBUTION) -> Finding:
    relaxed, strict = (mean_length(methods, name, keys) for name in names)
    numbers = f"{relaxed.value:.2f} / {strict.value:.2f} = {relaxed.value / strict.value:.2f}"
    return relaxed.above(strict, 1.5), numbers


def _beats_quality(methods: Results, other: str, factor: float, numbers: str) -> Finding:
    """Return whether LVSpec's accuracy and F1 of attribute words are above `factor` times those of another method."""
    parts = []
    for what, label in (("accuracy", "parsed"), ("attribute_f1", "F1")):
        own, rival = (_quality(methods, name, what) for name in ("lvspec", other))
        shown = numbers.format(label=label, own=own.value, other=rival.value, ratio=own.value / rival.value)
        parts.append((own.above(rival, factor), shown))
    return combine(parts, between=", ")


def _lvspec_keeps(results: Results) -> Finding:
    """LVSpec keeps at least 98 % of the quality, parsed and by F1 of attribute words (LVSpec, Table 1)."""
    return _beats_quality(results["methods"], "plain", 0.98, "retention {ratio:.3f} {label}")


def _lvspec_beats_its_drafter(results: Results) -> Finding:
    """LVSpec's captions are better than those its pruned drafter writes alone, parsed and by F1 of attribute words."""
    methods = results["methods"]
    holds, numbers = _beats_quality(methods, "pruned_drafter_alone", 1.0, "{label} {own:.3f} against {other:.3f}")
    whole = _quality(methods, "drafter_alone", "accuracy")
    return holds, f"{numbers}; the drafter that sees everything: parsed {whole.value:.3f}"


def _lvspec_keeps_videos(results: Results) -> Finding:
    """LVSpec keeps at least 98 % of the attributes on videos, and more than its pruned drafter alone."""
    parts = []
    for key in VIDEO:
        names = ("video_lvspec", "video_plain", "video_pruned_drafter_alone")
        own, plain, alone = (_quality(results["video"]["methods"], name, "accuracy", key) for name in names)
        numbers = f"{key}: {own.value:.3f}; plain {plain.value:.3f}, pruned drafter {alone.value:.3f}"
        parts.append((all_of((own.above(plain, 0.98), own.above(alone))), numbers))
    return combine(parts)


def _random_loses(results: Results) -> Finding:
    """Random relaxation of as much acceptance loses accuracy where LVSpec does not (LVSpec, Figure 4)."""
    names = ("lvspec", "random")
    relaxed, control = (_quality(results["methods"], name, "accuracy") for name in names)
    lengths = [mean_length(results["methods"], name, ("single",)).value for name in names]
    numbers = f"accuracy {relaxed.value:.3f} at length {lengths[0]:.2f} against {control.value:.3f} at {lengths[1]:.2f}"
    if abs(lengths[0] - lengths[1]) > 0.15 * lengths[0]:
        return None, f"{numbers}; the lengths are not equal"
    return relaxed.above(control), numbers


def _pruning_keeps(results: Results) -> Finding:
    """Pruning 90 % of the drafter's visual columns keeps its acceptance (SpecVLM; within 5 %)."""
    pruned, whole = (mean_length(results["methods"], name) for name in ("specvlm", "sd_tree"))
    return pruned.above(whole, 0.95), f"{pruned.value:.2f} against {whole.value:.2f}"


def _guided_beats_uniform(results: Results) -> Finding:
    """Pruning guided by the target's attention accepts more than uniform pruning (SpecVLM)."""
    methods, kept = results["methods"], results["pruning"]
    names = ("specvlm", "specvlm_uniform")
    cells = {key: tuple(mean_length(methods, name, (key,)).value for name in names) for key in SCENARIOS}
    lost = [key for key, (guided, uniform) in cells.items() if guided < uniform - TIE]
    shown = ", ".join(f"{key} {cells[key][0]:.2f} / {cells[key][1]:.2f}" for key in lost)
    seen = [sum(kept[name].values()) / len(kept[name]) for name in names]
    guided, uniform = (mean_length(methods, name) for name in names)
    return guided.above(uniform), (
        f"{guided.value:.2f} against {uniform.value:.2f} on the mean; loses in {len(lost)} of {len(cells)} scenarios: "
        f"{shown}. The reason: attention falls on neighbouring columns, so that those kept show fewer parts of the "
        f"pictures, {seen[0]:.2f} of their cells against {seen[1]:.2f}"
    )


def _lossless_equal(results: Results) -> Finding:
    """Every lossless method with exact acceptance gives plain decoding's tokens, videos included."""
    cells = {
        f"{name}/{key}": cell
        for group in (results["methods"], results["video"]["methods"])
        for name, result in group.items()
        if result["verify_mode"] == "lossless" and result["acceptance"] == "exact"
        for key, cell in result["scenarios"].items()
    }
    return all_equal(cells, "num_cases", "cells of {} samples or more")


CHECKS: tuple[Check, ...] = (
    _no_single_winner,
    _tabed_never_third,
    _tabed_trees,
    claim(
        "TABED with all four contexts (MTCP) accepts more than each of them in both turns and out of distribution"
        " (TABED, Table 3).",
        _beats("tabed_mtcp", "MTCP"),
    ),
    claim(
        "Of the four contexts alone, the caption (C) accepts most (TABED, Table 3).",
        _beats("sd_chain_caption", "MTP"),
    ),
    claim(
        "SAGE accepts more per step than the static tree at an equal or smaller node budget (SAGE, Table 1), read"
        " as its definition has it: the threshold decides which nodes are in the tree.",
        lambda results: _beats_static(results["methods"], ("sage", "specvlm")),
    ),
    claim(
        "The same, read as section 3.2's prose has it: the threshold decides which nodes get children.",
        lambda results: _beats_static(results["methods"], ("sage_expansion", "specvlm")),
    ),
    _sage_readings,
    claim(
        "SAGE accepts more per step than the static tree on videos (SAGE, Table 1).",
        lambda results: _beats_static(results["video"]["methods"], ("video_sage", "video_specvlm"), VIDEO),
    ),
    claim(
        "LVSpec accepts at least 1.5 times as much as strict matching of the same pruned chain of 10 (LVSpec, "
        "Table 1).",
        lambda results: _ratio(results["methods"], ("lvspec", "sd_chain_pruned")),
    ),
    claim(
        "The same on videos.",
        lambda results: _ratio(results["video"]["methods"], ("video_lvspec", "video_sd_pruned"), VIDEO),
    ),
    _lvspec_keeps,
    _lvspec_beats_its_drafter,
    _lvspec_keeps_videos,
    _random_loses,
    _pruning_keeps,
    _guided_beats_uniform,
    _lossless_equal,
)
check_claims = partial(check_all, CHECKS)
"""Check all claims on the contents of results/methods.json."""
