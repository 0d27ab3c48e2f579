"""The closing summary of a synthesis job: images, and how many codes each forward of the target gave.

Adds the counts of images to `pipeline.reports.summary`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.reports.summary import Summary


@dataclass
class ImageSummary(Summary):
    """Totals of one synthesis job; a sample is an image, a token is a code."""

    num_target_forwards: int = 0

    @property
    def tokens_per_forward(self) -> float:
        """Codes of an image per forward of the target that it took part in, the prefill among them."""
        return self.num_generated_tokens / self.num_target_forwards if self.num_target_forwards else 0.0

    def add_telemetry(self, telemetry: dict[str, Any]) -> None:
        """Count one image."""
        super().add_telemetry(telemetry)
        self.num_target_forwards += telemetry["target_forwards"]

    def to_json(self) -> dict[str, Any]:
        """As `Summary.to_json`, with rates of images."""
        own = {"images_per_s": self.samples_per_s, "tokens_per_forward": self.tokens_per_forward}
        return {**super().to_json(), **own}

    def lines(self) -> list[tuple[str, str]]:
        """As `Summary.lines`, in images and codes."""
        renamed = {"samples": "images", "samples/s": "images/s"}
        found = [(renamed.get(label, label), value) for label, value in super().lines()]
        place = next(index for index, (label, _) in enumerate(found) if label == "engine time")
        return [*found[:place], ("tokens/forward", f"{self.tokens_per_forward:.2f}"), *found[place:]]
