"""`python -m zoo.real_vision`: build the target of the vision pair from SmolLM2 and the differences to it.

    python -m zoo.real_vision [--out out/real_vision/target] [--differences FILE]

needs the folder of `python -m zoo.real`. A second call builds nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from zoo.real_vision import differences

OUT = Path("out/real_vision/target")


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the folder; return 0, or 2 with a message if it cannot be built."""
    parser = argparse.ArgumentParser(prog="python -m zoo.real_vision", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder to write (default: {OUT})")
    parser.add_argument(
        "--differences", type=Path, default=differences.FILE, help="file of `train pack` (default: the shipped one)"
    )
    options = parser.parse_args(arguments)
    try:
        made = differences.ensure(options.out, path=options.differences)
    except differences.NotBuilt as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: LLaVA model of SmolLM2-135M-Instruct, float32, {'built' if made else 'already there'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
