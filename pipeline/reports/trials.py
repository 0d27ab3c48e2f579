"""Formats the results of trials of `method.auto`, and counts by name, as text of the summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from actors.results import TrialResult

MAX_TRIALS_SHOWN = 3


def trial_lines(choices: Sequence[TrialResult]) -> list[tuple[str, str]]:
    """Return the results of trials of `method.auto` as (label, value), in detail for `MAX_TRIALS_SHOWN` engines."""
    if not choices:
        return [("kept", "none yet: no engine had rows enough to choose")]
    kept = Counter(choice.method for choice in choices)
    lines = [("kept", choices[0].method if len(choices) == 1 else f"in {len(choices)} trials: {listing(kept)}")]
    for choice in choices[:MAX_TRIALS_SHOWN]:
        lines.append(("  tried on", f"{choice.num_rows:,} rows in {choice.num_rounds} rounds, {choice.reason}"))
        for one in choice.standings:
            text = one.note
            if one.sample_s is not None:
                interval = ""
                if one.low_s is not None and one.high_s is not None:
                    interval = f" ({1000 * one.low_s:.3g} to {1000 * one.high_s:.3g})"
                text = f"{1000 * one.sample_s:.3g} ms per sample{interval}, acceptance length "
                text += f"{one.acceptance_length:.2f}, {one.num_rows:,} rows: {one.note}"
            lines.append((f"    {one.method}", text))
    if len(choices) > MAX_TRIALS_SHOWN:
        lines.append(("  and more", f"{len(choices) - MAX_TRIALS_SHOWN} further trials are in _job/summary.json"))
    return lines


def listing(counts: Mapping[str, int]) -> str:
    """List counts with their names, largest first, equal counts by name."""
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items(), key=lambda one: (-one[1], one[0])))
