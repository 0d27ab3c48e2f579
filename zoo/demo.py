"""`make demo`: captions scenes in real files speculatively and plainly, and compares both runs.

Half of the scenes are in Parquet shards, half in tar shards, as PNG and JPEG files; three rows are broken on purpose.
Videos as mp4 files follow (`zoo.demo_videos`), then prompts for images (`zoo.demo_images`). Everything is written below
`out/demo/`, which is replaced.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from configs.load import ConfigError, load_job
from configs.pool import Job
from configs.schema import CaptionJob
from jobs import caption
from pipeline.cluster import ray_session
from pipeline.reports import summary
from pipeline.run.plan import make_plan
from zoo import demo_images, demo_videos
from zoo.demo_output import Rows, check, read_rows, show_caption, show_speed
from zoo.world import sample_scenes
from zoo.world.grammar import parse_caption
from zoo.world.scene import Scene

OUT = Path("out/demo")
CONFIG = "configs/jobs/demo_caption.yaml"
NUM_SCENES = 256
SEED = 20_260
ROWS_PER_SHARD = 32
NOT_AN_IMAGE, TRUNCATED, NO_QUESTION = 17, 101, 200
"""Indices of the broken rows; the last one is in a tar, the others in Parquet."""
BROKEN = {NOT_AN_IMAGE: "not_an_image", TRUNCATED: "broken_image", NO_QUESTION: "missing_column_value"}
"""Their error codes."""
NUM_SHOWN = 5
RUNS = {"speculative": (), "plain": ("method.drafter.kind=none",)}
SLOW_DRAFTER = (
    "Below 1 on a CPU is expected: a draft of this tiny pair costs nearly as much as a token of its",
    "target. A drafter pays where it is many times cheaper, as for a 7B target on a GPU.",
)
KINDS = {"parquet": ("source.kind=parquet",), "webdataset": ("source.kind=webdataset", "source.columns.image=null")}


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
        with ray_session.session(Job()):
            problems = [*caption_scenes(), *demo_videos.run(OUT), *demo_images.run(OUT)]
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
            config = load_job(CaptionJob, CONFIG, (*how, *what, *paths))
            print(f"{run}, {kind} shards, {config.method.label}", flush=True)
            parts.append(caption.run(make_plan(config)))
            results[run] |= read_rows(OUT / run / kind, ["generated_text"])
        totals[run] = summary.combine(parts)
    print()
    print(summary.show_side_by_side(totals["speculative"], totals["plain"]))
    print(f"acceptance length = {summary.CONVENTION}")
    wanted = {row.columns["id"]: BROKEN.get(index, "") for index, row in enumerate(rows)}
    problems = check("captions", results, wanted)
    print()
    found = results["speculative"]
    for row in rows[:NUM_SHOWN]:
        print(f"{row.columns['id']}: {row.columns['question']}")
        show_caption(row.columns["truth"], found[row.columns["id"]]["generated_text"])
    print()
    good = [row for row in rows if not found[row.columns["id"]]["error_type"]]
    print(f"rows        {len(rows)} in: {len(good)} in data/, {len(rows) - len(good)} in errors/")
    parsed = [parse_caption(found[row.columns["id"]]["generated_text"]) for row in good]
    right = sum(one is not None and one[1] == row.scene.truth for one, row in zip(parsed, good))
    print(f"captions    {right} of {len(good)} parse to the truth of their scene")
    ratio = totals["speculative"].tokens_per_engine_s / max(totals["plain"].tokens_per_engine_s, 1e-9)
    show_speed("tokens per engine second, speculative / plain", ratio, SLOW_DRAFTER)
    if not problems:
        print("texts       equal in both runs, sample by sample")
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


if __name__ == "__main__":
    sys.exit(main())
