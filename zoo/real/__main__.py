"""`python -m zoo.real`: fetch SmolLM2-135M-Instruct, convert it, and write prompts of real text.

    python -m zoo.real [--out out/real]

writes `target/` (a model folder), `source/train.parquet` and `source/held_out.parquet` with the columns id, task and
text. A second call converts nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from zoo.real import model
from zoo.real.prompts import Prompt, read_prompts

OUT = Path("out/real")


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the folder; return 0, or 2 with a message if the model cannot be fetched."""
    parser = argparse.ArgumentParser(prog="python -m zoo.real", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder to write (default: {OUT})")
    out = parser.parse_args(arguments).out
    try:
        made = model.ensure(out / "target")
    except model.NotConverted as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    print(f"{out / 'target'}: SmolLM2-135M-Instruct, float32, {'converted' if made else 'already there'}")
    prompts = read_prompts()
    for split in ("train", "held_out"):
        chosen = [prompt for prompt in prompts if prompt.split == split]
        path = out / "source" / f"{split}.parquet"
        write_prompts(chosen, path)
        print(f"{path}: {len(chosen):,} prompts about the documentation of Python's standard library")
    return 0


def write_prompts(prompts: Sequence[Prompt], path: Path) -> None:
    """Write prompts as one Parquet file with the columns id, task and text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({name: [getattr(prompt, name) for prompt in prompts] for name in ("id", "task", "text")})
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    pq.write_table(table, partial, row_group_size=256)
    os.replace(partial, path)


if __name__ == "__main__":
    sys.exit(main())
