"""The papers' claims, checked on the zoo's results: each holds, does not, or is not decided, with the numbers.

Nothing here is tuned until it fits; what does not hold is reported as not holding, and what too few samples leave open
as not decided (`benchmarks.deciding`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.deciding import Holds, all_of, any_of, claim, decide, enough, steps_error
from benchmarks.scenarios import IN_DISTRIBUTION, OUT_OF_DISTRIBUTION, VIDEO

Results = dict[str, Any]
SINGLE_CONTEXTS = ("sd_chain", "sd_chain_text", "sd_chain_pooled")
SCENARIOS = (*IN_DISTRIBUTION, *OUT_OF_DISTRIBUTION)
JUDGED = IN_DISTRIBUTION
"""Scenarios that a method's mean is taken over."""
TURNS = {"first turn": ("single", "two_images", "clip"), "second turn": ("second_turn",), "OOD": OUT_OF_DISTRIBUTION}
"""The columns of TABED's Table 3; text alone has no image to replace."""
TIE = 0.005
"""Acceptance lengths closer than this are the same."""


@dataclass(frozen=True)
class Measured:
    """A number with its standard error and the number of samples behind it."""

    value: float
    error: float
    num: int

    def above(self, other: Measured, factor: float = 1.0, slack: float = 0.0) -> Holds:
        """Whether this is more than `factor` times `other`, less `slack`."""
        gap = self.value - factor * other.value + slack
        return decide(gap, math.hypot(self.error, factor * other.error), min(self.num, other.num))


def length_error(cell: Results) -> float:
    """Standard error of a cell's acceptance length: over samples, or over steps where none was kept."""
    error = cell.get("acceptance_length_se")
    return steps_error(cell["acceptance_histogram"]) if error is None else float(error)


def mean_length(methods: Results, name: str, keys: tuple[str, ...] = JUDGED) -> Measured:
    """Mean acceptance length of a method over scenarios, which count alike."""
    cells = [methods[name]["scenarios"][key] for key in keys]
    error = math.sqrt(sum(length_error(cell) ** 2 for cell in cells)) / len(cells)
    value = sum(cell["mean_acceptance_length"] for cell in cells) / len(cells)
    return Measured(value, error, min(cell["num_cases"] for cell in cells))


def _quality(methods: Results, name: str, what: str, key: str = "single") -> Measured:
    cell = methods[name]["scenarios"][key]
    return Measured(cell[what], cell[f"{what}_se"], cell["num_cases"])


def check_claims(results: Results) -> list[dict[str, Any]]:
    """All claims; `results` is what results/methods.json holds. A claim whose method was not run says so."""
    found = []
    for check in CHECKS:
        try:
            holds, numbers = check(results)
        except KeyError as missing:
            holds, numbers = None, f"not run: {missing} is missing"
        found.append(claim(check.__doc__ or check.__name__, holds, numbers))
    return found


def _no_single_winner(results: Results) -> tuple[Holds, str]:
    """No single context drafts best everywhere (TABED, Table 1)."""
    methods = results["methods"]
    lengths = {(name, key): mean_length(methods, name, (key,)) for name in SINGLE_CONTEXTS for key in SCENARIOS}

    def loses(name: str) -> Holds:
        pairs = [(lengths[name, key], lengths[other, key]) for other in SINGLE_CONTEXTS if other != name
                 for key in SCENARIOS]  # fmt: skip
        if any(other.above(own) for own, other in pairs):
            return True
        return False if all(own.above(other, slack=TIE) for own, other in pairs) else None

    best = {key: max(lengths[name, key].value for name in SINGLE_CONTEXTS) for key in SCENARIOS}
    everywhere = [n for n in SINGLE_CONTEXTS if all(lengths[n, key].value >= best[key] - TIE for key in SCENARIOS)]
    numbers = f"best or level in all {len(SCENARIOS)} scenarios: {', '.join(everywhere) or 'none'}"
    return all_of(loses(name) for name in SINGLE_CONTEXTS), numbers


def _never_third(methods: Results, own: str, others: tuple[str, str], keys: tuple[str, ...]) -> tuple[Holds, str]:
    """Whether `own` is longer than, or level with, at least one of two others."""
    one, *rest = (mean_length(methods, name, keys) for name in (own, *others))
    return any_of(one.above(other, slack=TIE) for other in rest), " / ".join(
        f"{length.value:.2f}" for length in (*rest, one)
    )


def _tabed_never_third(results: Results) -> tuple[Holds, str]:
    """TABED is best or second best in every scenario (TABED, Table 1)."""
    parts = {
        key: _never_third(results["methods"], "tabed_mt", ("sd_chain", "sd_chain_text"), (key,)) for key in SCENARIOS
    }
    told = "; ".join(f"{key} {numbers}" for key, (_, numbers) in parts.items())
    return all_of(holds for holds, _ in parts.values()), f"M / T / MT: {told}"


def _tabed_trees(results: Results) -> tuple[Holds, str]:
    """TABED on token trees of width 2 and 3 is best or second best, on benchmarks and out of distribution (TABED,
    Table 2)."""
    verdicts: list[Holds] = []
    told = []
    for width, last in ((2, "tree"), (3, "tree3")):
        for group, keys in (("benchmarks", IN_DISTRIBUTION), ("OOD", OUT_OF_DISTRIBUTION)):
            names = (f"tabed_m_{last}", f"tabed_t_{last}")
            holds, numbers = _never_third(results["methods"], f"tabed_mt_{last}", names, keys)
            verdicts.append(holds)
            told.append(f"d = {width}, {group}: {numbers}")
    return all_of(verdicts), f"M / T / MT: {'; '.join(told)}"


SINGLES = {"M": "sd_chain", "T": "sd_chain_text", "C": "sd_chain_caption", "P": "sd_chain_pooled"}


def _beats(results: Results, own: str, others: tuple[str, ...]) -> tuple[Holds, str]:
    verdicts: list[Holds] = []
    told = []
    for turn, keys in TURNS.items():
        one = mean_length(results["methods"], own, keys)
        rest = {letter: mean_length(results["methods"], SINGLES[letter], keys) for letter in others}
        verdicts += [one.above(other) for other in rest.values()]
        shown = ", ".join(f"{letter} {length.value:.2f}" for letter, length in rest.items())
        told.append(f"{turn}: {one.value:.2f} against {shown}")
    return all_of(verdicts), "; ".join(told)


def _mtcp_best(results: Results) -> tuple[Holds, str]:
    """TABED with all four contexts (MTCP) accepts more than each of them in both turns and out of distribution (TABED,
    Table 3)."""
    return _beats(results, "tabed_mtcp", ("M", "T", "C", "P"))


def _caption_second(results: Results) -> tuple[Holds, str]:
    """Of the four contexts alone, the caption (C) accepts most (TABED, Table 3)."""
    return _beats(results, SINGLES["C"], ("M", "T", "P"))


def _beats_static(methods: Results, names: tuple[str, str], keys: tuple[str, ...]) -> tuple[Holds, str]:
    own, static = (mean_length(methods, name, keys) for name in names)
    nodes = [methods[name]["scenarios"][keys[0]]["drafted_per_step"] for name in names]
    told = f"{own.value:.2f} with {nodes[0]:.1f} nodes a step against {static.value:.2f} with {nodes[1]:.1f}"
    return all_of((own.above(static), nodes[0] <= nodes[1] + 0.5)), told


def _sage_beats_static(results: Results) -> tuple[Holds, str]:
    """SAGE accepts more per step than the static tree at an equal or smaller node budget (SAGE, Table 1), read as its
    definition has it: the threshold decides which nodes are in the tree."""
    return _beats_static(results["methods"], ("sage", "specvlm"), JUDGED)


def _sage_expansion(results: Results) -> tuple[Holds, str]:
    """The same, read as section 3.2's prose has it: the threshold decides which nodes get children."""
    return _beats_static(results["methods"], ("sage_expansion", "specvlm"), JUDGED)


def _sage_readings(results: Results) -> tuple[Holds, str]:
    """Ours: of the two readings the prose accepts more, and takes more nodes for it."""
    prose, definition = (mean_length(results["methods"], name) for name in ("sage_expansion", "sage"))
    nodes = [results["methods"][name]["scenarios"]["single"]["drafted_per_step"] for name in ("sage_expansion", "sage")]
    told = f"{prose.value:.2f} with {nodes[0]:.1f} nodes against {definition.value:.2f} with {nodes[1]:.1f}"
    return all_of((prose.above(definition), nodes[0] > nodes[1])), told


def _sage_video(results: Results) -> tuple[Holds, str]:
    """SAGE accepts more per step than the static tree on videos (SAGE, Table 1)."""
    return _beats_static(results["video"]["methods"], ("video_sage", "video_specvlm"), VIDEO)


def _ratio(methods: Results, names: tuple[str, str], keys: tuple[str, ...]) -> tuple[Holds, str]:
    relaxed, strict = (mean_length(methods, name, keys) for name in names)
    told = f"{relaxed.value:.2f} / {strict.value:.2f} = {relaxed.value / strict.value:.2f}"
    return relaxed.above(strict, 1.5), told


def _lvspec_longer(results: Results) -> tuple[Holds, str]:
    """LVSpec accepts at least 1.5 times as much as strict matching of the same pruned chain of 10 (LVSpec, Table 1)."""
    return _ratio(results["methods"], ("lvspec", "sd_chain_pruned"), JUDGED)


def _lvspec_video(results: Results) -> tuple[Holds, str]:
    """The same on videos."""
    return _ratio(results["video"]["methods"], ("video_lvspec", "video_sd_pruned"), VIDEO)


def _lvspec_keeps(results: Results) -> tuple[Holds, str]:
    """LVSpec keeps at least 98 % of the quality, parsed and by F1 of attribute words (LVSpec, Table 1)."""
    verdicts: list[Holds] = []
    told = []
    for what, label in (("accuracy", "parsed"), ("attribute_f1", "F1")):
        own, plain = (_quality(results["methods"], name, what) for name in ("lvspec", "plain"))
        verdicts.append(own.above(plain, 0.98))
        told.append(f"retention {own.value / plain.value:.3f} {label}")
    return all_of(verdicts), ", ".join(told)


def _lvspec_beats_its_drafter(results: Results) -> tuple[Holds, str]:
    """LVSpec's captions are better than those its pruned drafter writes alone, parsed and by F1 of attribute words."""
    verdicts: list[Holds] = []
    told = []
    for what, label in (("accuracy", "parsed"), ("attribute_f1", "F1")):
        own, alone = (_quality(results["methods"], name, what) for name in ("lvspec", "pruned_drafter_alone"))
        verdicts.append(own.above(alone))
        told.append(f"{label} {own.value:.3f} against {alone.value:.3f}")
    whole = _quality(results["methods"], "drafter_alone", "accuracy")
    return all_of(verdicts), f"{', '.join(told)}; the drafter that sees everything: parsed {whole.value:.3f}"


def _lvspec_keeps_videos(results: Results) -> tuple[Holds, str]:
    """LVSpec keeps at least 98 % of the attributes on videos, and more than its pruned drafter alone."""
    methods = results["video"]["methods"]
    verdicts: list[Holds] = []
    told = []
    for key in VIDEO:
        own, plain, alone = (
            _quality(methods, name, "accuracy", key)
            for name in ("video_lvspec", "video_plain", "video_pruned_drafter_alone")
        )
        verdicts += [own.above(plain, 0.98), own.above(alone)]
        told.append(f"{key}: {own.value:.3f}; plain {plain.value:.3f}, pruned drafter {alone.value:.3f}")
    return all_of(verdicts), "; ".join(told)


def _random_loses(results: Results) -> tuple[Holds, str]:
    """Random relaxation of as much acceptance loses accuracy where LVSpec does not (LVSpec, Figure 4)."""
    names = ("lvspec", "random")
    relaxed, control = (_quality(results["methods"], name, "accuracy") for name in names)
    lengths = [mean_length(results["methods"], name, ("single",)).value for name in names]
    numbers = f"accuracy {relaxed.value:.3f} at length {lengths[0]:.2f} against {control.value:.3f} at {lengths[1]:.2f}"
    if abs(lengths[0] - lengths[1]) > 0.15 * lengths[0]:
        return None, f"{numbers}; the lengths are not equal"
    return relaxed.above(control), numbers


def _pruning_keeps(results: Results) -> tuple[Holds, str]:
    """Pruning 90 % of the drafter's visual columns keeps its acceptance (SpecVLM; within 5 %)."""
    pruned, whole = (mean_length(results["methods"], name) for name in ("specvlm", "sd_tree"))
    return pruned.above(whole, 0.95), f"{pruned.value:.2f} against {whole.value:.2f}"


def _guided_beats_uniform(results: Results) -> tuple[Holds, str]:
    """Pruning guided by the target's attention accepts more than uniform pruning (SpecVLM)."""
    methods, kept = results["methods"], results["pruning"]
    cells = {
        key: tuple(mean_length(methods, name, (key,)) for name in ("specvlm", "specvlm_uniform")) for key in SCENARIOS
    }
    lost = [key for key, (guided, uniform) in cells.items() if guided.value < uniform.value - TIE]
    told = ", ".join(f"{key} {cells[key][0].value:.2f} / {cells[key][1].value:.2f}" for key in lost)
    seen = {name: sum(kept[name].values()) / len(kept[name]) for name in ("specvlm", "specvlm_uniform")}
    guided, uniform = (mean_length(methods, name) for name in ("specvlm", "specvlm_uniform"))
    return guided.above(uniform), (
        f"{guided.value:.2f} against {uniform.value:.2f} on the mean; loses in {len(lost)} of {len(cells)} scenarios: "
        f"{told}. The reason: attention falls on neighbouring columns, so that those kept show fewer parts of the "
        f"pictures, {seen['specvlm']:.2f} of their cells against {seen['specvlm_uniform']:.2f}"
    )


def _lossless_equal(results: Results) -> tuple[Holds, str]:
    """Every lossless method with exact acceptance gives plain decoding's tokens, videos included."""
    cells = {
        f"{name}/{key}": cell
        for group in (results["methods"], results["video"]["methods"])
        for name, result in group.items()
        if result["verify_mode"] == "lossless" and result["acceptance"] == "exact"
        for key, cell in result["scenarios"].items()
    }
    unequal = [name for name, cell in cells.items() if cell["equal_share"] < 1.0]
    num = min(cell["num_cases"] for cell in cells.values())
    return enough(not unequal, num), ", ".join(unequal) or f"all equal in {len(cells)} cells of {num} samples or more"


CHECKS: tuple[Callable[[Results], tuple[Holds, str]], ...] = (
    _no_single_winner,
    _tabed_never_third,
    _tabed_trees,
    _mtcp_best,
    _caption_second,
    _sage_beats_static,
    _sage_expansion,
    _sage_readings,
    _sage_video,
    _lvspec_longer,
    _lvspec_video,
    _lvspec_keeps,
    _lvspec_beats_its_drafter,
    _lvspec_keeps_videos,
    _random_loses,
    _pruning_keeps,
    _guided_beats_uniform,
    _lossless_equal,
)
