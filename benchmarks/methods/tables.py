"""Renders the tables of `benchmarks.methods`."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.harness.claims import claims_table
from benchmarks.harness.markdown import Results, percent, table
from benchmarks.methods.claims import length_error
from benchmarks.methods.scenarios import IN_DISTRIBUTION, OUT_OF_DISTRIBUTION, VIDEO

SCENARIOS = (*IN_DISTRIBUTION, *OUT_OF_DISTRIBUTION)
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


def acceptance_table(results: Results) -> str:
    """Render the mean acceptance length (bonus token included) of every method in every scenario."""
    rows = []
    for name, result in results["methods"].items():
        cells = (result["scenarios"].get(key) for key in SCENARIOS)
        rows.append([name, *("–" if cell is None else f"{cell['mean_acceptance_length']:.2f}" for cell in cells)])
    return table(["method", *(key.replace("_", " ") for key in SCENARIOS)], rows)


def cost_table(results: Results) -> str:
    """Render cost and quality of every method on single images."""
    base = results["methods"]["plain"]["scenarios"]["single"]["accuracy"]
    digits = {"mean_acceptance_length": 2, "drafted_per_step": 1, "target_forwards_per_token": 3}
    rows = []
    for name, result in results["methods"].items():
        cell = result["scenarios"]["single"]
        cost = [f"{cell[what]:.{n}f}" for what, n in digits.items()]
        retention = cell["accuracy"] / base if base else 0.0
        quality = [f"{value:.3f}" for value in (cell["accuracy"], retention, cell["attribute_f1"])]
        relaxed, equal = percent(cell["relaxed_share"]), percent(cell["equal_share"])
        rows.append((name, result["verify_mode"], *cost, relaxed, *quality, equal))
    return table(
        "method | mode | acceptance length | drafted per step | target forwards per token | relaxed | attributes right "
        "| retention | attribute words F1 | equal to plain",
        rows,
    )


def video_table(results: Results) -> str:
    """Render acceptance length, nodes and attributes of every method on the video pair, by question."""
    rows = []
    for name, result in results["video"]["methods"].items():
        cells = [result["scenarios"][key] for key in VIDEO]
        figures: list[str] = []
        for cell in cells:
            figures.append(f"{cell['mean_acceptance_length']:.2f} ± {cell['acceptance_length_se']:.2f}")
            figures.append(f"{cell['accuracy']:.3f} ± {cell['accuracy_se']:.3f}")
        equal = percent(sum(cell["equal_share"] for cell in cells) / len(cells))
        rows.append((name, result["verify_mode"], f"{cells[0]['drafted_per_step']:.1f}", *figures, equal))
    columns = (title for key in VIDEO for title in (f"{key}: length", "attributes right"))
    return table(["method", "mode", "drafted per step", *columns, "equal to plain"], rows)


def pruning_table(results: Results) -> str:
    """Render guided against uniform pruning: acceptance length, and the share of grid cells that the drafter sees."""
    rows = []
    names = ("specvlm", "specvlm_uniform")
    for key in SCENARIOS:
        cells = [results["methods"][name]["scenarios"][key] for name in names]
        lengths = [f"{cell['mean_acceptance_length']:.2f} ± {length_error(cell):.2f}" for cell in cells]
        seen = [results["pruning"][name].get(key) for name in names]
        rows.append((key.replace("_", " "), *lengths, *("–" if one is None else f"{one:.2f}" for one in seen)))
    return table("scenario | guided | uniform | cells seen, guided | uniform", rows)


def headline_table(results: Results) -> str:
    """Render acceptance and quality of a few methods on single images, for the README."""
    rows = []
    for name, label in HEADLINE.items():
        method = results["methods"][name]
        cell = method["scenarios"]["single"]
        lengths = f"{cell['mean_acceptance_length']:.2f}", f"{cell['target_forwards_per_token']:.2f}"
        shares = percent(cell["accuracy"]), percent(cell["equal_share"])
        rows.append((label, method["verify_mode"], *lengths, *shares))
    columns = "method | mode | acceptance length | target forwards per token | attributes right | rows equal to plain"
    return table(columns, rows)


TABLES: dict[str, Callable[[Results], str]] = {
    "acceptance": acceptance_table,
    "cost": cost_table,
    "claims": claims_table,
    "video_methods": video_table,
    "pruning": pruning_table,
    "headline": headline_table,
}
