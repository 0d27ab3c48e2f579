"""Writes inflated models as checkpoint folders, after comparing them with their source."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.inflate.check import compare, zoo_inputs
from benchmarks.inflate.model import auto_class, inflate
from benchmarks.inflate.shapes import InflationError, Shape
from models.loading.checkpoints import DTYPES


def load(folder: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load a model of the zoo through transformers' Auto classes; raise InflationError if there is no config.json."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise InflationError(f"{folder}: there is no config.json in it")
    config = json.loads(path.read_text(encoding="utf-8"))
    model: PreTrainedModel = auto_class(config).from_pretrained(folder, dtype=dtype).eval()
    return model


def inflate_folder(
    source: str | Path,
    destination: str | Path,
    shape: Shape,
    dtype: str = "bfloat16",
    seed: int = 0,
    num_prompts: int = 4,
    max_new_tokens: int = 48,
) -> dict[str, Any]:
    """Write `source`, a checkpoint folder of the zoo, in another shape; return the contents of `inflation.json`.

    Models in float32 and in `dtype` are compared with the source before the folder is written.

    Raises:
        InflationError: the source cannot be inflated, the outputs differ, or the destination exists.
    """
    source, destination = Path(source), Path(destination)
    if destination.exists():
        raise InflationError(f"{destination}: it is there already; name another folder or remove it")
    differences = []
    for each in dict.fromkeys(("float32", dtype)):
        model = load(source, DTYPES[each])
        grown = inflate(model, shape, seed)
        difference = compare(model, grown, zoo_inputs(source, num_prompts, seed), max_new_tokens)
        differences.append(asdict(difference.require_equal(source, shape)))
    note = {"shape": asdict(shape), "dtype": dtype, "seed": seed, "differences": differences}
    note["num_parameters"] = grown.num_parameters()
    partial = destination.with_name(destination.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    grown.save_pretrained(partial)
    for file in source.iterdir():
        if file.is_file() and ".safetensors" not in file.name and not (partial / file.name).exists():
            shutil.copyfile(file, partial / file.name)
    (partial / "inflation.json").write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
    partial.rename(destination)
    return note
