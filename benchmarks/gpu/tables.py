"""Renders the tables of `benchmarks.gpu`, with the sections that were skipped, failed or withheld."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.harness.markdown import GIB, Results, equality, figure
from benchmarks.harness.markdown import table as markdown
from benchmarks.harness.verdict import relative_speeds

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
    if "gemm" in results:
        heading += f" A large GEMM runs at {results['gemm'] / 1e12:.0f} TFLOP/s."
    parts = [heading + earlier_runs(results)]
    for name, section in SECTIONS.items():
        if name in results:
            parts.append(section(results))
        elif reason := results["failed"].get(name) or results["skipped"].get(name):
            parts.append(f"*{name}*: no figures, {reason}.")
    return "\n\n".join(parts)


def earlier_runs(results: Results) -> str:
    """Return a sentence for the sections that are of earlier runs, with their device and versions."""
    names: dict[str, list[str]] = {}
    for name, run in results.get("runs", {}).items():
        if name in SECTIONS and run["seconds"] != results["seconds"]:
            facts = f"{run['device']}, torch {run['torch']}, transformers {run['transformers']}"
            names.setdefault(facts, []).append(name)
    return "".join(f" Of an earlier run ({facts}): {', '.join(found)}." for facts, found in names.items())


def table(title: str, columns: str, rows: list[tuple[Any, ...]], left_out: list[str]) -> str:
    lines = [f"**{title}**", "", markdown(columns, rows)]
    if left_out:
        lines += ["", "Left out: " + "; ".join(left_out) + "."]
    return "\n".join(lines)


def attention_table(results: Results) -> str:
    """Render the microseconds of one layer's attention with one mask and by the tree kernel."""
    rows = [
        (
            f"{row['query']} / {row['key']} of {row['size']}",
            row["nodes"],
            f"{row['rows']} × {row['columns']}",
            f"{row['mask_us']:.1f}",
            f"{row['tree_kernel_us']:.1f}" if "tree_kernel_us" in row else f"withheld: {row['withheld']}",
        )
        for row in results["attention"]
    ]
    title = "Attention of a step, one layer, recorded, microseconds"
    return table(title, "heads / key heads | nodes | rows × columns | one mask | tree kernel", rows, [])


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


def decoding_rows(results: Results) -> list[Results]:
    """Return the rows of both sections of decoding, by batch size."""
    found = [row for name in ("decoding", "fused") for row in results.get(name, {"rows": []})["rows"]]
    return sorted(found, key=lambda row: row["batch"])


def default_rows(results: Results) -> dict[tuple[int, str], Results]:
    """Return the rows of a job's default steps, fused if they were measured, by batch size and method."""
    found = decoding_rows(results)
    step = "fused" if any(row["step"] == "fused" for row in found) else "captured"
    return {(row["batch"], row["method"]): row for row in found if row["step"] == step}


def decoding_table(results: Results) -> str:
    """Render every contender at every batch size."""
    found = decoding_rows(results)
    plain = {one["batch"]: one for one in found if (one["method"], one["step"]) == ("plain", "captured")}
    rows = []
    for row in found:
        over = ratio(row, plain.get(row["batch"]))
        roofline = outside = "–"
        if row["tokens_per_s"] is not None:
            roofline = f"{row['of_roofline']:.0%}"
            if row["outside_graphs"] is not None:
                outside = f"{max(0.0, row['outside_graphs']):.1%}"
        length = f"{row['acceptance_length']:.2f}" if row["acceptance_length"] else "–"
        memory = f"{row['peak_bytes'] / GIB:.0f} GiB"
        speed = figure(row["tokens_per_s"], 0)
        columns = (row["method"], row["step"], speed, over, length, roofline, outside, memory, equal_outputs(row))
        rows.append((row["batch"], *columns))
    title = f"Decoding, {size(results['pair']['target'])}, γ = {results['gamma']}, greedy"
    names = "batch | method | steps | tokens/s | over plain, captured | acceptance length | of the roofline"
    names += " | outside graphs | memory | outputs equal to the target's"
    left_out = [one for name in ("decoding", "fused") for one in results.get(name, {"left_out": []})["left_out"]]
    return f"{table(title, names, rows, left_out)}\n\n{claims(results)}"


def equal_outputs(row: Results) -> str:
    return equality(row["verdict"]) + (f" ({row['withheld']})" if row["withheld"] else "")


def ratio(row: Results | None, base: Results | None) -> str:
    """Render the relative speed of two rows, by round if they have equal rounds; "–" if one has no speed."""
    if row is None or base is None or None in (row["tokens_per_s"], base["tokens_per_s"]):
        return "–"
    if len(row["seconds"]) == len(base["seconds"]):
        return f"{relative_speeds(row, base):.2f}"
    return f"{row['tokens_per_s']['median'] / base['tokens_per_s']['median']:.2f}"


def generate_table(results: Results) -> str:
    """Render transformers' `generate`, and the speed of this engine's default steps relative to it."""
    own = default_rows(results)
    sections = [results[name] for name in ("generate", "generate_compiled") if name in results]
    rows = [
        (
            row["batch"],
            row["mode"],
            figure(row["tokens_per_s"], 0),
            *(ratio(own.get((row["batch"], method)), row) for method in ("plain", "chain")),
            equal_outputs(row),
        )
        for section in sections
        for row in section["rows"]
    ]
    step = next((row["step"] for row in own.values()), "captured")
    title = "transformers' `generate` over the same weights, in the same process"
    columns = f"batch | mode | tokens/s | plain, {step}, over it | chain, {step}, over it"
    columns += " | outputs equal to the target's"
    return table(title, columns, rows, [one for section in sections for one in section["left_out"]])


def gpu_headline(results: Results) -> str:
    """Render the speed of default steps, and relative to `generate`."""
    own = default_rows(results)
    generate = {row["batch"]: row for row in results.get("generate", {"rows": []})["rows"]}
    rows = []
    for batch in sorted({batch for batch, _ in own}):
        plain, drafted = own[batch, "plain"], own[batch, "chain"]
        speeds = [figure(one["tokens_per_s"], 0) for one in (plain, drafted)]
        over = ratio(drafted, plain), ratio(plain, generate.get(batch)), ratio(drafted, generate.get(batch))
        rows.append((batch, *speeds, *over))
    columns = "batch | plain, tokens/s | 5 drafts, tokens/s | drafts over plain | plain over transformers"
    return markdown(columns + " | drafts over transformers", rows)


def gpu_findings(results: Results) -> str:
    """Render the findings of all sections as a list."""
    rows = {(row["batch"], row["method"], row["step"]): row for row in decoding_rows(results)}
    batches = sorted({batch for batch, *_ in rows})
    first, last = batches[0], batches[-1]
    fused = [ratio(rows.get((b, "plain", "fused")), rows.get((b, "plain", "captured"))) for b in batches]
    own = default_rows(results)
    drafts = [f"{ratio(own[b, 'chain'], own[b, 'plain'])} (batch {b})" for b in batches]
    attention = [
        f"{row['tree_kernel_us'] / row['mask_us']:.2f} ({row['query']} / {row['key']} heads, {row['nodes']} nodes)"
        for row in results.get("attention", [])
        if "tree_kernel_us" in row
    ]
    prompt_rows = {
        (row["rows"], row["tokens"], row["step"]): row for row in results.get("prefill", {"rows": []})["rows"]
    }
    fused_prefills = [
        f"{eager['seconds'] / row['seconds']:.2f} ({num} × {tokens:,} tokens)"
        for (num, tokens, step), row in prompt_rows.items()
        if step == "fused" and (eager := prompt_rows.get((num, tokens, "eager")))
    ]
    prefills = []
    for batch in batches:
        row = own[batch, "chain"]
        spent = sum(row["forwards"]["prompts"]["seconds"]) / sum(row["seconds"])
        prefills.append(f"{spent:.0%} in {row['forwards']['prompts']['calls'][0]} prefills (batch {batch})")
    captured = ratio(rows.get((first, "plain", "captured")), rows.get((first, "plain", "eager")))
    lines = []
    if "decoding" in results:
        lines.append(
            f"Captured steps of plain decoding at batch {first} over eager ones: {captured}. Fused over captured: "
            f"{', '.join(fused)}, by batch. Jobs on one GPU capture and fuse by default."
        )
    lines += [
        f"Five drafts over plain decoding: {', '.join(drafts)}. The [controller](../methods/controller.md) chooses the "
        f"depth. At batch {last} {own[last, 'chain']['outside_graphs']:.0%} of a step with drafts are outside graphs: "
        "trees, acceptance and commit are small kernels that are not captured.",
        f"Of a pass with drafts, whose rows end one by one, prefills take {', '.join(prefills)}.",
        f"Plain decoding reaches {own[first, 'plain']['of_roofline']:.0%} of the roofline at batch {first}, and "
        f"{OF_ROOFLINE:.0%} are the goal.",
    ]
    if fused_prefills:
        lines.append(f"Speed of prefills with fused over that with eager layers: {', '.join(fused_prefills)}.")
    if attention:
        lines.append(
            f"Time of attention by the tree kernel over that with one mask: {', '.join(attention)} "
            "([decision 21](../design/decisions/21-gpu-tree-attention.md))."
        )
    return "\n".join(f"- {line}" for line in lines)


def claims(results: Results) -> str:
    """Render the goals for plain decoding with default steps."""
    found = []
    for (batch, method), row in sorted(default_rows(results).items()):
        if method != "plain" or row["tokens_per_s"] is None:
            continue
        if batch == 1:
            word = "reached" if row["of_roofline"] >= OF_ROOFLINE else "not reached"
            found.append(f"plain decoding at batch 1 at {OF_ROOFLINE:.0%} of the roofline: {word}")
        word = "reached" if row["outside_graphs"] <= MAX_IDLE else "not shown"
        found.append(f"host idle at batch {batch} at most {MAX_IDLE:.0%}: {word}")
    return "To be shown: " + ("; ".join(found) or "no row to judge by") + "."


def prefill_table(results: Results) -> str:
    rows = [
        (
            f"{row['rows']} × {row['tokens']:,}",
            row["step"],
            f"{1000 * row['seconds']:.1f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['of_gemm']:.0%}",
            f"{row['difference']:.2g}",
        )
        for row in results["prefill"]["rows"]
    ]
    title = f"Prefills, {size(results['pair']['target'])}"
    columns = "prompts × tokens | layers | ms | tokens/s | of a large GEMM | difference of last states"
    return table(title, columns, rows, results["prefill"]["left_out"])


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
    "prefill": prefill_table,
    "generate": generate_table,
    "images": images_table,
    "long": long_table,
}
TABLES = {"gpu": gpu_table, "gpu_headline": gpu_headline, "gpu_findings": gpu_findings}
