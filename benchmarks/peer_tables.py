"""The tables of `benchmarks.peers`: who is how fast with which outputs, and what of that was to be shown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

GIB = 2**30
OWN, OWN_DRAFTS = "draftfleet", "draftfleet, drafter"
GENERATE, ASSISTED = "transformers", "transformers, drafter"
VLLM, VLLM_DRAFTS, VLLM_NGRAMS = "vLLM", "vLLM, drafter", "vLLM, n-grams"


def equality(verdict: dict[str, Any]) -> str:
    """How many outputs are the reference's, and what is known of the others."""
    total, equal = verdict["num_sequences"], verdict["num_equal"]
    if equal == total:
        return "all"
    share = f"{100 * equal / total:.1f} %"
    if not verdict["num_different"]:
        return f"{share}, the others within rounding"
    return f"{share}, **{verdict['num_different']} beyond rounding**"


def figure(cell: dict[str, float] | None, digits: int) -> str:
    """A median with its range; withheld where there is none."""
    if cell is None:
        return "withheld"
    return f"{cell['median']:.{digits}f} ({cell['low']:.{digits}f}–{cell['high']:.{digits}f})"


def show_row(row: dict[str, Any]) -> str:
    """One line for a terminal."""
    name = " ".join(filter(None, (row["row"], row["variant"])))
    return (
        f"batch {row['batch']:3d}  {name:40s} {figure(row['tokens_per_s'], 1):>26s} tokens/s  "
        f"equal {equality(row['verdict'])} {row['withheld']}"
    )


def best_rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """One of each row and batch: the faster of its variants, one without a speed only where there is no other."""
    best: dict[tuple[int, str], dict[str, Any]] = {}
    for row in results["rows"]:
        held = best.get((row["batch"], row["row"]))
        if held is None or _speed(row) > _speed(held):
            best[row["batch"], row["row"]] = row
    return list(best.values())


def _speed(row: dict[str, Any]) -> float:
    return row["tokens_per_s"]["median"] if row["tokens_per_s"] else -1.0


def peers_table(results: dict[str, Any]) -> str:
    """Every engine's best at every batch size."""
    lines = [
        "| batch | engine | tokens/s | samples/s | acceptance length | outputs equal to the target's | peak memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in best_rows(results):
        name = f"{row['row']} ({row['variant']})" if row["variant"] else row["row"]
        length = "" if row["acceptance_length"] is None else f"{row['acceptance_length']:.2f}"
        lines.append(
            f"| {row['batch']} | {name} | {figure(row['tokens_per_s'], 1)} | {figure(row['samples_per_s'], 2)} "
            f"| {length} | {equality(row['verdict'])} | {row['peak_bytes'] / GIB:.1f} GiB |"
        )
    return "\n".join(lines)


def ratio(own: dict[str, Any], other: dict[str, Any]) -> dict[str, float] | None:
    """Samples per second of one row over another's, round by round; None where either has no speed."""
    if own["samples_per_s"] is None or other["samples_per_s"] is None:
        return None
    rounds = [theirs / ours for ours, theirs in zip(own["seconds"], other["seconds"], strict=True)]
    return {"median": statistics.median(rounds), "low": min(rounds), "high": max(rounds)}


def peers_claims_table(results: dict[str, Any]) -> str:
    """What was to be shown, as samples per second of this engine over another's in the same rounds."""
    best = {(row["batch"], row["row"]): row for row in best_rows(results)}
    claims: list[tuple[str, int, str, Sequence[str], float]] = [
        *((f"plain decoding, batch {batch}", batch, OWN, (GENERATE,), 1.0) for batch in (1, 8, 32)),
        *((f"plain decoding, batch {batch}", batch, OWN, (VLLM,), 1.0) for batch in (1, 8, 32)),
        ("speculation, batch 1", 1, OWN_DRAFTS, (ASSISTED,), 1.0),
        ("speculation, batch 8", 8, OWN_DRAFTS, (VLLM_DRAFTS, VLLM_NGRAMS), 2.0),
        ("speculation, batch 32", 32, OWN_DRAFTS, (VLLM, VLLM_DRAFTS, VLLM_NGRAMS), 1.0),
    ]
    lines = ["| this engine | against | speed over theirs | wanted | reached |", "|---|---|---|---|---|"]
    for what, batch, own, others, wanted in claims:
        there = [best[batch, other] for other in others if (batch, other) in best]
        if (batch, own) not in best or not there:
            continue
        rival = max(there, key=_speed)
        found = ratio(best[batch, own], rival)
        reached = "not known" if found is None else "yes" if found["median"] >= wanted else "**no**"
        lines.append(f"| {what} | {rival['row']} | {figure(found, 2)} | {wanted:g} | {reached} |")
    return "\n".join(lines)


def peers_setting(results: dict[str, Any]) -> str:
    """One paragraph on what was run."""
    shapes = [
        f"`{name}`" + (f" inflated to {shape}" if shape else "")
        for name, shape in (
            (results["target"], results["target_shape"]),
            (results["drafter"], results["drafter_shape"]),
        )
    ]
    counts = {row["batch"]: row["num_requests"] for row in results["rows"]}
    requests = ", ".join(f"{count} at batch {batch}" for batch, count in counts.items())
    passes = ", ".join(
        f"{number} at batch {batch}"
        for batch, number in {row["batch"]: len(row["seconds"]) for row in results["rows"]}.items()
    )
    versions = dict.fromkeys(tuple(sorted(told.items())) for told in results["versions"].values())
    launches = "one launch" if results["launches"] == 1 else f"{results['launches']} launches"
    told = "; ".join(", ".join(f"{part} {number}" for part, number in found) for found in versions)
    return (
        f"{shapes[0]}, drafter {shapes[1]}, {results['dtype']}, {results['threads']} threads, γ = {results['gamma']}, "
        f"at most {results['max_new_tokens']} new tokens"
        f"{', ends ignored' if results['ignore_eos'] else ''}. Requests: {requests}. "
        f"Medians of passes, the peers in turn, with the lowest and the highest: {passes}, in {launches}. "
        f"{results['machine']}. {told}."
    )


TABLES = {"peers": peers_table, "peers_claims": peers_claims_table, "peers_setting": peers_setting}
