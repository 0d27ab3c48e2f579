"""`python -m zoo.real_vision`: build target and drafters of the vision pair from SmolLM2 and the differences to it.

    python -m zoo.real_vision [--out out/real_vision] [--scenes 256] [--differences FILE]

needs the folder of `python -m zoo.real`. It also builds two drafters, `strong_drafter` and `weak_drafter`, and draws
the scenes that configs/jobs/real_vision.yaml captions and those that configs/jobs/train_real_vision.yaml trains a
drafter on. Another file of differences has no drafters. A second call builds nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from zoo.real import drafters
from zoo.real_vision import differences
from zoo.real_vision.scenes import write_scenes

OUT = Path("out/real_vision")
TARGET = OUT / "target"
NUM_SCENES, NUM_TRAINING = 256, 384


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the folder; return 0, or 2 with a message if it cannot be built."""
    parser = argparse.ArgumentParser(prog="python -m zoo.real_vision", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder to write (default: {OUT})")
    parser.add_argument("--scenes", type=int, default=NUM_SCENES, help=f"scenes to draw (default: {NUM_SCENES})")
    parser.add_argument(
        "--differences", type=Path, default=differences.FILE, help="file of `train pack` (default: the shipped one)"
    )
    options = parser.parse_args(arguments)
    if options.scenes < 1:
        parser.error("--scenes must be at least 1")
    target = options.out / TARGET.name
    chosen = differences.DRAFTERS if options.differences == differences.FILE else {}
    try:
        made = differences.ensure(target, path=options.differences)
        drafted = {
            name: drafters.ensure(options.out / f"{name}_drafter", target, path, drafters.digest(differences.FILE))
            for name, path in chosen.items()
        }
    except (differences.NotBuilt, drafters.OtherTarget) as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    print(f"{target}: LLaVA model of SmolLM2-135M-Instruct, float32, {'built' if made else 'already there'}")
    for name, is_new in drafted.items():
        print(f"{options.out / f'{name}_drafter'}: drafter of it, bfloat16, {'built' if is_new else 'already there'}")
    for split, num in (("held_out", options.scenes), ("train", NUM_TRAINING)):
        print(f"{write_scenes(options.out, num, split)}: {num} scenes with questions and true captions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
