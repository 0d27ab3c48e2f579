"""`python -m zoo.real`: fetch SmolLM2-135M-Instruct, convert it, and write prompts of real text.

    python -m zoo.real [--out out/real]
    python -m zoo.real --media [--out out/real]

writes the model folders `target/`, `drafter/` and `eagle/`, and `source/train.parquet` and `source/held_out.parquet`
with the columns id, task and text. A second call converts nothing. With `--media` it writes photographs and films
instead, `images/` and `videos/`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from zoo.real import drafters, media, model
from zoo.real.prompts import Prompt, read_prompts

OUT = Path("out/real")
DRAFTERS = {
    "drafter": ("drafter of 4 layers", drafters.TEXT_DRAFTER),
    "eagle": ("EAGLE-2 head", drafters.EAGLE),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the folder; return 0, or 2 with a message if the model cannot be fetched."""
    parser = argparse.ArgumentParser(prog="python -m zoo.real", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder to write (default: {OUT})")
    parser.add_argument("--media", action="store_true", help="write photographs and films in place of the model")
    options = parser.parse_args(arguments)
    try:
        (write_media if options.media else write_models)(options.out)
    except model.Refused as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    return 0


def write_media(out: Path) -> None:
    """Write photographs and films. Raises Refused."""
    for name, number in media.write(out).items():
        print(f"{out / name}: {number} files")


def write_models(out: Path) -> None:
    """Write the model folders and the prompts. Raises Refused."""
    state = {True: "built", False: "already there"}
    is_new = model.ensure(out / "target")
    print(f"{out / 'target'}: SmolLM2-135M-Instruct, float32, {state[is_new]}")
    for name, (what, path) in DRAFTERS.items():
        is_new = drafters.ensure(out / name, out / "target", path, model.WEIGHTS_SHA256)
        print(f"{out / name}: {what}, bfloat16, {state[is_new]}")
    prompts = read_prompts()
    for split in ("train", "held_out"):
        chosen = [prompt for prompt in prompts if prompt.split == split]
        path = out / "source" / f"{split}.parquet"
        write_prompts(chosen, path)
        print(f"{path}: {len(chosen):,} prompts about the documentation of Python's standard library")


def write_prompts(prompts: Sequence[Prompt], path: Path) -> None:
    """Write prompts as one Parquet file with the columns id, task and text."""
    table = pa.table({name: [getattr(prompt, name) for prompt in prompts] for name in ("id", "task", "text")})
    if path.exists() and pq.read_table(path).equals(table):
        return  # outputs of jobs refer to the file by its modification time
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    pq.write_table(table, partial, row_group_size=256)
    os.replace(partial, path)


if __name__ == "__main__":
    sys.exit(main())
