"""`python -m jobs.train_drafter`: teach an EAGLE or Medusa head on a target with the rows of an ordinary source.

One process; rows are read into memory, so `training.max_rows` bounds it. Exit status: 0 done, 2 refused.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from actors.pair import load_target
from actors.teaching import Lesson, acceptance, accuracy, make_lesson, teach
from configs.load import ConfigError, load_job
from configs.training import TrainDrafterJob
from models.eagle import EagleNetwork, save_eagle
from models.front_end import PromptError
from models.medusa import save_medusa
from models.target import Target
from pipeline.datasource import read_first
from pipeline.manifest import freeze
from pipeline.media import DecodeOptions, decode_table, pixels
from pipeline.prompts import placeholders

DONE, REFUSED = 0, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one job from the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m jobs.train_drafter", description=__doc__)
    parser.add_argument("--config", required=True, type=Path, help="the job's YAML")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="values that replace the YAML's")
    arguments = parser.parse_intermixed_args(sys.argv[1:] if argv is None else argv)
    try:
        run(load_job(TrainDrafterJob, arguments.config, tuple(arguments.overrides)))
    except ConfigError as error:
        print(f"refused: {error}", file=sys.stderr)
        return REFUSED
    return DONE


def run(job: TrainDrafterJob) -> dict[str, Any]:
    """Train, measure on held-out rows, write the head and `training.json`; returns what was measured.

    Raises:
        ConfigError: the output exists, the target or the source cannot be used, or too few rows are left.
    """
    out = Path(job.output.path)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"output.path: {out} is not empty; choose another folder")
    table = read_rows(job)
    target = load_target(job.target, "target")
    started = time.monotonic()
    lessons, left_out = make_lessons(job, target, table)
    num_held_out = job.training.held_out_rows
    if len(lessons) < num_held_out + job.training.batch_rows:
        raise ConfigError(
            f"source: {len(lessons)} rows can be learned from ({json.dumps(left_out)} left out); held_out_rows and one "
            f"batch need {num_held_out + job.training.batch_rows}"
        )
    taught, held_out = lessons[:-num_held_out], lessons[-num_held_out:]
    head = teach(job, target, taught, lambda line: print(line, file=sys.stderr, flush=True))
    measured = {
        **accuracy(head, target, held_out, job.training.batch_rows),
        **acceptance(head, target, held_out, max_new_tokens=128),
        "num_taught_rows": len(taught),
        "num_held_out_rows": len(held_out),
        "left_out": left_out,
        "seconds": round(time.monotonic() - started, 1),
    }
    if isinstance(head, EagleNetwork):
        save_eagle(head, out, target.dtype)
    else:
        save_medusa(head, out, target.dtype)
    record = {"job": job.model_dump(mode="json"), "torch": torch.__version__, "measured": measured}
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(measured, indent=1))
    print(f"head          {out} (as model.drafter.path, with method.drafter.kind={job.head.kind})")
    return measured


def read_rows(job: TrainDrafterJob) -> Any:
    """The first rows of the source, decoded: a table of the stage `decoded` that keeps the answer column."""
    manifest = freeze(job.source, job.prompt, (job.answer_column,))
    fields = tuple(placeholders(job.prompt))
    table = read_first(job.source, manifest, fields, job.training.max_rows)
    options = DecodeOptions(job.prompt, job.source.max_image_pixels, job.source.max_side_px)
    return decode_table(table, options)


def make_lessons(job: TrainDrafterJob, target: Target, table: Any) -> tuple[list[Lesson], dict[str, int]]:
    """Rows as lessons, and by code how many could not become one."""
    lessons: list[Lesson] = []
    left_out: dict[str, int] = {}
    columns = {name: table.column(name).to_pylist() for name in ("sample_id", "messages", "error_type")}
    answers = table.column(job.answer_column).to_pylist()
    images = table.column("images")
    for row, code in enumerate(columns["error_type"]):
        reason = code or ("missing_answer" if not answers[row] else "")
        if not reason:
            try:
                prompt = target.front_end.render(json.loads(columns["messages"][row]))
                answer = f"{job.answer_prefix}{answers[row]}"
                lesson = make_lesson(target, columns["sample_id"][row], prompt, pixels(images[row]), answer)
            except PromptError:
                reason = "prompt_refused"
            except ValueError as error:
                raise ConfigError(f"target: {error}") from None
            else:
                if lesson.ids.shape[0] <= job.training.max_tokens:
                    lessons.append(lesson)
                    continue
                reason = "too_long"
        left_out[reason] = left_out.get(reason, 0) + 1
    return lessons, left_out


if __name__ == "__main__":
    sys.exit(main())
