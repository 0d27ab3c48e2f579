"""Writes rows of the image world as Parquet: `python -m zoo.synthesis_rows OUT --rows N`.

Training data of image drafters (`jobs/train_drafter.py`) and prompts of synthesis jobs. Columns: `sample_id`, `prompt`,
`codes` (by the zoo's VQ model, in raster order), and `label` for the class-conditional model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from models.llamagen.vq import Vq
from models.llamagen.vq_files import load_vq
from models.loading.checkpoints import CheckpointRef
from zoo.image.gpt import class_of, draw_scenes
from zoo.image.vq import pixels_of
from zoo.pair import CHECKPOINTS
from zoo.world.grain import render_grainy, write_prompt
from zoo.world.scene import SPLITS

ROWS_AT_ONCE = 50
# Rows outside the training data of the shipped GPTs in the same split, whose seeds start at 0.
SEED = 1000


def draw_rows(vq: Vq, kind: str, split: str, num_rows: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield rows for the condition `kind`, text or class; the same arguments yield the same rows."""
    for start in range(0, num_rows, ROWS_AT_ONCE):
        scenes = draw_scenes(kind, split, min(ROWS_AT_ONCE, num_rows - start), seed, start)
        codes = vq.encode(pixels_of([render_grainy(scene) for scene in scenes])).flatten(1).tolist()
        for index, (scene, row) in enumerate(zip(scenes, codes), start=start):
            label = {"label": class_of(scene)} if kind == "class" else {}
            yield {"sample_id": f"{split}-{seed}-{index}", "prompt": write_prompt(scene), "codes": row, **label}


def write_rows(path: Path, vq: Vq, kind: str, split: str, num_rows: int, seed: int) -> None:
    """Write rows to a Parquet file."""
    fields = {"sample_id": pa.string(), "prompt": pa.string(), "codes": pa.list_(pa.int32())}
    schema = pa.schema(fields | ({"label": pa.int32()} if kind == "class" else {}))
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        pa.Table.from_pylist([*draw_rows(vq, kind, split, num_rows, seed)], schema), path, compression="zstd"
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m zoo.synthesis_rows", description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="Parquet file to write")
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--kind", choices=("text", "class"), default="text")
    parser.add_argument("--split", choices=tuple(SPLITS), default="train")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args(arguments)
    if options.rows < 1:
        parser.error("--rows must be at least 1")
    vq = load_vq(CheckpointRef(str(CHECKPOINTS / "image_vq")), "float32", torch.device("cpu"))
    write_rows(options.out, vq, options.kind, options.split, options.rows, options.seed)
    print(f"{options.out}: {options.rows} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
