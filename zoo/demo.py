"""`make demo`: captions scenes and videos and draws images in real files, speculatively and plainly, and compares runs.

Half of the scenes are in Parquet shards, half in tar shards, as PNG and JPEG files; three rows are broken on purpose.
Videos are held-out motions as mp4 files. Prompts of the grainy world are drawn by plain decoding and by LANTERN's
relaxed rule. Everything is written below `out/demo/`, which is replaced.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
import tarfile
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from transformers.utils.logging import disable_progress_bar

from configs.load import ConfigError, load_job, load_preset
from configs.pool import JobSectionConfig
from configs.schema import CaptionJobConfig
from configs.synthesis import SynthesizeJobConfig
from jobs import caption, synthesize
from pipeline.cluster import ray_session
from pipeline.reports import summary
from pipeline.reports.result_tables import list_tables, read_tables
from pipeline.run.plan import make_plan
from pipeline.sheets.contact_sheet import contact_sheet
from pipeline.storage.output_dir import DATA, ERRORS, OutputDir
from pipeline.synthesis.plan import make_plan as make_synthesis_plan
from pipeline.synthesis.summary import ImageSummary
from zoo.image.gpt import class_of
from zoo.image.quality import Reader, load_reader, measure_described
from zoo.world import sample_scenes
from zoo.world.grain import draw_grainy_scene, write_prompt
from zoo.world.grammar import parse_caption
from zoo.world.motion import Motion, draw_motion, render_motion, states, write_motion
from zoo.world.scene import Scene, scene_rng

OUT = Path("out/demo")
CONFIG = "configs/jobs/demo_caption.yaml"
NUM_SCENES, NUM_VIDEOS, NUM_PROMPTS = 256, 16, 16
SEED, VIDEO_SEED, PROMPT_SEED = 20_260, 20_261, 20_262
ROWS_PER_SHARD = 32
NOT_AN_IMAGE, TRUNCATED, NO_QUESTION = 17, 101, 200
"""Indices of the broken rows; the last one is in a tar, the others in Parquet."""
BROKEN = {NOT_AN_IMAGE: "not_an_image", TRUNCATED: "broken_image", NO_QUESTION: "missing_column_value"}
"""Their error codes."""
EMPTY, TOO_LONG = "prompt-empty", "prompt-long"
BROKEN_PROMPTS = {EMPTY: "empty_prompt", TOO_LONG: "prompt_too_long"}
"""Ids of the prompts that cannot be synthesised → their error codes."""
NUM_SHOWN, NUM_SHOWN_VIDEOS = 5, 3
RUNS = {"speculative": (), "plain": ("method.drafter.kind=none",)}
KINDS = {"parquet": ("source.kind=parquet",), "webdataset": ("source.kind=webdataset", "source.columns.image=null")}
VIDEO_PRESETS = {"speculative": "zoo_video_sd", "plain": "zoo_video_plain"}
IMAGE_PRESETS = {"lantern": "zoo_images_lantern_coupled", "plain": "zoo_images_plain"}
DURATION_S, FPS, VIDEO_PX, SHEET_PX = 3, 12, 192, 192
CODECS = ("mpeg4", "libx264")
"""Codecs that the files use in turn, lossy at their default quality."""
PHRASING = "describe"
"""Key of `zoo.world.motion.PROMPTS` that the presets use."""
SLOW_DRAFTER = (
    "Below 1 on a CPU is expected: a draft of this tiny pair costs nearly as much as a token of its",
    "target. A drafter pays where it is many times cheaper, as for a 7B target on a GPU.",
)
WIDE_TREE = (
    "Below 1 on a CPU is expected: a forward over a tree of 60 drafts costs many times that of one",
    "code. On a GPU, where weights are what a forward waits for, it costs little more.",
)
Rows = dict[str, dict[str, Any]]
"""Rows of a run by sample id."""


@dataclass(frozen=True)
class Row:
    """One scene as a row of the source: its columns, and the suffix of its image file; one row lacks its question."""

    columns: dict[str, Any]
    suffix: str
    scene: Scene


def main() -> int:
    """Run the demo in one private Ray; return 0 if every row is accounted for and all texts are equal."""
    began_s = time.monotonic()
    shutil.rmtree(OUT, ignore_errors=True)
    try:
        with ray_session.session(JobSectionConfig()):
            problems = [*caption_scenes(), *caption_videos(), *draw_images()]
    except ConfigError as error:
        print(f"refused: {error}", file=sys.stderr)
        return caption.REFUSED
    for problem in problems:
        print(f"WRONG: {problem}", file=sys.stderr)
    print(f"all of it took {time.monotonic() - began_s:.0f} s; the rows are in {OUT}/*/*/data and errors")
    return caption.FAILED if problems else caption.DONE


def caption_scenes() -> list[str]:
    """Write the scenes, caption them both ways and print the results; return the failures."""
    rows = draw_rows(NUM_SCENES, SEED)
    write_sources(rows, OUT / "source")
    print(f"wrote {len(rows)} scenes into {OUT}/source: Parquet and tar shards, PNG and JPEG, 3 rows broken on purpose")
    totals: dict[str, summary.Summary] = {}
    results: dict[str, Rows] = {run: {} for run in RUNS}
    for run, how in RUNS.items():
        parts = []
        for kind, what in KINDS.items():
            paths = (f"source.path={OUT}/source/{kind}", f"sink.path={OUT}/{run}/{kind}")
            config = load_job(CaptionJobConfig, CONFIG, (*how, *what, *paths))
            print(f"{run}, {kind} shards, {config.method.label}", flush=True)
            parts.append(caption.run(make_plan(config)))
            results[run] |= read_rows(OUT / run / kind, ["generated_text"])
        totals[run] = summary.combine(parts)
    print(f"\n{summary.show_side_by_side(totals['speculative'], totals['plain'])}")
    print(f"acceptance length = {summary.CONVENTION}\n")
    problems = check("captions", results, {row.columns["id"]: BROKEN.get(n, "") for n, row in enumerate(rows)})
    outputs = results["speculative"]
    for row in rows[:NUM_SHOWN]:
        print(f"{row.columns['id']}: {row.columns['question']}")
        show_caption(row.columns["truth"], outputs[row.columns["id"]]["generated_text"])
    good = [row for row in rows if not outputs[row.columns["id"]]["error_type"]]
    print(f"\nrows        {len(rows)} in: {len(good)} in data/, {len(rows) - len(good)} in errors/")
    parsed = [parse_caption(outputs[row.columns["id"]]["generated_text"]) for row in good]
    right = sum(reading is not None and reading[1] == row.scene.truth for reading, row in zip(parsed, good))
    print(f"captions    {right} of {len(good)} parse to the truth of their scene")
    ratio = totals["speculative"].tokens_per_engine_s / max(totals["plain"].tokens_per_engine_s, 1e-9)
    show_speed("tokens per engine second, speculative / plain", ratio, SLOW_DRAFTER)
    if not problems:
        print("texts       equal in both runs, sample by sample")
    print()
    return problems


def caption_videos() -> list[str]:
    """Write the videos, caption them both ways and print the results; return the failures."""
    motions = write_videos(OUT / "source/videos", NUM_VIDEOS, VIDEO_SEED)
    codecs = " and ".join(CODECS)
    print(f"wrote {len(motions)} mp4 files of {DURATION_S} s into {OUT}/source/videos, by {codecs} in turn")
    results: dict[str, Rows] = {}
    for run, preset in VIDEO_PRESETS.items():
        where = OUT / run / "videos"
        config = load_preset(CaptionJobConfig, preset, (f"source.path={OUT}/source/videos", f"sink.path={where}"))
        print(f"{run}, mp4 files, {config.method.label}", flush=True)
        caption.run(make_plan(config))
        rows = read_rows(where, ["generated_text"])
        results[run] = {sample_id.partition("#")[0]: row for sample_id, row in rows.items()}
    print()
    texts = {name: results["speculative"].get(name, {}).get("generated_text", "") for name in motions}
    for name, motion in list(motions.items())[:NUM_SHOWN_VIDEOS]:
        print(name)
        show_caption(write_motion(motion, PHRASING, scene_rng("demo", VIDEO_SEED, 0)), texts[name])
    right = sum(states(motion, PHRASING, texts[name]) for name, motion in motions.items())
    print(f"\nvideos      {right} of {len(motions)} captions say what moved from where to where, and what stayed")
    problems = check("videos", results, dict.fromkeys(motions, ""))
    if not problems:
        print("texts       equal in both runs, video by video")
    return problems


def draw_images() -> list[str]:
    """Write prompts, synthesize them twice and print the results; return the failures."""
    prompts = draw_prompts(NUM_PROMPTS, PROMPT_SEED)
    write_prompts(prompts, OUT / "source/prompts")
    print(f"wrote {len(prompts)} prompts into {OUT}/source/prompts, 2 of them broken on purpose")
    totals: dict[str, ImageSummary] = {}
    results: dict[str, Rows] = {}
    for name, preset in IMAGE_PRESETS.items():
        overrides = (f"source.path={OUT}/source/prompts", f"sink.path={OUT}/images/{name}")
        config = load_preset(SynthesizeJobConfig, preset, overrides)
        print(f"images, {config.method.label}", flush=True)
        total = synthesize.run(make_synthesis_plan(config))
        assert isinstance(total, ImageSummary)
        totals[name] = total
        results[name] = read_rows(OUT / "images" / name, ["prompt_id", "image"])
    relaxed, plain = totals["lantern"], totals["plain"]
    print(f"\n{summary.show_side_by_side(relaxed, plain)}\n")
    problems = check("images", results, {f"{row['id']}#0": BROKEN_PROMPTS.get(row["id"], "") for row in prompts})
    if not problems:
        disable_progress_bar()
        reader = load_reader()
        for name, rows in results.items():
            show_images(name, prompts, rows, OUT / f"images_{name}.png", reader)
    ratio = relaxed.tokens_per_forward / max(plain.tokens_per_forward, 1e-9)
    print(f"forwards    codes per forward of the target, LANTERN / plain: {ratio:.2f}")
    ratio = relaxed.tokens_per_engine_s / max(plain.tokens_per_engine_s, 1e-9)
    show_speed("codes per engine second, LANTERN / plain", ratio, WIDE_TREE)
    print()
    return problems


def draw_rows(count: int, seed: int) -> list[Row]:
    """Draw scenes as rows, alternating PNG and JPEG, including the three broken rows."""
    rows = []
    for index, (scene, picture, truth, question) in enumerate(sample_scenes("demo", count, seed)):
        suffix, form, options = (("png", "PNG", {}), ("jpg", "JPEG", {"quality": 95}))[index % 2]
        buffer = io.BytesIO()
        picture.save(buffer, form, **options)
        data = buffer.getvalue()
        if index == NOT_AN_IMAGE:
            data = b"<html>404 Not Found</html>"
        elif index == TRUNCATED:
            data = data[: len(data) // 2]
        asked = None if index == NO_QUESTION else question
        columns = {"id": f"scene-{index:03}", "image": data, "question": asked, "truth": truth}
        rows.append(Row(columns, suffix, scene))
    return rows


def write_sources(rows: list[Row], folder: Path) -> None:
    """Write the first half as Parquet shards, the second as tar shards."""
    half = len(rows) // 2
    for name, part, write in (("parquet", rows[:half], write_parquet), ("webdataset", rows[half:], write_tar)):
        (folder / name).mkdir(parents=True)
        for number, start in enumerate(range(0, len(part), ROWS_PER_SHARD)):
            write(part[start : start + ROWS_PER_SHARD], folder / name / f"shard-{number:03}")


def write_parquet(rows: list[Row], path: Path) -> None:
    """Write one shard: image bytes and the row's texts as columns."""
    pq.write_table(pa.Table.from_pylist([row.columns for row in rows]), path.with_suffix(".parquet"))


def write_tar(rows: list[Row], path: Path) -> None:
    """Write one shard: an image and a JSON file per sample."""
    with tarfile.open(path.with_suffix(".tar"), "w") as tar:
        for row in rows:
            texts = {name: value for name, value in row.columns.items() if name != "image" and value is not None}
            for suffix, data in ((row.suffix, row.columns["image"]), ("json", json.dumps(texts).encode())):
                member = tarfile.TarInfo(f"{row.columns['id']}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def write_videos(folder: Path, count: int, seed: int) -> dict[str, Motion]:
    """Draw motions of the split `demo` and write one mp4 file of each; return the motions by file name."""
    folder.mkdir(parents=True)
    motions = {}
    for index in range(count):
        motion, name = draw_motion(scene_rng("demo", seed, index), "demo"), f"motion-{index:02}.mp4"
        with av.open(str(folder / name), "w") as output:
            stream = output.add_stream(CODECS[index % len(CODECS)], rate=FPS)
            stream.width, stream.height, stream.pix_fmt = VIDEO_PX, VIDEO_PX, "yuv420p"
            for frame in render_motion(motion, DURATION_S * FPS, VIDEO_PX):
                output.mux(stream.encode(av.VideoFrame.from_image(frame)))
            output.mux(stream.encode())
        motions[name] = motion
    return motions


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


def read_rows(output: Path, columns: Sequence[str]) -> Rows:
    """Read all rows of an output, those in errors/ included."""
    directory = OutputDir(str(output))
    tables = read_tables(directory, list_tables(directory, (DATA, ERRORS)), ["sample_id", "error_type", *columns])
    return {row["sample_id"]: row for table in tables for row in table.to_pylist()}


def check(noun: str, results: dict[str, Rows], wanted: dict[str, str]) -> list[str]:
    """Return the failures of runs by name: ids or error codes unlike `wanted`, and texts that differ between runs."""
    problems = []
    for name, rows in results.items():
        wrong = sorted({key: row["error_type"] for key, row in rows.items()}.items() ^ wanted.items())
        if wrong:
            problems.append(f"{noun}, {name}: rows are not as planned: {wrong[:4]}")
    texts = [{key: row.get("generated_text") for key, row in rows.items()} for rows in results.values()]
    if any(some != texts[0] for some in texts):
        problems.append(f"{noun}: results differ between the runs")
    return problems


def show_caption(truth: str, text: str) -> None:
    """Print a caption below the truth."""
    for label, content in (("truth", truth), ("caption", text)):
        print(textwrap.fill(content, 112, initial_indent=f"  {label:<8}", subsequent_indent=" " * 10))


def show_speed(measure: str, ratio: float, reason: Sequence[str]) -> None:
    """Print a speed-up; `reason` explains one below 1."""
    print(f"speed       {measure}: {ratio:.2f}")
    if ratio < 1:
        print(*(f"            {line}" for line in reason), sep="\n")


def show_images(name: str, prompts: list[dict[str, Any]], rows: Rows, path: Path, reader: Reader) -> None:
    """Write all images of a run to one sheet, and print the share of prompts that they match."""
    good = [row for row in prompts if row["id"] not in BROKEN_PROMPTS]
    files = [io.BytesIO(rows[f"{row['id']}#0"]["image"]["bytes"]) for row in good]
    images = [np.asarray(Image.open(file).convert("RGB")) for file in files]
    texts = [row["prompt"] for row in good]
    path.write_bytes(contact_sheet(images, texts, side_px=SHEET_PX, title=name))
    described = measure_described(reader, images, texts)
    shares = f"{described.attributes:.0%} of what the prompts ask is in them, {described.whole:.0%} have all of it"
    print(f"images      {len(images)} on {path}: {shares} (read by the captioner)")


if __name__ == "__main__":
    sys.exit(main())
