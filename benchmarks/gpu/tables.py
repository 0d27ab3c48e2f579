"""Renders the tables of `benchmarks.gpu`, with the sections that were skipped, failed or withheld."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.harness.markdown import GIB, Results, equality, figure
from benchmarks.harness.markdown import table as markdown
from benchmarks.harness.verdict import relative_speeds

UNMEASURED = "Unmeasured: no GPU has run `make bench-gpu` yet."
OF_ROOFLINE, MAX_IDLE = 0.8, 0.03
"""Goals: share of the roofline of plain decoding at batch 1, and largest share of a step outside graphs."""


def gpu_table(results: Results) -> str:
    """Render all sections."""
    heading = (
        f"{results['device']}, {results['cores']} cores, torch {results['torch']}, transformers "
        f"{results['transformers']}, {results['dtype']}."
    )
    if "copy" in results:
        heading += f" Memory is copied at {results['copy'] / 1e12:.2f} TB/s, bytes read and written counted."
    parts = [heading]
    for name, section in SECTIONS.items():
        if name in results:
            parts.append(section(results))
        elif reason := results["failed"].get(name) or results["skipped"].get(name):
            parts.append(f"*{name}*: no figures, {reason}.")
    return "\n\n".join(parts)


def table(title: str, columns: str, rows: list[tuple[Any, ...]], left_out: list[str]) -> str:
    lines = [f"**{title}**", "", markdown(columns, rows)]
    if left_out:
        lines += ["", "Left out: " + "; ".join(left_out) + "."]
    return "\n".join(lines)


def attention_table(results: Results) -> str:
    """Render the microseconds of one layer's attention, both ways."""
    rows = [
        (
            f"{row['query']} / {row['key']} of {row['size']}",
            row["nodes"],
            f"{row['rows']} × {row['columns']}",
            f"{row['mask_us']:.1f}",
            f"{row['two_parts_us']:.1f}" if "two_parts_us" in row else f"withheld: {row['withheld']}",
        )
        for row in results["attention"]
    ]
    title = "Attention of a step, one layer, recorded, microseconds"
    return table(title, "heads / key heads | nodes | rows × columns | one mask | two parts", rows, [])


def pair_table(results: Results) -> str:
    """Render the comparison of the inflated models with their sources."""
    rows = []
    for name in ("target", "drafter"):
        model, check = results["pair"][name], results["pair"][name]["check"]
        equal = f"{check['equal_prompts']} of {check['num_prompts']}", f"{check['equal_argmax_share']:.4f}"
        rows.append((name, f"{model['num_parameters'] / 1e9:.2f} B", *equal, f"{check['worst_gap']:.2g}"))
    title = "Inflated models against their sources, before anything was timed"
    columns = "model | parameters | equal outputs | equal choices | widest lead that was lost, of the largest logit"
    return table(title, columns, rows, [])


def size(model: Results) -> str:
    return f"{model['num_parameters'] / 1e9:.2g} billion parameters"


def decoding_table(results: Results) -> str:
    """Render every contender at every batch size."""
    fused = results.get("fused", {"rows": [], "left_out": []})
    found = sorted(results["decoding"]["rows"] + fused["rows"], key=lambda row: row["batch"])
    plain = {one["batch"]: one for one in found if (one["method"], one["step"]) == ("plain", "captured")}
    rows = []
    for row in found:
        base = plain.get(row["batch"])
        over = roofline = outside = "–"
        if row["tokens_per_s"] is not None:
            roofline = f"{row['of_roofline']:.0%}"
            if row["outside_graphs"] is not None:
                outside = f"{row['outside_graphs']:.1%}"
            if base is not None and base["tokens_per_s"] is not None:
                over = f"{ratio(row, base):.2f}"
        length = f"{row['acceptance_length']:.2f}" if row["acceptance_length"] else "–"
        memory = f"{row['peak_bytes'] / GIB:.0f} GiB"
        equal = equality(row["verdict"]) + (f" ({row['withheld']})" if row["withheld"] else "")
        speed = figure(row["tokens_per_s"], 0)
        rows.append((row["batch"], row["method"], row["step"], speed, over, length, roofline, outside, memory, equal))
    title = f"Decoding, {size(results['pair']['target'])}, γ = {results['gamma']}, greedy"
    columns = "batch | method | steps | tokens/s | over plain, captured | acceptance length | of the roofline"
    columns += " | outside graphs | memory | outputs equal to the target's"
    left_out = results["decoding"]["left_out"] + [f"fused, {one}" for one in fused["left_out"]]
    return f"{table(title, columns, rows, left_out)}\n\n{claims(results)}"


def ratio(row: Results, base: Results) -> float:
    """Return the relative speed of two rows, by round if they ran in turn."""
    if len(row["seconds"]) == len(base["seconds"]):
        return relative_speeds(row, base)
    return float(row["tokens_per_s"]["median"] / base["tokens_per_s"]["median"])


def generate_table(results: Results) -> str:
    """Render transformers' `generate` and its speed relative to this engine's captured steps."""
    found = results.get("decoding", {"rows": []})["rows"]
    own = {(one["batch"], one["method"]): one for one in found if one["step"] == "captured"}
    rows = []
    compiled = results.get("generate_compiled", {"rows": [], "left_out": []})
    for row in results["generate"]["rows"] + compiled["rows"]:
        ratios = []
        for method in ("plain", "chain"):
            one = own.get((row["batch"], method))
            if one is None or None in (one["tokens_per_s"], row["tokens_per_s"]):
                ratios.append("–")
            else:
                ratios.append(f"{ratio(one, row):.2f}")
        equal = equality(row["verdict"]) + (f" ({row['withheld']})" if row["withheld"] else "")
        memory = f"{row['peak_bytes'] / GIB:.0f} GiB"
        rows.append((row["batch"], row["mode"], figure(row["tokens_per_s"], 0), *ratios, memory, equal))
    title = "transformers' `generate` over the same weights, in the same process"
    columns = "batch | mode | tokens/s | plain, captured, over it | chain, captured, over it | memory"
    columns += " | outputs equal to the target's"
    return table(title, columns, rows, results["generate"]["left_out"] + compiled["left_out"])


def claims(results: Results) -> str:
    """Render the goals for plain captured decoding."""
    found = []
    for row in results["decoding"]["rows"]:
        if (row["method"], row["step"]) != ("plain", "captured") or row["tokens_per_s"] is None:
            continue
        if row["batch"] == 1:
            word = "reached" if row["of_roofline"] >= OF_ROOFLINE else "not reached"
            found.append(f"plain decoding at batch 1 at {OF_ROOFLINE:.0%} of the roofline: {word}")
        word = "reached" if row["outside_graphs"] <= MAX_IDLE else "not shown"
        found.append(f"host idle at batch {row['batch']} at most {MAX_IDLE:.0%}: {word}")
    return "To be shown: " + ("; ".join(found) or "no row to judge by") + "."


def images_table(results: Results) -> str:
    rows = [
        (
            row["step"],
            f"{row['batch']} of {row['codes']} codes",
            f"{row['images_per_s']:.2f}",
            f"{row['equal_images']} of {row['batch']} images, {row['equal_codes']:.1%} of codes",
        )
        for row in results["images"]["rows"]
    ]
    title = f"Images, LlamaGen of {size(results['images']['model'])}, guided"
    return table(title, "steps | images | images/s | equal to captured", rows, results["images"]["left_out"])


def long_table(results: Results) -> str:
    """Render the time of steps over long contexts; every number is synthetic."""
    rows = []
    plain: dict[tuple[int, int], float] = {}
    for row in results["long"]["rows"]:
        place, speed = (row["columns"], row["batch"]), row["synthetic_tokens"] / row["seconds"]
        method, over = f"chain, {row['rate']} forced", "–"
        if row["rate"] is None:  # the first row of a place
            method, plain[place] = "plain", speed
        elif place in plain:
            over = f"{speed / plain[place]:.2f}"
        step_ms = f"{1000 * row['seconds'] / row['steps']:.1f}"
        rows.append((f"{row['columns']:,}", row["batch"], method, row["drafter_reads"] or "–", step_ms, over))
    title = "Synthetic: long visual contexts, forced acceptance, steps replayed"
    columns = "visual columns | batch | method | drafter reads | ms per step | synthetic tokens/s over plain"
    return table(title, columns, rows, results["long"]["left_out"])


SECTIONS: dict[str, Callable[[Results], str]] = {
    "attention": attention_table,
    "pair": pair_table,
    "decoding": decoding_table,
    "generate": generate_table,
    "images": images_table,
    "long": long_table,
}
TABLES = {"gpu": gpu_table}
