"""Measures the quality of shipped or rebuilt models on held-out scenes: `python -m zoo.measure PART`.

Writes the numbers as JSON and prints them as tables; with `--table` it prints those of the committed file for
zoo/README.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from docgen.markdown import table
from zoo import quality
from zoo.pair import CHECKPOINTS
from zoo.real_vision import quality as real_vision_quality
from zoo.real_vision.__main__ import TARGET as REAL_VISION
from zoo.text import quality as text_quality
from zoo.video import quality as video_quality

FOLDER = Path(__file__).parent
PARTS: dict[str, tuple[Callable[[Path], dict[str, float]], Path]] = {
    "caption": (quality.measure, FOLDER / "quality.json"),
    "real_vision": (lambda _: real_vision_quality.measure(REAL_VISION), FOLDER / "real_vision_quality.json"),
    "text": (text_quality.measure, FOLDER / "text_quality.json"),
    "video": (video_quality.measure, FOLDER / "video_quality.json"),
}
"""The measure of each part and the file of its numbers."""


def quality_table(measured: dict[str, float]) -> str:
    """Render measured numbers as Markdown tables: one column per model of a pair, then the other numbers."""
    names = [key.removeprefix("target_") for key in measured if key.startswith("target_")]
    roles = ("target", "drafter")
    rows = [[name.replace("_", " "), *(f"{measured[f'{role}_{name}']:.3f}" for role in roles)] for name in names]
    others = [key for key in measured if not key.startswith(("target_", "drafter_"))]
    shared = [[key.replace("_", " "), f"{measured[key]:.3f}".removesuffix(".000")] for key in others]
    by_model = [table(("by model", *roles), rows)] if rows else []
    return "\n\n".join([*by_model, table(("", "value"), shared)])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m zoo.measure", description="Measure models of the zoo.")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--table", action="store_true", help="print the table of the committed file, measure nothing")
    parser.add_argument("--checkpoints", type=Path, default=CHECKPOINTS, help="folder of a pair's models")
    options = parser.parse_args(argv)
    measure, path = PARTS[options.part]
    if not options.table:
        path.write_text(json.dumps(measure(options.checkpoints), indent=1) + "\n")
    print(quality_table(json.loads(path.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
