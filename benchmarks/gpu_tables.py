"""The tables of `benchmarks.gpu`, one after the other, with what was skipped, failed or withheld."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.peer_tables import GIB, equality, figure

Found = dict[str, Any]
UNMEASURED = "Unmeasured: no GPU has run `make bench-gpu` yet."
OF_ROOFLINE, MAX_IDLE = 0.8, 0.03
"""What was to be shown: plain decoding at batch 1, and how long the host may leave the device idle."""


def gpu_table(results: Found) -> str:
    """All sections."""
    heading = (
        f"{results['device']}, {results['cores']} cores, torch {results['torch']}, transformers "
        f"{results['transformers']}, {results['dtype']}."
    )
    if "copy" in results:
        heading += f" Memory is copied at {results['copy'] / 1e12:.2f} TB/s, bytes read and written counted."
    made = [heading]
    for name, make in SECTIONS.items():
        if name in results:
            made.append(make(results))
        elif told := results["failed"].get(name) or results["skipped"].get(name):
            made.append(f"*{name}*: no figures, {told}.")
    return "\n\n".join(made)


def table(title: str, columns: str, rows: list[list[str]], left_out: list[str]) -> str:
    """A titled table; what was left out stands below it."""
    head = [f"| {columns} |", "|" + "---|" * (columns.count("|") + 1)]
    lines = [f"**{title}**", "", *head, *("| " + " | ".join(row) + " |" for row in rows)]
    if left_out:
        lines += ["", "Left out: " + "; ".join(left_out) + "."]
    return "\n".join(lines)


def attention_table(results: Found) -> str:
    """Microseconds of one layer, both ways."""
    rows = []
    for row in results["attention"]:
        parts = f"{row['two_parts_us']:.1f}" if "two_parts_us" in row else f"withheld: {row['withheld']}"
        heads = f"{row['query']} / {row['key']} of {row['size']}"
        rows.append([heads, str(row["nodes"]), f"{row['rows']} × {row['columns']}", f"{row['mask_us']:.1f}", parts])
    title = "Attention of a step, one layer, recorded, microseconds"
    return table(title, "heads / key heads | nodes | rows × columns | one mask | two parts", rows, [])


def pair_table(results: Found) -> str:
    """Whether the inflated models are their sources."""
    rows = []
    for name in ("target", "drafter"):
        one = results["pair"][name]
        check = one["check"]
        told = f"{check['equal_prompts']} of {check['num_prompts']}"
        gap = f"{check['worst_gap']:.2g}"
        rows.append([name, f"{one['num_parameters'] / 1e9:.2f} B", told, f"{check['equal_argmax_share']:.4f}", gap])
    title = "Inflated models against their sources, before anything was timed"
    columns = "model | parameters | equal outputs | equal choices | widest lead that was lost, of the largest logit"
    return table(title, columns, rows, [])


def size(model: Found) -> str:
    """How many parameters a model has, in words."""
    return f"{model['num_parameters'] / 1e9:.2g} billion parameters"


def speed_up(row: Found, rows: list[Found]) -> float | None:
    """Over plain decoding, replayed, at the same batch size: the median over rounds."""
    plain = next(
        (one for one in rows if (one["batch"], one["method"], one["step"]) == (row["batch"], "plain", "captured")), None
    )
    if plain is None or row["tokens_per_s"] is None or plain["tokens_per_s"] is None:
        return None
    # The same outputs but for rounding, so that tokens are counted in both.
    return statistics.median(
        mine / own * theirs / their
        for mine, own, their, theirs in zip(
            row["num_tokens"], row["seconds"], plain["num_tokens"], plain["seconds"], strict=True
        )
    )


def decoding_table(results: Found) -> str:
    """Every contender at every batch size."""
    rows = []
    for row in results["decoding"]["rows"]:
        times = speed_up(row, results["decoding"]["rows"])
        has_speed = row["tokens_per_s"] is not None
        rows.append(
            [
                str(row["batch"]),
                row["method"],
                row["step"],
                figure(row["tokens_per_s"], 0),
                f"{times:.2f}" if times else "–",
                f"{row['acceptance_length']:.2f}" if row["acceptance_length"] else "–",
                f"{row['of_roofline']:.0%}" if has_speed else "–",
                f"{row['outside_graphs']:.1%}" if row["outside_graphs"] is not None and has_speed else "–",
                f"{row['peak_bytes'] / GIB:.0f} GiB",
                equality(row["verdict"]) + (f" ({row['withheld']})" if row["withheld"] else ""),
            ]
        )
    title = f"Decoding, {size(results['pair']['target'])}, γ = {results['gamma']}"
    columns = (
        "batch | method | steps | tokens/s | over plain, captured | acceptance length | of the roofline "
        "| outside graphs | memory | outputs equal to the target's"
    )
    made = table(title, columns, rows, results["decoding"]["left_out"])
    return f"{made}\n\n{claims(results)}"


def claims(results: Found) -> str:
    """What was to be shown of plain decoding, replayed, reached or not."""
    told = []
    for row in results["decoding"]["rows"]:
        if (row["method"], row["step"]) != ("plain", "captured") or row["tokens_per_s"] is None:
            continue
        if row["batch"] == 1:
            word = "reached" if row["of_roofline"] >= OF_ROOFLINE else "not reached"
            told.append(f"plain decoding at batch 1 at {OF_ROOFLINE:.0%} of the roofline: {word}")
        word = "reached" if row["outside_graphs"] <= MAX_IDLE else "not shown"
        told.append(f"host idle at batch {row['batch']} at most {MAX_IDLE:.0%}: {word}")
    return "To be shown: " + ("; ".join(told) or "no row to judge by") + "."


def images_table(results: Found) -> str:
    """Images per second, both ways."""
    rows = [
        [
            row["step"],
            f"{row['batch']} of {row['codes']} codes",
            f"{row['images_per_s']:.2f}",
            f"{row['equal_images']} of {row['batch']} images, {row['equal_codes']:.1%} of codes",
        ]
        for row in results["images"]["rows"]
    ]
    return table(
        f"Images, LlamaGen of {size(results['images']['model'])}, guided",
        "steps | images | images/s | equal to captured",
        rows,
        results["images"]["left_out"],
    )


def long_table(results: Found) -> str:
    """What steps cost over long memory; every figure is synthetic."""
    rows = []
    for row in results["long"]["rows"]:
        plain = plain_of(results["long"]["rows"], row)
        speed = row["synthetic_tokens"] / row["seconds"]
        times = speed / (plain["synthetic_tokens"] / plain["seconds"]) if plain else None
        rows.append(
            [
                f"{row['columns']:,}",
                str(row["batch"]),
                "plain" if row["rate"] is None else f"chain, {row['rate']} forced",
                row["drafter_reads"] or "–",
                f"{1000 * row['seconds'] / row['steps']:.1f}",
                f"{times:.2f}" if times and row["rate"] is not None else "–",
            ]
        )
    title = "Synthetic: long visual contexts, forced acceptance, steps replayed"
    columns = "visual columns | batch | method | drafter reads | ms per step | synthetic tokens/s over plain"
    return table(title, columns, rows, results["long"]["left_out"])


def plain_of(rows: list[Found], row: Found) -> Found | None:
    """Plain decoding over the same columns at the same batch size, where it was timed."""
    place = (row["columns"], row["batch"])
    return next((one for one in rows if one["rate"] is None and (one["columns"], one["batch"]) == place), None)


SECTIONS: dict[str, Callable[[Found], str]] = {
    "attention": attention_table,
    "pair": pair_table,
    "decoding": decoding_table,
    "images": images_table,
    "long": long_table,
}
TABLES = {"gpu": gpu_table}
