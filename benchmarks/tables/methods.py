"""Rows and checks of `benchmarks.methods` and `benchmarks.ablations`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from benchmarks.claims.checks import Check, Compare, Equal
from benchmarks.claims.load import claims_table
from benchmarks.claims.reader import LENGTH, Reader, Samples, error_of
from benchmarks.claims.verdict import Finding, all_of, any_of
from benchmarks.harness.markdown import Results
from benchmarks.harness.samples import Row, read_samples, samples_file
from benchmarks.tables.specs import Function, Table

SCENARIOS = ("single", "two_images", "second_turn", "text_only", "clip", "story", "long_clip")
VIDEO = ("describe", "detailed", "moved")
GROUPS = {
    "benchmarks": SCENARIOS[:5],
    "images": ("single", "two_images", "second_turn", "clip"),
    "first turn": ("single", "two_images", "clip"),
    "second turn": ("second_turn",),
    "OOD": SCENARIOS[5:],
    **{name: (name,) for name in (*SCENARIOS, *VIDEO)},
}
"""Scenarios of a key's group; the turns are the columns of TABED's Table 3."""
HEADLINE = {
    "plain": "plain decoding",
    "sd_chain": "SD-chain, 5 drafts",
    "sd_tree": "SD-tree, 25 nodes",
    "eagle2": "EAGLE-2",
    "medusa": "Medusa",
    "sage": "SAGE",
    "specvlm": "SpecVLM",
    "lvspec": "LVSpec",
}
"""Methods of the README's table → their labels."""


def _singles(results: Results) -> Iterator[Results]:
    base = results["methods"]["plain"]["scenarios"]["single"]["accuracy"]
    for name, method in results["methods"].items():
        cell = method["scenarios"]["single"]
        yield {"name": name, "mode": method["verify_mode"], "retention": cell["accuracy"] / base, **cell}


def _headline(results: Results) -> Iterator[Results]:
    rows = {row["name"]: row for row in _singles(results)}
    return ({"label": label, **rows[name]} for name, label in HEADLINE.items())


def _videos(results: Results) -> Iterator[Results]:
    for name, method in results["video"]["methods"].items():
        equal = sum(method["scenarios"][key]["equal_share"] for key in VIDEO) / len(VIDEO)
        yield {"name": name, "mode": method["verify_mode"], "equal": equal, **method["scenarios"]}


def _pruned(results: Results) -> Iterator[Results]:
    """Yield guided and uniform pruning by scenario, with the share of grid cells that the drafter sees."""
    for key in SCENARIOS:
        row: Results = {"scenario": key.replace("_", " ")}
        for name, short in (("specvlm", "guided"), ("specvlm_uniform", "uniform")):
            cell, share = results["methods"][name]["scenarios"][key], results["pruning"][name].get(key)
            row[short] = f"{cell['mean_acceptance_length']:.2f} ± {error_of(cell, LENGTH):.2f}"
            row[f"seen_{short}"] = "–" if share is None else f"{share:.2f}"
        yield row


def _ablations(results: Results) -> str:
    """Render one table per group, the expected speed-ups and SAGE's autocorrelation."""
    groups_table = Table(
        "variant | single | second turn | clip | story | nodes a step | attributes right | F1 | equal",
        "{0} | {acceptance_length[single]:.2f} | {acceptance_length[second_turn]:.2f} | {acceptance_length[clip]:.2f} "
        "| {acceptance_length[story]:.2f} | {drafted_per_step:.1f} | {accuracy:.3f} | {attribute_f1:.3f} "
        "| {equal_share:.0%}",
        "group.*",
    )
    speedups = ", ".join(f"{label}: {value:.2f}" for label, value in results["expected_speedup"].items())
    lags = ", ".join(f"lag {lag}: {value:.2f}" for lag, value in results["confidence_autocorrelation"].items())
    ms = results["latencies"]
    return "\n\n".join(
        (
            f"{results['num_cases']} cases of each scenario, greedy, float32.",
            *(f"**{name}**\n\n{groups_table({'group': group})}" for name, group in results["groups"].items()),
            f"Expected speed-up by TABED's Eq. 1 at the measured latency ratio {results['latency_ratio']:.2f} (drafter "
            f"{ms['drafter_ms']:.2f} ms, target {ms['target_ms']:.2f} ms, batch of one, CPU): {speedups}.",
            f"Autocorrelation of SAGE's confidence from step to step: {lags}.",
        )
    )


def _scenarios(key: str) -> tuple[str, list[str]]:
    """Return the method and the scenarios of `METHOD` or `METHOD:GROUP`; the video pair's default is all questions."""
    name, _, group = key.partition(":")
    return name, list(VIDEO if name.startswith("video_") and not group else GROUPS[group or "benchmarks"])


def _cells(results: Results, key: str) -> list[Results]:
    name, scenarios = _scenarios(key)
    cells = (results["video"] if name.startswith("video_") else results)["methods"][name]["scenarios"]
    return [cells[scenario] for scenario in scenarios]


def _best_everywhere(read: Reader) -> Finding:
    """Return whether each of three contexts accepts less than another one in some scenario where they differ."""
    names = ("sd_chain", "sd_chain_text", "sd_chain_pooled")
    differ = [key for key in SCENARIOS if not read.is_constant([f"{name}:{key}" for name in names], LENGTH)]
    loses = [
        any_of(
            Compare(f"{other}:{key}", {"": f"{name}:{key}"})(read)[0]
            for other in names
            if other != name
            for key in differ
        )
        for name in names
    ]
    best = {key: max(names, key=lambda name: read.mean(f"{name}:{key}", LENGTH)) for key in differ}
    return all_of(loses), "most accepted: " + ", ".join(f"{key} {name}" for key, name in best.items())


def _lossless(results: Results) -> dict[str, Results]:
    return {
        f"{name}/{key}": cell
        for group in (results["methods"], results["video"]["methods"])
        for name, result in group.items()
        if result["verify_mode"] == "lossless" and result["acceptance"] == "exact"
        for key, cell in result["scenarios"].items()
    }


def samples_by_cell(rows: Iterable[Row]) -> dict[tuple[str, str], Samples]:
    """Return the counts of samples by method and scenario."""
    cells: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault((row["method"], row["scenario"]), {})[row["sample"]] = row
    return dict(cells)


def reader(results: Results) -> Reader:
    by_cell = samples_by_cell(read_samples(samples_file("methods")))

    def samples(key: str) -> list[Samples]:
        name, scenarios = _scenarios(key)
        return [by_cell.get((name, scenario), {}) for scenario in scenarios]

    return Reader(results, _cells, samples)


CHECKS: dict[str, Check] = {
    "best_everywhere": _best_everywhere,
    "lossless": Equal(_lossless, "cells of {} samples or more"),
}
FUNCTIONS: dict[str, Function] = {
    "single_images": _singles,
    "headline": _headline,
    "video_methods": _videos,
    "pruned": _pruned,
    "ablations": _ablations,
    "method_claims": lambda results: claims_table("methods", CHECKS, reader(results)),
}
