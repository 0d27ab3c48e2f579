"""Writes dense scenes of the split `held_out` as a Parquet source for caption jobs."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from zoo.real_vision.labels import IMAGE_PX
from zoo.real_vision.quality import held_out
from zoo.world.dense import PROMPTS, write_description
from zoo.world.render import render_scene
from zoo.world.scene import scene_rng

SEED = 20_263
FILE = Path("source/scenes.parquet")


def write_scenes(folder: Path, num: int) -> Path:
    """Write `num` rows with `id`, `image` (PNG), `question` and `caption` below `folder`; return the file.

    `caption` is a true one: its attributes are right, and its filler words are drawn. A file of as many rows is kept.
    """
    path = folder / FILE
    if path.is_file() and pq.read_metadata(path).num_rows == num:
        return path
    rows = []
    for index, (scene, phrasing) in enumerate(held_out(num, SEED)):
        drawn = io.BytesIO()
        render_scene(scene, IMAGE_PX).save(drawn, "PNG")
        caption = write_description(scene, phrasing, scene_rng("held_out", SEED, index))
        rows.append({
            "id": f"scene-{index:05d}", "image": drawn.getvalue(), "question": PROMPTS[phrasing], "caption": caption,
        })  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    pq.write_table(pa.Table.from_pylist(rows), partial, row_group_size=64)
    os.replace(partial, path)
    return path
