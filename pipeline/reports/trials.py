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
    counts = Counter(choice.method for choice in choices)
    lines = [("kept", choices[0].method if len(choices) == 1 else f"in {len(choices)} trials: {listing(counts)}")]
    for choice in choices[:MAX_TRIALS_SHOWN]:
        lines.append(("  tried on", f"{choice.num_rows:,} rows in {choice.num_rounds} rounds, {choice.reason}"))
        for standing in choice.standings:
            text = standing.note
            if standing.sample_s is not None:
                interval = ""
                if standing.low_s is not None and standing.high_s is not None:
                    interval = f" ({1000 * standing.low_s:.3g} to {1000 * standing.high_s:.3g})"
                text = f"{1000 * standing.sample_s:.3g} ms per sample{interval}, acceptance length "
                text += f"{standing.acceptance_length:.2f}, {standing.num_rows:,} rows: {standing.note}"
            lines.append((f"    {standing.method}", text))
    if len(choices) > MAX_TRIALS_SHOWN:
        lines.append(("  and more", f"{len(choices) - MAX_TRIALS_SHOWN} further trials are in _job/summary.json"))
    return lines


def listing(counts: Mapping[str, int]) -> str:
    """List counts with their names, largest first, equal counts by name."""
    return ", ".join(
        f"{count:,} {name}" for name, count in sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    )
