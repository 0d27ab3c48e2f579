"""The shipped image drafters were trained by the training job for the shipped targets, with the documented accuracy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.load import load_job
from configs.training import TrainDrafterJobConfig
from models.heads.formats import EAGLE
from models.heads.loader import load_head
from models.heads.training.losses import EagleTask
from models.heads.training.teacher import make_training_sample
from models.heads.training.trainer import count_right
from models.llamagen.checkpoints import load_gpt
from models.llamagen.condition import load_t5
from models.llamagen.eagle import image_head
from models.llamagen.target import LlamaGenTarget
from models.llamagen.vq_files import load_vq
from models.loading.checkpoints import CheckpointRef
from zoo.pair import CHECKPOINTS
from zoo.synthesis_rows import draw_rows

CPU = torch.device("cpu")
KINDS = {"text": "image", "class": "image_class"}


def training_record(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((CHECKPOINTS / f"{name}_eagle" / "training.json").read_text())
    return record


@pytest.mark.parametrize("name", KINDS.values())
def test_a_shipped_drafter_was_trained_with_its_preset(name: str) -> None:
    config = load_job(TrainDrafterJobConfig, f"configs/jobs/train_zoo_{name}_eagle.yaml")
    job = config.model_dump(mode="json") | {"prompt": config.prompt.content()}
    recorded = training_record(name)["job"]
    # Newer than the shipped heads; its default is the type that they were trained with.
    assert job["training"].pop("gemm_dtype") == "auto"
    assert job["target"]["dtype"] == "float32"
    for part in ("image", "target", "head", "training", "acceptance", "prompt"):
        assert recorded[part] == job[part], part


@pytest.mark.parametrize("name", KINDS.values())
def test_the_zoos_readme_has_the_measured_values(name: str) -> None:
    readme = (Path(CHECKPOINTS).parent / "README.md").read_text()
    (row,) = re.findall(rf"^\| `{name}_eagle` \|.*\| (\S+) \| (\S+) \| (\S+) \|$", readme, re.MULTILINE)
    measured = training_record(name)["measured"]
    expected = [measured[key] for key in ("top1_accuracy", "top3_accuracy", "mean_acceptance_length")]
    assert list(row) == [f"{expected[0]:.3f}", f"{expected[1]:.3f}", f"{expected[2]:.2f}"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_shipped_drafter_predicts_its_target_on_held_out_images(kind: str) -> None:
    name = KINDS[kind]
    gpt = load_gpt(CheckpointRef(str(CHECKPOINTS / f"{name}_target")), "float32", CPU)
    encoder = (
        load_t5(CheckpointRef(str(CHECKPOINTS / "image_t5")), gpt.shape, "float32", CPU) if kind == "text" else None
    )
    target = LlamaGenTarget(gpt, encoder)
    vq = load_vq(CheckpointRef(str(CHECKPOINTS / "image_vq")), "float32", CPU)
    training_samples = []
    for row in draw_rows(vq, kind, "held_out", 6, 5):
        lanes = target.encode_lanes(row["prompt"], (), row.get("label"))
        training_samples.append(make_training_sample(target, lanes[0], row["codes"], 1))
    head = load_head(image_head(EAGLE, gpt.shape), CheckpointRef(str(CHECKPOINTS / f"{name}_eagle")), "float32", CPU)
    first, three, total = count_right(EagleTask(head, gpt.output), target, training_samples)
    assert total == 6 * 143
    assert first / total == pytest.approx(training_record(name)["measured"]["top1_accuracy"], abs=0.06)
    assert three / total == pytest.approx(training_record(name)["measured"]["top3_accuracy"], abs=0.08)
