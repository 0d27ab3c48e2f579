"""Writes rows of the image world as Parquet: `python -m zoo.synthesis_rows OUT --rows N`.

Training data of image drafters (`jobs/train_drafter.py`) and prompts of synthesis jobs. Columns: `sample_id`, `prompt`,
`codes` (by the zoo's VQ model, in raster order), `image` if requested, and `label` for the class-conditional model.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from models.llamagen.vq import Vq
from models.llamagen.vq_files import load_vq
from models.loading.checkpoints import CheckpointRef
from zoo.image.gpt import class_of, draw_scenes
from zoo.image.vq import pixels_of
from zoo.pair import CHECKPOINTS
from zoo.training import keep_memory
from zoo.world.grain import render_grainy, write_prompt
from zoo.world.scene import SPLITS

ROWS_AT_ONCE = 50
# Rows outside the training data of the shipped GPTs in the same split, whose seeds start at 0.
SEED = 1000


def schema_of(kind: str, images: bool) -> pa.Schema:
    """Return the columns of a file: `kind` is text or class."""
    fields = [("sample_id", pa.string()), ("prompt", pa.string()), ("codes", pa.list_(pa.int32()))]
    fields += [("label", pa.int32())] if kind == "class" else []
    fields += [("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())]))] if images else []
    return pa.schema(fields)


def draw_tables(vq: Vq, kind: str, split: str, num_rows: int, seed: int, images: bool) -> Iterator[pa.Table]:
    """Yield tables of at most 50 rows; the same arguments yield the same rows."""
    for start in range(0, num_rows, ROWS_AT_ONCE):
        scenes = draw_scenes(kind, split, min(ROWS_AT_ONCE, num_rows - start), seed, start)
        pictures = [render_grainy(scene) for scene in scenes]
        columns: dict[str, list[object]] = {
            "sample_id": [f"{split}-{seed}-{start + n}" for n in range(len(scenes))],
            "prompt": [write_prompt(scene) for scene in scenes],
            "codes": vq.encode(pixels_of(pictures)).flatten(1).tolist(),
        }
        if kind == "class":
            columns["label"] = [class_of(scene) for scene in scenes]
        if images:
            columns["image"] = [{"bytes": _png(picture), "path": None} for picture in pictures]
        yield pa.table(columns, schema=schema_of(kind, images))


def _png(picture: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return buffer.getvalue()


def write_rows(path: Path, vq: Vq, kind: str, split: str, num_rows: int, seed: int, images: bool = False) -> None:
    """Write rows to a Parquet file, under a temporary name until it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    with pq.ParquetWriter(partial, schema_of(kind, images), compression="zstd") as writer:
        for table in draw_tables(vq, kind, split, num_rows, seed, images):
            writer.write_table(table)
    partial.rename(path)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m zoo.synthesis_rows", description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="Parquet file to write")
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--kind", choices=("text", "class"), default="text")
    parser.add_argument("--split", choices=tuple(SPLITS), default="train")
    parser.add_argument("--images", action="store_true", help="write the pictures too, as PNG")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--vq", type=Path, default=CHECKPOINTS / "image_vq")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    if options.rows < 1:
        parser.error("--rows must be at least 1")
    keep_memory()
    torch.set_num_threads(options.threads)
    vq = load_vq(CheckpointRef(str(options.vq)), "float32", torch.device("cpu"))
    write_rows(options.out, vq, options.kind, options.split, options.rows, options.seed, options.images)
    print(f"{options.out}: {options.rows} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
