"""Builds the vision pair's target from SmolLM2 and the file of what the target adds to it.

The file has the tower, the projector and the low-rank differences in bfloat16. Differences are added in float32.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlavaForConditionalGeneration

from models.heads.files import make_readable
from zoo.pair import build_processor
from zoo.real.drafters import digest, read_record
from zoo.real.low_rank import add
from zoo.real.model import RECORD, WEIGHTS_SHA256, is_converted
from zoo.real_vision.labels import IMAGE_PX, PATCH_PX
from zoo.real_vision.model import LANGUAGE, build_model, load_tokenizer

FILE = Path(__file__).parent / "target.safetensors"
DRAFTERS = {name: Path(__file__).parent / f"{name}_drafter.safetensors" for name in ("strong", "weak")}
"""Name → file of `zoo.real.drafters`."""


class NotBuilt(Exception):
    """The target cannot be built; the message states the reason and what to do."""


def apply(model: LlavaForConditionalGeneration, differences: dict[str, Tensor]) -> None:
    """Add the target's differences to a model of `build_model` in place. Raises KeyError or RuntimeError if names or
    shapes do not fit."""
    missing = add(model, differences)
    untouched = [name for name in missing if ".vision_tower." in name or ".multi_modal_projector." in name]
    if untouched:
        raise RuntimeError(f"the differences do not fit the model: missing {untouched}")


def ensure(folder: Path, language: Path = LANGUAGE, path: Path = FILE) -> bool:
    """Build the target's model folder unless it is complete already; return whether it was built.

    Raises NotBuilt: without the converted SmolLM2, or if the file is missing or made for other weights.
    """
    if not path.is_file():
        raise NotBuilt(f"{path} does not exist: train the target with `python -m zoo.real_vision.train`")
    record = {"weights_sha256": WEIGHTS_SHA256, "differences_sha256": digest(path)}
    if read_record(folder) == record:
        return False
    if not is_converted(language):
        raise NotBuilt(f"{language} is not the converted SmolLM2: run `python -m zoo.real` first")
    with safe_open(path, "pt") as opened:
        found = (opened.metadata() or {}).get("weights_sha256")
    if found != WEIGHTS_SHA256:
        raise NotBuilt(f"{path} has differences to weights with SHA-256 {found}, not {WEIGHTS_SHA256}")
    tokenizer = load_tokenizer(language)
    model = build_model(tokenizer, language)
    apply(model, load_file(path))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as scratch:
        made = Path(scratch) / "model"
        model.save_pretrained(made)
        build_processor(tokenizer, IMAGE_PX, PATCH_PX).save_pretrained(made)
        (made / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        make_readable(made)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(made, folder)
    return True
