"""Runs the demo's image synthesis: prompts of the grainy world, by plain decoding and by LANTERN's relaxed rule.

Writes the prompts, runs both jobs, and writes a sheet of the images. The caller starts Ray.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from transformers.utils.logging import disable_progress_bar

from configs.load import load_preset
from configs.synthesis import SynthesizeJob
from jobs import synthesize
from pipeline.reports import summary
from pipeline.reports.contact_sheet import contact_sheet
from pipeline.synthesis.plan import make_plan
from pipeline.synthesis.summary import ImageSummary
from zoo.demo_output import Rows, check, read_rows, show_speed
from zoo.image.gpt import class_of
from zoo.image.quality import Reader, load_reader, measure_described
from zoo.world.grain import draw_grainy_scene, write_prompt
from zoo.world.scene import scene_rng

NUM_PROMPTS = 16
SEED = 20_262
EMPTY, TOO_LONG = "prompt-empty", "prompt-long"
"""Ids of the prompts that cannot be synthesised."""
BROKEN = {EMPTY: "empty_prompt", TOO_LONG: "prompt_too_long"}
"""Ids of these prompts → their error codes."""
CONFIGS = {"lantern": "zoo_images_lantern_coupled", "plain": "zoo_images_plain"}
SIDE_PX = 192
WIDE_TREE = (
    "Below 1 on a CPU is expected: a forward over a tree of 60 drafts costs many times that of one",
    "code. On a GPU, where weights are what a forward waits for, it costs little more.",
)


def run(out: Path) -> list[str]:
    """Write prompts below `out`, synthesize them twice and print the results; return the failures. Raises ConfigError
    if a job is refused."""
    prompts = draw_prompts(NUM_PROMPTS, SEED)
    write_prompts(prompts, out / "source/prompts")
    print(f"wrote {len(prompts)} prompts into {out}/source/prompts, 2 of them broken on purpose")
    totals: dict[str, ImageSummary] = {}
    results: dict[str, Rows] = {}
    for name, preset in CONFIGS.items():
        overrides = (f"source.path={out}/source/prompts", f"sink.path={out}/images/{name}")
        config = load_preset(SynthesizeJob, preset, overrides)
        print(f"images, {config.method.label}", flush=True)
        total = synthesize.run(make_plan(config))
        assert isinstance(total, ImageSummary)
        totals[name] = total
        results[name] = read_rows(out / "images" / name, ["prompt_id", "image"])
    relaxed, plain = totals["lantern"], totals["plain"]
    print()
    print(summary.show_side_by_side(relaxed, plain))
    print()
    problems = check("images", results, {f"{row['id']}#0": BROKEN.get(row["id"], "") for row in prompts})
    if not problems:
        disable_progress_bar()
        reader = load_reader()
        for name, found in results.items():
            show_images(name, prompts, found, out / f"images_{name}.png", reader)
    ratio = relaxed.tokens_per_forward / max(plain.tokens_per_forward, 1e-9)
    print(f"forwards    codes per forward of the target, LANTERN / plain: {ratio:.2f}")
    ratio = relaxed.tokens_per_engine_s / max(plain.tokens_per_engine_s, 1e-9)
    show_speed("codes per engine second, LANTERN / plain", ratio, WIDE_TREE)
    print()
    return problems


def draw_prompts(count: int, seed: int) -> list[dict[str, Any]]:
    """Draw rows of the split `demo`, half of them of one object, with a label; two more cannot be synthesised."""
    rows: list[dict[str, Any]] = []
    for index in range(count):
        scene = draw_grainy_scene(scene_rng("grain/demo", seed, index), "demo", 1 + index % 2)
        label = class_of(scene) if len(scene.things) == 1 else None
        rows.append({"id": f"prompt-{index:02}", "prompt": write_prompt(scene), "label": label})
    rows.insert(5, {"id": EMPTY, "prompt": "   ", "label": None})
    rows.insert(9, {"id": TOO_LONG, "prompt": " and ".join(row["prompt"] for row in rows), "label": None})
    return rows


def write_prompts(rows: list[dict[str, Any]], folder: Path) -> None:
    """Write one Parquet file."""
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "prompts.parquet")


def show_images(name: str, prompts: list[dict[str, Any]], found: Rows, path: Path, reader: Reader) -> None:
    """Write all images of a run to one sheet, and print the share of prompts that they match."""
    good = [row for row in prompts if row["id"] not in BROKEN]
    files = [io.BytesIO(found[f"{row['id']}#0"]["image"]["bytes"]) for row in good]
    images = [np.asarray(Image.open(file).convert("RGB")) for file in files]
    texts = [row["prompt"] for row in good]
    path.write_bytes(contact_sheet(images, texts, side_px=SIDE_PX, title=name))
    seen = measure_described(reader, images, texts)
    shares = f"{seen.attributes:.0%} of what the prompts ask is in them, {seen.whole:.0%} have all of it"
    print(f"images      {len(images)} on {path}: {shares} (read by the captioner)")
