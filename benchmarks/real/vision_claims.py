"""Checks the papers' claims on the vision pair by the rule of `benchmarks.harness.claims`, on images or clips."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from benchmarks.harness.claims import (
    SURE,
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
)
from benchmarks.harness.markdown import Results

STRONG, WEAK = "strong", "weak"


def cell_of(results: Results, name: str) -> dict[str, Any]:
    """Return the figures of a setting in the only scenario of its file."""
    cell: dict[str, Any] = results["methods"][name]["scenarios"][results["scenario"]]
    return cell


def measured(results: Results, name: str, what: str = "mean_acceptance_length") -> Measured:
    """Return a figure of a setting with its standard error over scenes."""
    cell = cell_of(results, name)
    error = cell["acceptance_length_se" if what == "mean_acceptance_length" else f"{what}_se"]
    return Measured(cell[what], error, cell["num_cases"])


def num_to_decide(own: Measured, other: Measured, factor: float = 1.0) -> str:
    """Return the number of scenes with which the present gap would exceed `SURE` standard errors, as text."""
    gap = abs(own.value - factor * other.value)
    error = math.hypot(own.error, factor * other.error)
    if gap == 0:
        return "no number of scenes decides equal figures"
    return f"about {math.ceil(min(own.num, other.num) * (SURE * error / gap) ** 2):,} scenes would decide"


def compare(results: Results, one: str, other: str, factor: float = 1.0) -> Finding:
    """Return whether the acceptance length of a setting is above `factor` times that of another one."""
    own, rival = measured(results, one), measured(results, other)
    holds = own.above(rival, factor)
    shown = f"{own.value:.2f} against {rival.value:.2f}"
    if factor != 1.0:
        shown += f", {own.value / rival.value:.2f} times as much"
    return holds, shown if holds is not None else f"{shown}; {num_to_decide(own, rival, factor)}"


def drafters(results: Results, *names: str) -> list[str]:
    """Return the drafters with which all these methods are measured; the strong one if there is none."""
    found = [one for one in (STRONG, WEAK) if all(f"{name}/{one}" in results["methods"] for name in names)]
    return found or [STRONG]


def by_drafter(results: Results, one: str, other: str, factor: float = 1.0) -> Finding:
    """Return whether `compare` holds with every drafter that is measured."""
    parts = []
    for drafter in drafters(results, one, other):
        holds, shown = compare(results, f"{one}/{drafter}", f"{other}/{drafter}", factor)
        parts.append((holds, f"{drafter} drafter: {shown}"))
    return combine(parts)


def _tabed_chains(results: Results) -> Finding:
    """TABED is best or second best (TABED, Table 1)."""
    names = ("sd_chain", "sd_chain_text", "tabed_mt")
    each = {one: [measured(results, f"{name}/{one}") for name in names] for one in drafters(results, *names)}
    return combine((never_third(lengths, f"{one} drafter:") for one, lengths in each.items()), "M / T / MT: ")


def _tabed_trees(results: Results) -> Finding:
    """TABED on token trees of width 2 and 3 is best or second best (TABED, Table 2), with the strong drafter."""
    parts = []
    for width, last in ((2, "tree"), (3, "tree3")):
        lengths = [measured(results, f"tabed_{contexts}_{last}/{STRONG}") for contexts in ("m", "t", "mt")]
        parts.append(never_third(lengths, f"d = {width}:"))
    return combine(parts, "M / T / MT: ")


SINGLES = {"M": "sd_chain", "T": "sd_chain_text", "C": "sd_chain_caption", "P": "sd_chain_pooled"}


def _beats(name: str, others: str) -> Callable[[Results], Finding]:
    """Return a check that a method accepts more than single contexts, with the strong drafter."""

    def check(results: Results) -> Finding:
        own = measured(results, f"{name}/{STRONG}")
        rest = {letter: measured(results, f"{SINGLES[letter]}/{STRONG}") for letter in others}
        shown = ", ".join(f"{letter} {length.value:.2f}" for letter, length in rest.items())
        return all_of(map(own.above, rest.values())), f"{own.value:.2f} against {shown}"

    return check


def _beats_static(results: Results, name: str) -> Finding:
    parts = []
    for drafter in drafters(results, name, "specvlm"):
        sage, static = (f"{one}/{drafter}" for one in (name, "specvlm"))
        holds, shown = compare(results, sage, static)
        nodes = [cell_of(results, one)["drafted_per_step"] for one in (sage, static)]
        parts.append(
            (
                all_of((holds, nodes[0] <= nodes[1] + 0.5)),
                f"{drafter} drafter: {shown}, with {nodes[0]:.1f} and {nodes[1]:.1f} nodes a step",
            )
        )
    return combine(parts)


def _keeps(results: Results) -> Finding:
    """LVSpec keeps at least 98 % of the attributes (LVSpec, Table 1)."""
    plain, parts = measured(results, "plain", "accuracy"), []
    for drafter in drafters(results, "lvspec"):
        own = measured(results, f"lvspec/{drafter}", "accuracy")
        parts.append((own.above(plain, 0.98), f"{drafter} drafter: {own.value:.3f} of {plain.value:.3f}"))
    return combine(parts)


def _beats_its_drafter(results: Results) -> Finding:
    """LVSpec's captions state more right attributes than those its pruned drafter writes alone."""
    own, alone = (measured(results, f"{name}/{STRONG}", "accuracy") for name in ("lvspec", "pruned_drafter_alone"))
    return own.above(alone), f"{own.value:.3f} against {alone.value:.3f}"


def _random_loses(results: Results) -> Finding:
    """Random relaxation of as much acceptance loses accuracy where LVSpec does not (LVSpec, Figure 4)."""
    names = (f"lvspec/{STRONG}", f"random/{STRONG}")
    relaxed, control = (measured(results, name, "accuracy") for name in names)
    lengths = [measured(results, name).value for name in names]
    numbers = f"accuracy {relaxed.value:.3f} at length {lengths[0]:.2f} against {control.value:.3f} at {lengths[1]:.2f}"
    if abs(lengths[0] - lengths[1]) > 0.15 * lengths[0]:
        # A control that accepts more and is right more often refutes the claim at any length.
        beaten: Holds = False if lengths[1] > lengths[0] and control.above(relaxed) else None
        return beaten, f"{numbers}; the lengths are not equal"
    return relaxed.above(control), numbers


def _lossless_equal(results: Results) -> Finding:
    """Every lossless method with exact acceptance gives plain decoding's tokens, sampled ones included."""
    cells = {
        name: cell_of(results, name)
        for name, result in results["methods"].items()
        if result["verify_mode"] == "lossless" and result["acceptance"] == "exact" and not name.startswith("plain")
    }
    return all_equal(cells, "num_cases", "settings of {} scenes")


def _pruned_beats_whole(results: Results) -> Finding:
    """Pruning 90 % of the drafter's visual columns accepts more than all of them, of which there are more than the
    drafter was trained on."""
    return by_drafter(results, "specvlm", "sd_tree")


_sage = claim(
    "SAGE accepts more per step than the static tree at an equal or smaller node budget (SAGE, Table 1), read as "
    "its definition has it.",
    lambda results: _beats_static(results, "sage"),
)
_longer = claim(
    "LVSpec accepts at least 1.5 times as much as strict matching of the same pruned chain of 10 (LVSpec, Table 1).",
    lambda results: by_drafter(results, "lvspec", "sd_chain_pruned", 1.5),
)
_pruning_keeps = claim(
    "Pruning 90 % of the drafter's visual columns keeps its acceptance (SpecVLM; within 5 %).",
    lambda results: by_drafter(results, "specvlm", "sd_tree", 0.95),
)
_guided = claim(
    "Pruning guided by the target's attention accepts more than uniform pruning (SpecVLM).",
    lambda results: by_drafter(results, "specvlm", "specvlm_uniform"),
)
CHECKS: tuple[Check, ...] = (
    _tabed_chains,
    _tabed_trees,
    claim(
        "TABED with all four contexts (MTCP) accepts more than each of them (TABED, Table 3).",
        _beats("tabed_mtcp", "MTCP"),
    ),
    claim(
        "Of the four contexts alone, the caption (C) accepts most (TABED, Table 3).",
        _beats("sd_chain_caption", "MTP"),
    ),
    _sage,
    claim(
        "The same, read as section 3.2's prose has it.",
        lambda results: _beats_static(results, "sage_expansion"),
    ),
    _longer,
    _keeps,
    _beats_its_drafter,
    _random_loses,
    _pruning_keeps,
    claim(
        "Pruning half of them does.",
        lambda results: compare(results, f"specvlm_50/{STRONG}", f"sd_tree/{STRONG}", 0.95),
    ),
    _guided,
    claim(
        "The same with half of the columns.",
        lambda results: compare(results, f"specvlm_50/{STRONG}", f"specvlm_uniform_50/{STRONG}"),
    ),
    claim(
        "Ours: at temperature 1, exact acceptance under shared noise accepts more on a chain than rejection sampling.",
        lambda results: compare(results, f"sd_chain_sampled/{STRONG}", f"rejection/{STRONG}"),
    ),
    _lossless_equal,
)
CLIP_CHECKS: tuple[Check, ...] = (
    _tabed_chains,
    _sage,
    _longer,
    _keeps,
    _beats_its_drafter,
    _random_loses,
    _pruning_keeps,
    _pruned_beats_whole,
    _guided,
    _lossless_equal,
)
CHECKS_OF = {"dense": CHECKS, "clip": CLIP_CHECKS}


def check_claims(results: Results) -> list[dict[str, Any]]:
    """Check all claims of a scenario on the contents of its file of results."""
    return check_all(CHECKS_OF[results["scenario"]], results)
