"""`python -m zoo.real_vision`: build target and drafters of the vision pair from SmolLM2 and the differences to it.

    python -m zoo.real_vision [--out out/real_vision] [--scenes 256]

needs the folder of `python -m zoo.real`. It also builds two drafters, `strong_drafter` and `weak_drafter`, and draws
the scenes that configs/jobs/real_vision.yaml captions and those that configs/jobs/train_real_vision.yaml trains a
drafter on. A second call builds nothing.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from zoo.real import drafters
from zoo.real.model import Refused
from zoo.real_vision.model import IMAGE_PX, ensure
from zoo.world.dense import PROMPTS, draw_asked, write_description
from zoo.world.render import render_scene
from zoo.world.scene import scene_rng

OUT = Path("out/real_vision")
NUM_SCENES, NUM_TRAINING = 256, 384
SEED = 20_263
FILES = {"held_out": Path("source/scenes.parquet"), "train": Path("source/training.parquet")}
DRAFTERS = {"strong": drafters.STRONG, "weak": drafters.WEAK}


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the folder; return 0, or 2 with a message if it cannot be built."""
    parser = argparse.ArgumentParser(prog="python -m zoo.real_vision", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder to write (default: {OUT})")
    parser.add_argument("--scenes", type=int, default=NUM_SCENES, help=f"scenes to draw (default: {NUM_SCENES})")
    options = parser.parse_args(arguments)
    if options.scenes < 1:
        parser.error("--scenes must be at least 1")
    target, state = options.out / "target", {True: "built", False: "already there"}
    try:
        is_new = ensure(target)
        print(f"{target}: LLaVA model of SmolLM2-135M-Instruct, float32, {state[is_new]}")
        for name, path in DRAFTERS.items():
            folder = options.out / f"{name}_drafter"
            is_new = drafters.ensure(folder, target, path, drafters.digest(drafters.VISION_TARGET))
            print(f"{folder}: drafter of it, bfloat16, {state[is_new]}")
    except Refused as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    for split, num in (("held_out", options.scenes), ("train", NUM_TRAINING)):
        print(f"{write_scenes(options.out, num, split)}: {num} scenes with questions and true captions")
    return 0


def write_scenes(folder: Path, num: int, split: str = "held_out") -> Path:
    """Write `num` rows with `id`, `image` (PNG), `question` and `caption` below `folder`; return the file.

    `caption` is a true one: its attributes are right, and its filler words are drawn. A file of as many rows is kept.
    """
    path = folder / FILES[split]
    if path.is_file() and pq.read_metadata(path).num_rows == num:
        return path
    rows = []
    for index, (scene, phrasing) in enumerate(draw_asked(split, num, SEED)):
        drawn = io.BytesIO()
        render_scene(scene, IMAGE_PX).save(drawn, "PNG")
        caption = write_description(scene, phrasing, scene_rng(split, SEED, index))
        row = {"id": f"scene-{index:05d}", "image": drawn.getvalue(), "question": PROMPTS[phrasing], "caption": caption}
        rows.append(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    pq.write_table(pa.Table.from_pylist(rows), partial, row_group_size=64)
    os.replace(partial, path)
    return path


if __name__ == "__main__":
    sys.exit(main())
