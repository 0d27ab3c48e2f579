"""Measures the quality of shipped or rebuilt models on held-out scenes: `python -m zoo.measure PART`.

Writes the numbers as JSON and prints their table; with `--table` it prints the table of the committed file for
zoo/README.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from zoo import quality
from zoo.image import synthesis_quality
from zoo.pair import CHECKPOINTS
from zoo.text import quality as text_quality
from zoo.training import keep_memory
from zoo.video import quality as video_quality

PARTS = {"caption": quality, "text": text_quality, "video": video_quality, "image": synthesis_quality}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m zoo.measure", description="Measure models of the zoo.")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--table", action="store_true", help="print the table of the JSON file, measure nothing")
    parser.add_argument("--checkpoints", type=Path, default=CHECKPOINTS)
    parser.add_argument("--json", type=Path, help="file that is read or written (default: the committed one)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(argv)
    part = PARTS[options.part]
    path = options.json or part.QUALITY_JSON
    if not options.table:
        keep_memory()
        torch.set_num_threads(options.threads)
        path.write_text(json.dumps(part.measure(options.checkpoints), indent=1) + "\n")
    print(part.quality_table(json.loads(path.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
