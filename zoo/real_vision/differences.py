"""Packs what the vision pair's target adds to SmolLM2 into one file, and builds the target's model folder from it.

The file has the tower, the projector and the low-rank differences in bfloat16. Differences are added in float32.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlavaForConditionalGeneration

from zoo.pair import build_processor
from zoo.real.model import RECORD, WEIGHTS_SHA256, is_converted
from zoo.real_vision.labels import IMAGE_PX, PATCH_PX
from zoo.real_vision.low_rank import merge
from zoo.real_vision.model import LANGUAGE, build_model, load_tokenizer

FILE = Path(__file__).parent / "target.safetensors"
LARGEST_BYTES = 30_000_000


class NotBuilt(Exception):
    """The target cannot be built; the message states the reason and what to do."""


def pack(tensors: dict[str, Tensor], path: Path, notes: dict[str, str]) -> int:
    """Write differences in bfloat16; return the file's size in bytes. Raises ValueError above 30 MB."""
    small = {name: one.to(torch.bfloat16).contiguous() for name, one in tensors.items()}
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    save_file(small, partial, notes | {"weights_sha256": WEIGHTS_SHA256})
    size = partial.stat().st_size
    if size > LARGEST_BYTES:
        partial.unlink()
        raise ValueError(f"{path} would have {size:,} bytes, more than {LARGEST_BYTES:,}")
    os.replace(partial, path)
    return size


def apply(model: LlavaForConditionalGeneration, differences: dict[str, Tensor]) -> None:
    """Add differences to a model of `build_model` in place. Raises KeyError or RuntimeError if names or shapes do not
    fit."""
    whole = {name: one.float() for name, one in differences.items() if not name.endswith((".down", ".up"))}
    low = {name: one for name, one in differences.items() if name.endswith((".down", ".up"))}
    changed = {name.removesuffix(".down") for name in low if name.endswith(".down")}
    weights = model.state_dict()
    merged = merge({name: weights[name] for name in changed}, low)
    missing, unexpected = model.load_state_dict(whole | merged, strict=False)
    untouched = [name for name in missing if ".vision_tower." in name or ".multi_modal_projector." in name]
    if unexpected or untouched:
        raise RuntimeError(f"the differences do not fit the model: unexpected {unexpected}, missing {untouched}")


def ensure(folder: Path, language: Path = LANGUAGE, path: Path = FILE) -> bool:
    """Build the target's model folder unless it is complete already; return whether it was built.

    Raises NotBuilt: without the converted SmolLM2, or if the file is missing or made for other weights.
    """
    if not path.is_file():
        raise NotBuilt(f"{path} does not exist: train the target with `python -m zoo.real_vision.train`")
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    record = {"weights_sha256": WEIGHTS_SHA256, "differences_sha256": digest}
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
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(made, folder)
    return True


def read_record(folder: Path) -> dict[str, str] | None:
    """Return the record of a built folder; None without a readable one."""
    try:
        found: dict[str, str] = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return None
    return found
