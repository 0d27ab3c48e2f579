"""Inflates a checkpoint: widens and deepens a small trained model without changing its outputs.

    python -m benchmarks.inflate zoo/checkpoints/text_target out/text_0.3B --shape 0.3B
    python -m benchmarks.inflate zoo/checkpoints/text_drafter out/text_draft --shape draft-0.05 --dtype bfloat16
    python -m benchmarks.inflate SOURCE DESTINATION --shape hidden=1024,layers=6,heads=16,kv_heads=16,ffn=2816

Acceptance rates are those of the trained pair, step times those of the new size. See `benchmarks.inflate.model`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from benchmarks.harness.results import command_line
from benchmarks.inflate.folders import inflate_folder
from benchmarks.inflate.images import inflate_image_folder, is_image_model
from benchmarks.inflate.shapes import SHAPES, InflationError, named_shape


def main(arguments: list[str] | None = None) -> int:
    parser = command_line("inflate", __doc__)
    parser.add_argument("source", help="a checkpoint folder of the zoo")
    parser.add_argument("destination", help="the folder to write")
    parser.add_argument("--shape", required=True, help=f"{', '.join(SHAPES)}, draft-<ratio>, or all sizes")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        shape = named_shape(options.shape)
        write = inflate_image_folder if is_image_model(options.source) else inflate_folder
        found = write(options.source, options.destination, shape, options.dtype, options.seed)
    except InflationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"shape": asdict(shape), **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
