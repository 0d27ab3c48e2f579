"""Inflates a checkpoint: widens and deepens a small trained model without changing its outputs.

    python -m benchmarks.inflate zoo/checkpoints/text_target out/text_0.3B --shape 0.3B
    python -m benchmarks.inflate zoo/checkpoints/text_drafter out/text_draft --shape draft-0.05 --dtype bfloat16

Acceptance rates are those of the trained pair, step times those of the new size. See `benchmarks.inflate.model`.
"""

from __future__ import annotations

import json
import sys

from benchmarks.harness.results import command_line
from benchmarks.inflate.folders import inflate_folder
from benchmarks.inflate.shapes import SHAPES, InflationError, named_shape


def main(arguments: list[str] | None = None) -> int:
    parser = command_line("inflate", __doc__)
    parser.add_argument("source", help="a checkpoint folder of the zoo")
    parser.add_argument("destination", help="the folder to write")
    parser.add_argument("--shape", required=True, help=f"{', '.join(SHAPES)} or draft-<ratio>")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    options = parser.parse_args(arguments)
    try:
        found = inflate_folder(options.source, options.destination, named_shape(options.shape), options.dtype)
    except InflationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
