"""Rows of `benchmarks.gpu`, and the sentences on its findings."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness.markdown import Results, equality
from benchmarks.harness.verdict import relative_speeds
from benchmarks.tables.specs import Function

OF_ROOFLINE, MAX_IDLE = 0.8, 0.03
"""Goals: share of the roofline of plain decoding at batch 1, and largest share of a step outside graphs."""
SECTIONS = ("attention", "pair", "decoding", "prefill", "generate", "images", "long")


def gpu_heading(results: Results) -> str:
    """Describe device and versions, and which sections are of earlier runs."""
    heading = (
        f"{results['device']}, {results['cores']} cores, torch {results['torch']}, transformers "
        f"{results['transformers']}, {results['dtype']}."
    )
    if "copy" in results:
        heading += f" Memory is copied at {results['copy'] / 1e12:.2f} TB/s, bytes read and written counted."
    if "gemm" in results:
        heading += f" A large GEMM runs at {results['gemm'] / 1e12:.0f} TFLOP/s."
    sections: dict[str, list[str]] = {}
    for name, run in results.get("runs", {}).items():
        if name in SECTIONS and run["seconds"] != results["seconds"]:
            facts = f"{run['device']}, torch {run['torch']}, transformers {run['transformers']}"
            sections.setdefault(facts, []).append(name)
    return heading + "".join(f" Of an earlier run ({facts}): {', '.join(names)}." for facts, names in sections.items())


def _attention(row: Results) -> Results:
    kernel = f"{row['tree_kernel_us']:.1f}" if "tree_kernel_us" in row else f"withheld: {row['withheld']}"
    return {"kernel": kernel}


def _models(pair: Results) -> Iterator[Results]:
    return ({"name": name, **pair[name]} for name in ("target", "drafter"))


def decoding_rows(results: Results) -> list[Results]:
    """Return the rows of both sections of decoding, by batch size."""
    rows = [row for name in ("decoding", "fused") for row in results.get(name, {"rows": []})["rows"]]
    return sorted(rows, key=lambda row: row["batch"])


def default_rows(results: Results) -> dict[tuple[int, str], Results]:
    """Return the rows of a job's default steps, fused if they were measured, by batch size and method."""
    rows = decoding_rows(results)
    step = "fused" if any(row["step"] == "fused" for row in rows) else "captured"
    return {(row["batch"], row["method"]): row for row in rows if row["step"] == step}


def ratio(row: Results | None, base: Results | None) -> str:
    """Render the relative speed of two rows, by round if they have equal rounds; "–" if one has no speed."""
    if row is None or base is None or None in (row["tokens_per_s"], base["tokens_per_s"]):
        return "–"
    if len(row["seconds"]) == len(base["seconds"]):
        return f"{relative_speeds(row, base):.2f}"
    return f"{row['tokens_per_s']['median'] / base['tokens_per_s']['median']:.2f}"


def _equal(row: Results) -> str:
    return equality(row["verdict"]) + (f" ({row['withheld']})" if row["withheld"] else "")


def _decoding(results: Results) -> Iterator[Results]:
    rows = decoding_rows(results)
    plain = {row["batch"]: row for row in rows if (row["method"], row["step"]) == ("plain", "captured")}
    for row in rows:
        roofline = outside = "–"
        if row["tokens_per_s"] is not None:
            roofline = f"{row['of_roofline']:.0%}"
            if row["outside_graphs"] is not None:
                outside = f"{max(0.0, row['outside_graphs']):.1%}"
        length = f"{row['acceptance_length']:.2f}" if row["acceptance_length"] else "–"
        over = ratio(row, plain.get(row["batch"]))
        yield row | {"over": over, "length": length, "roofline": roofline, "outside": outside, "equal": _equal(row)}


def _generate(results: Results) -> Iterator[Results]:
    defaults = default_rows(results)
    for name in ("generate", "generate_compiled"):
        for row in results.get(name, {"rows": []})["rows"]:
            over = {method: ratio(defaults.get((row["batch"], method)), row) for method in ("plain", "chain")}
            yield row | over | {"equal": _equal(row)}


def _long(section: Results) -> Iterator[Results]:
    """Yield the time of steps over long contexts; plain decoding is the first row of a place."""
    plain = 0.0
    for row in section["rows"]:
        speed = row["synthetic_tokens"] / row["seconds"]
        method, over = f"chain, {row['rate']} forced", f"{speed / plain:.2f}" if plain else "–"
        if row["rate"] is None:
            method, over, plain = "plain", "–", speed
        reads = row["drafter_reads"] or "–"
        yield row | {"method": method, "over": over, "reads": reads, "ms": 1000 * row["seconds"] / row["steps"]}


def _headline(results: Results) -> Iterator[Results]:
    defaults = default_rows(results)
    generate = {row["batch"]: row for row in results.get("generate", {"rows": []})["rows"]}
    for batch in sorted({batch for batch, _ in defaults}):
        plain, drafted, theirs = defaults[batch, "plain"], defaults[batch, "chain"], generate.get(batch)
        yield {
            "batch": batch,
            "plain": plain["tokens_per_s"],
            "drafted": drafted["tokens_per_s"],
            "over_plain": ratio(drafted, plain),
            "plain_over": ratio(plain, theirs),
            "drafted_over": ratio(drafted, theirs),
        }


def gpu_findings(results: Results) -> str:
    """Render the findings of all sections as a list."""
    rows = {(row["batch"], row["method"], row["step"]): row for row in decoding_rows(results)}
    batches = sorted({batch for batch, *_ in rows})
    first, last = batches[0], batches[-1]
    defaults = default_rows(results)
    drafts = [f"{ratio(defaults[b, 'chain'], defaults[b, 'plain'])} (batch {b})" for b in batches]
    attention = [
        f"{row['tree_kernel_us'] / row['mask_us']:.2f} ({row['query']} / {row['key']} heads, {row['nodes']} nodes)"
        for row in results.get("attention", [])
        if "tree_kernel_us" in row
    ]
    prompts = {(row["rows"], row["tokens"], row["step"]): row for row in results.get("prefill", {"rows": []})["rows"]}
    fused_prefills = [
        f"{eager['seconds'] / row['seconds']:.2f} ({num} × {tokens:,} tokens)"
        for (num, tokens, step), row in prompts.items()
        if step == "fused" and (eager := prompts.get((num, tokens, "eager")))
    ]
    prefills = []
    for batch in batches:
        forwards, seconds = defaults[batch, "chain"]["forwards"]["prompts"], defaults[batch, "chain"]["seconds"]
        share = sum(forwards["seconds"]) / sum(seconds)
        prefills.append(f"{share:.0%} in {forwards['calls'][0]} prefills (batch {batch})")
    lines = []
    if "decoding" in results:
        captured = ratio(rows.get((first, "plain", "captured")), rows.get((first, "plain", "eager")))
        fused = [ratio(rows.get((b, "plain", "fused")), rows.get((b, "plain", "captured"))) for b in batches]
        lines.append(
            f"Captured steps of plain decoding at batch {first} over eager ones: {captured}. Fused over captured: "
            f"{', '.join(fused)}, by batch. Jobs on one GPU capture and fuse by default."
        )
    lines += [
        f"Five drafts over plain decoding: {', '.join(drafts)}. The [controller](../methods/controller.md) chooses the "
        f"depth. At batch {last} {defaults[last, 'chain']['outside_graphs']:.0%} of a step with drafts are outside "
        "graphs: trees, acceptance and commit are small kernels that are not captured.",
        f"Of a pass with drafts, whose rows end one by one, prefills take {', '.join(prefills)}.",
        f"Plain decoding reaches {defaults[first, 'plain']['of_roofline']:.0%} of the roofline at batch {first}, and "
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
    goals = []
    for (batch, method), row in sorted(default_rows(results).items()):
        if method != "plain" or row["tokens_per_s"] is None:
            continue
        if batch == 1:
            word = "reached" if row["of_roofline"] >= OF_ROOFLINE else "not reached"
            goals.append(f"plain decoding at batch 1 at {OF_ROOFLINE:.0%} of the roofline: {word}")
        word = "reached" if row["outside_graphs"] <= MAX_IDLE else "not shown"
        goals.append(f"host idle at batch {batch} at most {MAX_IDLE:.0%}: {word}")
    return "To be shown: " + ("; ".join(goals) or "no row to judge by") + "."


FUNCTIONS: dict[str, Function] = {
    "gpu_heading": gpu_heading,
    "kernel_time": _attention,
    "inflated_models": _models,
    "gpu_decoding": _decoding,
    "gpu_goals": claims,
    "gpu_generate": _generate,
    "long_contexts": _long,
    "gpu_headline": _headline,
    "gpu_findings": gpu_findings,
}
