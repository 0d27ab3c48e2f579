"""Writes dense scenes as Parquet sources: held-out ones for caption jobs, others for training drafters."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from zoo.real_vision.labels import IMAGE_PX
from zoo.real_vision.quality import draw_asked
from zoo.world.dense import PROMPTS, write_description
from zoo.world.render import render_scene
from zoo.world.scene import scene_rng

SEED = 20_263
FILES = {"held_out": Path("source/scenes.parquet"), "train": Path("source/training.parquet")}


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
        rows.append({
            "id": f"scene-{index:05d}", "image": drawn.getvalue(), "question": PROMPTS[phrasing], "caption": caption,
        })  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    pq.write_table(pa.Table.from_pylist(rows), partial, row_group_size=64)
    os.replace(partial, path)
    return path
