"""Renders the tokens per second that `benchmarks.real.speed` measured."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.harness.markdown import Results, figure, table


def speed_table(found: Results) -> str:
    """Render acceptance, tokens per second and the ratio to plain decoding by batch size."""
    lines = [
        [
            row["method"],
            row["batch"],
            f"{row['mean_acceptance_length']:.2f} ± {row['acceptance_length_se']:.2f}"
            if "mean_acceptance_length" in row
            else "",
            figure(row["tokens_per_s"], 0),
            figure(row["over_plain"], 2),
            f"{row['num_equal']} of {row['num_prompts']}",
        ]
        for row in found["rows"]
    ]
    rendered = table(
        "method | batch | acceptance length | tokens/s | over plain | rows equal to plain in bfloat16", lines
    )
    return rendered + (f"\n\nLeft out: {'; '.join(found['left_out'])}." if found["left_out"] else "")


def part_table(pair: str, device: str) -> Callable[[Results], str]:
    """Return a function that renders one pair on one device, with its setting."""

    def render(results: Results) -> str:
        found = results.get(pair, {}).get(device)
        if found is None:
            return "Not measured yet."
        setting = found["setting"]
        return f"{setting['device']}, torch {setting['torch']}.\n\n{speed_table(found)}"

    return render


def replay_table(results: Results) -> str:
    """Render tokens per second of the vision pair at batch 1 on a GPU, with steps launched and replayed."""
    pair = results["vision"]
    launched, replayed = (
        {row["method"]: row for row in pair[part]["rows"] if row["batch"] == 1} for part in ("cuda_launched", "cuda")
    )
    lines = []
    for name in replayed:
        before, after = (part[name]["tokens_per_s"] for part in (launched, replayed))
        faster = after["median"] / before["median"]
        lengths = " / ".join(f"{part[name]['mean_acceptance_length']:.2f}" for part in (launched, replayed))
        lines.append(
            [
                name,
                lengths,
                figure(before, 0),
                figure(after, 0),
                f"{faster:.2f}",
                figure(replayed[name]["over_plain"], 2),
            ]
        )
    return table(
        "method | acceptance length, launched / replayed | launched, tokens/s | replayed, tokens/s | "
        "replayed over launched | replayed over plain",
        lines,
    )


TABLES = {
    "real_step_replay": replay_table,
} | {
    f"real_{pair}_speed{suffix}": part_table(pair, device)
    for pair in ("text", "vision")
    for device, suffix in (("cpu", ""), ("cuda", "_gpu"))
}
