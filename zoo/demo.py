"""`make demo`: captions scenes in real files speculatively and plainly, and compares both runs.

Half of the scenes are in Parquet shards, half in tar shards, as PNG and JPEG files; three rows are broken on purpose.
Videos as mp4 files follow (`zoo.demo_videos`), then prompts for images (`zoo.demo_images`). Everything is written below
`out/demo/`, which is replaced.
"""

from __future__ import annotations

import io
import itertools
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
from configs.schema import CaptionJob, Job
from jobs import caption
from pipeline.cluster import ray_session
from pipeline.reports import summary
from pipeline.run.plan import make_plan
from zoo import demo_images, demo_videos
from zoo.demo_output import Rows, errors_of, read_rows, show_caption, show_speed
from zoo.world import Scene, demo_scenes, parse_caption

OUT = Path("out/demo")
CONFIG = "configs/jobs/demo_caption.yaml"
NUM_SCENES = 256
SEED = 20_260
ROWS_PER_SHARD = 32
NOT_AN_IMAGE, TRUNCATED, NO_QUESTION = 17, 101, 200
"""Indices of the broken rows; the last one is in a tar, the others in Parquet."""
NUM_SHOWN = 5
RUNS = {"speculative": (), "plain": ("method.drafter.kind=none",)}
SLOW_DRAFTER = (
    "Below 1 on a CPU is expected: a draft of this tiny pair costs nearly as much as a token of its",
    "target. A drafter pays where it is many times cheaper, as for a 7B target on a GPU.",
)
KINDS = {"parquet": ("source.kind=parquet",), "webdataset": ("source.kind=webdataset", "source.columns.image=null")}


@dataclass(frozen=True)
class Row:
    """One scene as a row of the source; `question` is None in the row that lacks it."""

    sample_id: str
    image: bytes
    suffix: str
    question: str | None
    truth: str
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
    totals = caption_both_ways()
    columns = ["status", "generated_text"]
    results = {run: {k: v for kind in KINDS for k, v in read_rows(OUT / run / kind, columns).items()} for run in RUNS}
    print()
    print(summary.show_side_by_side(totals["speculative"], totals["plain"]))
    print(f"acceptance length = {summary.CONVENTION}")
    problems = check(rows, results)
    print()
    for row in rows[:NUM_SHOWN]:
        print(f"{row.sample_id}: {row.question}")
        show_caption(row.truth, results["speculative"][row.sample_id]["generated_text"])
    print()
    show_verdict(rows, results["speculative"], totals)
    if not problems:
        print("texts       equal in both runs, sample by sample")
    print()
    return problems


# --- the source ----------------------------------------------------------------------------------------------------


def draw_rows(count: int, seed: int) -> list[Row]:
    """Draw scenes as rows, alternating PNG and JPEG, including the three broken rows."""
    rows = []
    for index, (scene, picture, truth, question) in enumerate(demo_scenes(count, seed)):
        suffix, form, options = (("png", "PNG", {}), ("jpg", "JPEG", {"quality": 95}))[index % 2]
        buffer = io.BytesIO()
        picture.save(buffer, form, **options)
        data = buffer.getvalue()
        if index == NOT_AN_IMAGE:
            data = b"<html>404 Not Found</html>"
        elif index == TRUNCATED:
            data = data[: len(data) // 2]
        rows.append(Row(f"scene-{index:03}", data, suffix, None if index == NO_QUESTION else question, truth, scene))
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
    columns: dict[str, list[Any]] = {
        "id": [row.sample_id for row in rows],
        "image": [row.image for row in rows],
        "question": [row.question for row in rows],
        "truth": [row.truth for row in rows],
    }
    pq.write_table(pa.table(columns), path.with_suffix(".parquet"))


def write_tar(rows: list[Row], path: Path) -> None:
    """Write one shard: an image and a JSON file per sample."""
    with tarfile.open(path.with_suffix(".tar"), "w") as tar:
        for row in rows:
            texts = {"id": row.sample_id, "question": row.question, "truth": row.truth}
            texts = {name: text for name, text in texts.items() if text is not None}
            for suffix, data in ((row.suffix, row.image), ("json", json.dumps(texts).encode())):
                member = tarfile.TarInfo(f"{row.sample_id}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


# --- the runs ------------------------------------------------------------------------------------------------------


def caption_both_ways() -> dict[str, summary.Summary]:
    """Run every job; return the summaries of both runs, each over both kinds of shards.

    Raises:
        ConfigError: a job is refused.
    """
    jobs = {}
    for (run, how), (kind, what) in itertools.product(RUNS.items(), KINDS.items()):
        paths = (f"source.path={OUT}/source/{kind}", f"sink.path={OUT}/{run}/{kind}")
        jobs[run, kind] = load_job(CaptionJob, CONFIG, (*how, *what, *paths))
    parts: dict[str, list[summary.Summary]] = {run: [] for run in RUNS}
    for (run, kind), config in jobs.items():
        print(f"{run}, {kind} shards, {config.method.label}", flush=True)
        parts[run].append(caption.run(make_plan(config)))
    return {run: summary.combine(found) for run, found in parts.items()}


def check(rows: list[Row], results: dict[str, Rows]) -> list[str]:
    """Return the failures: wrong ids, wrong error codes, and texts that differ between the runs."""
    expected_errors = {
        rows[NOT_AN_IMAGE].sample_id: "not_an_image",
        rows[TRUNCATED].sample_id: "broken_image",
        rows[NO_QUESTION].sample_id: "missing_column_value",
    }
    problems = []
    for name, found in results.items():
        if set(found) != {row.sample_id for row in rows}:
            problems.append(f"{name}: {len(found)} ids in the output, {len(rows)} in the source")
        if errors_of(found) != expected_errors:
            problems.append(f"{name}: the rows in errors/ are {errors_of(found)}, not {expected_errors}")
    texts = {name: {key: row["generated_text"] for key, row in found.items()} for name, found in results.items()}
    different = [key for key, text in texts["speculative"].items() if text != texts["plain"].get(key)]
    if different:
        problems.append(f"{len(different)} texts differ between the runs, the first is {different[0]}")
    return problems


def show_verdict(rows: list[Row], found: Rows, totals: dict[str, summary.Summary]) -> None:
    """Account for all rows, check captions against their scenes, and print the speed-up."""
    good = [row for row in rows if not found[row.sample_id]["error_type"]]
    print(f"rows        {len(rows)} in: {len(good)} in data/, {len(rows) - len(good)} in errors/")
    parsed = [parse_caption(found[row.sample_id]["generated_text"]) for row in good]
    right = sum(one is not None and one[1] == row.scene.truth for one, row in zip(parsed, good))
    print(f"captions    {right} of {len(good)} parse to the truth of their scene")
    ratio = totals["speculative"].tokens_per_engine_s / max(totals["plain"].tokens_per_engine_s, 1e-9)
    show_speed("tokens per engine second, speculative / plain", ratio, SLOW_DRAFTER)


if __name__ == "__main__":
    sys.exit(main())
