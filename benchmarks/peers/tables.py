"""Renders the tables of `benchmarks.peers`."""

from __future__ import annotations

from benchmarks.harness.markdown import GIB, Results, equality, figure, inflated, table
from benchmarks.harness.verdict import spread

OWN, OWN_DRAFTS = "draftfleet", "draftfleet, drafter"
GENERATE, ASSISTED = "transformers", "transformers, drafter"
VLLM, VLLM_DRAFTS, VLLM_NGRAMS = "vLLM", "vLLM, drafter", "vLLM, n-grams"
GOALS: tuple[tuple[str, int, str, tuple[str, ...], float], ...] = (
    *((f"plain decoding, batch {batch}", batch, OWN, (GENERATE,), 1.0) for batch in (1, 8, 32)),
    *((f"plain decoding, batch {batch}", batch, OWN, (VLLM,), 1.0) for batch in (1, 8, 32)),
    ("speculation, batch 1", 1, OWN_DRAFTS, (ASSISTED,), 1.0),
    ("speculation, batch 8", 8, OWN_DRAFTS, (VLLM_DRAFTS, VLLM_NGRAMS), 2.0),
    ("speculation, batch 32", 32, OWN_DRAFTS, (VLLM, VLLM_DRAFTS, VLLM_NGRAMS), 1.0),
)
"""Goals: description, batch size, row, rows of the rivals, and the ratio of speeds to reach."""


def _speed(row: Results) -> float:
    return row["tokens_per_s"]["median"] if row["tokens_per_s"] else -1.0


def best_rows(results: Results) -> list[Results]:
    """Return the fastest variant of each row and batch size; one with a withheld speed only if no other has a speed."""
    best: dict[tuple[int, str], Results] = {}
    for row in results["rows"]:
        place = row["batch"], row["row"]
        if place not in best or _speed(row) > _speed(best[place]):
            best[place] = row
    return list(best.values())


def peers_table(results: Results) -> str:
    """Render every engine's best variant at every batch size."""
    rows = []
    for row in best_rows(results):
        name = f"{row['row']} ({row['variant']})" if row["variant"] else row["row"]
        speeds = figure(row["tokens_per_s"], 1), figure(row["samples_per_s"], 2)
        length = "" if row["acceptance_length"] is None else f"{row['acceptance_length']:.2f}"
        memory = f"{row['peak_bytes'] / GIB:.1f} GiB"
        rows.append((row["batch"], name, *speeds, length, equality(row["verdict"]), memory))
    columns = "batch | engine | tokens/s | samples/s | acceptance length | outputs equal to the target's | peak memory"
    return table(columns, rows)


def ratio(row: Results, other: Results) -> dict[str, float] | None:
    """Return samples per second of `row` over those of `other`, round by round; None if either is withheld."""
    if row["samples_per_s"] is None or other["samples_per_s"] is None:
        return None
    return spread([theirs / ours for ours, theirs in zip(row["seconds"], other["seconds"], strict=True)])


def peers_claims_table(results: Results) -> str:
    """Render the goals: samples per second of this engine over its fastest rival in the same rounds."""
    best = {(row["batch"], row["row"]): row for row in best_rows(results)}
    rows = []
    for what, batch, name, others, wanted in GOALS:
        measured = [best[batch, other] for other in others if (batch, other) in best]
        if (batch, name) not in best or not measured:
            continue
        rival = max(measured, key=_speed)
        found = ratio(best[batch, name], rival)
        reached = "not known" if found is None else "yes" if found["median"] >= wanted else "**no**"
        rows.append((what, rival["row"], figure(found, 2), f"{wanted:g}", reached))
    return table("this engine | against | speed over theirs | wanted | reached", rows)


def peers_line(results: Results) -> str:
    """Render the goals against vLLM in one sentence."""
    best = {(row["batch"], row["row"]): row for row in best_rows(results)}
    found: dict[str, list[str]] = {}
    for what, batch, name, others, wanted in GOALS:
        measured = [best[batch, other] for other in others if (batch, other) in best and other.startswith(VLLM)]
        if (batch, name) not in best or not measured:
            continue
        over = ratio(best[batch, name], max(measured, key=_speed))
        if over is not None:
            missed = "" if over["median"] >= wanted else f", below the goal of {wanted:g}"
            found.setdefault(what.split(",")[0], []).append(f"{over['median']:.2f} (batch {batch}{missed})")
    parts = (f"{what} {', '.join(ratios)}" for what, ratios in found.items())
    return f"Speed over vLLM's fastest variant, by requests: {'; '.join(parts)}."


def peers_setting(results: Results) -> str:
    """Describe the models, prompts and machine in one paragraph."""
    rows = results["rows"]
    requests = ", ".join(f"{count} at batch {b}" for b, count in {r["batch"]: r["num_requests"] for r in rows}.items())
    passes = ", ".join(f"{num} at batch {b}" for b, num in {r["batch"]: len(r["seconds"]) for r in rows}.items())
    versions = dict.fromkeys(tuple(sorted(one.items())) for one in results["versions"].values())
    libraries = "; ".join(", ".join(f"{name} {number}" for name, number in one) for one in versions)
    launches = "one launch" if results["launches"] == 1 else f"{results['launches']} launches"
    return (
        f"{inflated(results)}, γ = {results['gamma']}, at most {results['max_new_tokens']} new tokens. "
        f"Requests: {requests}. Medians of passes, the peers in turn, with the lowest and the highest: {passes}, in "
        f"{launches}. {results['machine']}. {libraries}."
    )


TABLES = {
    "peers": peers_table,
    "peers_claims": peers_claims_table,
    "peers_setting": peers_setting,
    "peers_line": peers_line,
}
