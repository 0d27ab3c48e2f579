"""Tables of `benchmarks.real`."""

from __future__ import annotations

from benchmarks.harness.markdown import LENGTH, Table

SPEED = Table(
    "method | batch | acceptance length | tokens/s | over plain | rows equal to plain in bfloat16",
    f"{{method}} | {{batch}} | {LENGTH} | {{tokens_per_s:.0f}} | {{over_plain:.2f}} | {{num_equal}} of {{num_prompts}}",
    absent="",
)
"""Methods at several batch sizes."""
