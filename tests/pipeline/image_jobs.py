"""Finished outputs of synthesis jobs without Ray and without models: real prompts, and images that are easy to know."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from configs.synthesis import ImageFileConfig, SynthesizeJobConfig
from pipeline.cluster.partitions import IN_PROCESS
from pipeline.manifest.manifest_parts import reopen
from pipeline.run.job_plan import DEFAULT_RESUME
from pipeline.run.plan import checked
from pipeline.storage.output_dir import OutputDir
from pipeline.synthesis.files import encode_image, file_name
from pipeline.synthesis.plan import SynthesisPlan, needs_of
from tests.pipeline.attempts import end, save, start

SIDE_PX = 8
PNG = ImageFileConfig()


class ImagePairInfo:
    """What is known of an image pair that does not exist."""

    target_id, drafter_id = "fake", ""
    revisions: ClassVar = {"target": "t0"}
    image_px = SIDE_PX
    target = SimpleNamespace(condition="text", condition_dim=4, num_condition_tokens=8, num_classes=0, grid=4)


def image_synthesis(folder: Path, prompts: list[str], output: str = "out", **sections: Any) -> SynthesizeJobConfig:
    """A synthesis job of a fake pair: `prompts` in a text file, two images each."""
    (folder / "prompts").mkdir(parents=True, exist_ok=True)
    (folder / "prompts/p.txt").write_text("".join(f"{prompt}\n" for prompt in prompts))
    data = {
        "source": {"kind": "text", "path": str(folder / "prompts")},
        "prompt": "{text}",
        "model": {name: {"path": "fake"} for name in ("target", "vq", "condition")},
        "sampling": {"num_images_per_prompt": 2, "guidance_scale": 3.0},
        **sections,
        "sink": {
            "path": str(folder / output),
            "rows_per_file": 4,
            "max_unsaved_seconds": 0.0,
            **sections.get("sink", {}),
        },
    }
    return SynthesizeJobConfig.model_validate_json(json.dumps(data))


def picture(number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The pixels of the image with this number: one colour."""
    return np.full((SIDE_PX, SIDE_PX, 3), (number * 20 % 256, 100, 200), np.uint8)


def image_rows(plan: SynthesisPlan, attempt: int, fails: Callable[[str], bool]) -> list[pa.Table]:
    """Result rows of all prompts."""
    batches = []
    for span in range(plan.datasource.num_spans):
        read = plan.datasource.read(span)
        rows = []
        for sample in read.select(["sample_id", "source", "row_index", "fields"]).to_pylist():
            for replica in range(plan.rows_per_sample):
                own, number = f"{sample['sample_id']}#{replica}", 2 * sample["row_index"] + replica
                is_bad = fails(own)
                image = {"bytes": encode_image(picture(number), PNG), "path": file_name(own, PNG)}
                rows.append(
                    {
                        **{name: sample[name] for name in ("source", "row_index")},
                        **{"sample_id": own, "prompt_id": sample["sample_id"], "replica": replica},
                        **{"job_id": "j", "attempt": attempt, "seed": 7, "guidance_scale": 3.0, "temperature": 1.0},
                        "status": "error" if is_bad else "success",
                        "error_type": "engine_died" if is_bad else "",
                        "error_message": "",
                        "finish_reason": "error" if is_bad else "length",
                        "image": None if is_bad else image,
                        "width_px": 0 if is_bad else SIDE_PX,
                        "height_px": 0 if is_bad else SIDE_PX,
                        "codes": [] if is_bad else [number] * 16,
                        "prompt": json.loads(sample["fields"])["text"],
                        "num_generated_tokens": 16,
                        "method": "plain",
                        "verify_mode": "lossless",
                        "telemetry": {"num_spec_steps": 16, "num_draft_tokens": 0, "num_accepted_draft_tokens": 0},
                    }
                )
        texts = {field.name: "" for field in plan.schema if field.type == pa.string()}
        whole = [texts | {name: row[name] for name in row if name in plan.schema.names} for row in rows]
        batches.append(pa.Table.from_pylist(whole, plan.schema))
    return batches


def run_images(config: SynthesizeJobConfig, fails: Callable[[str], bool] = lambda own: False) -> SynthesisPlan:
    """Run a whole attempt of a job of the fake pair and return its plan."""
    output, info = OutputDir(config.sink.path), ImagePairInfo()
    reopened = reopen(needs_of(config), output, False)
    plan = SynthesisPlan(config, info, reopened.manifest, output, None, DEFAULT_RESUME)  # type: ignore[arg-type]
    plan = checked(plan, reopened.gone, IN_PROCESS, probe_output=False)
    plan, begun = start(plan)
    save(plan, begun, image_rows(plan, begun.publisher.attempt, fails))
    end(plan, begun)
    return plan
