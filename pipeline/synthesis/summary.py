"""Summarises a synthesis job: counts of images, and codes per target forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.reports.summary import Summary


@dataclass
class ImageSummary(Summary):
    """Totals of one synthesis job; a sample is an image, a token is a VQ code."""

    num_target_forwards: int = 0

    @property
    def tokens_per_forward(self) -> float:
        """Mean number of codes per target forward of an image, prefill included."""
        return self.num_generated_tokens / self.num_target_forwards if self.num_target_forwards else 0.0

    def add_rows(self, table: pa.Table) -> None:
        super().add_rows(table)
        self.num_target_forwards += pc.sum(pc.struct_field(table["telemetry"], "target_forwards")).as_py() or 0

    def add(self, other: Summary) -> None:
        super().add(other)
        assert isinstance(other, ImageSummary)
        self.num_target_forwards += other.num_target_forwards

    def to_json(self) -> dict[str, Any]:
        rates = {"images_per_s": self.samples_per_s, "tokens_per_forward": self.tokens_per_forward}
        return super().to_json() | rates

    def lines(self) -> list[tuple[str, str]]:
        renamed = {"rows": "images", "rows/s": "images/s"}
        lines = [(renamed.get(label, label), value) for label, value in super().lines()]
        index = [label for label, _ in lines].index("engine time")
        lines.insert(index, ("tokens/forward", f"{self.tokens_per_forward:.2f}"))
        return lines
