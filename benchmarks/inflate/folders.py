"""Writes inflated models as checkpoint folders, after comparing them with their source.

Shards are made tensor by tensor, so a folder may be larger than memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.inflate.check import Difference, Inputs, compare, zoo_inputs
from benchmarks.inflate.model import Inflation, auto_class, inflate, inflated_config
from benchmarks.inflate.shapes import InflationError, Shape, head_dim_of, shape_of
from models.backends.memory import free_bytes
from models.loading.checkpoints import DTYPES

NOTE = "inflation.json"
MAX_SHARD_BYTES = 2 << 30
WEIGHTS = (".safetensors", ".safetensors.index.json")


def read_config_file(folder: Path) -> dict[str, Any]:
    """Load a folder's config.json; raise InflationError if there is none."""
    if not (folder / "config.json").is_file():
        raise InflationError(f"{folder}: there is no config.json in it")
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


def load(folder: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load a model of the zoo through transformers' Auto classes, in evaluation mode."""
    model: PreTrainedModel = auto_class(read_config_file(Path(folder))).from_pretrained(folder, dtype=dtype).eval()
    return model


def write_folder(destination: Path, shape: Shape, found: dict[str, Any], write: Callable[[Path], None]) -> None:
    """Write a folder and its `inflation.json` under a temporary name, then rename it."""
    partial = destination.with_name(destination.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write(partial)
    (partial / NOTE).write_text(json.dumps({"shape": asdict(shape), **found}, indent=1) + "\n", encoding="utf-8")
    partial.rename(destination)


def refuse_existing(destination: Path) -> None:
    if destination.exists():
        raise InflationError(f"{destination}: it is there already; name another folder or remove it")


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

    Models in float32 and in `dtype` are compared with the source. If memory does not hold the whole model in float32,
    fewer layers of full width are compared (`checked_layers`); all added layers have the same form.

    Raises:
        InflationError: the source cannot be inflated, the outputs differ, or the destination exists.
    """
    source, destination = Path(source), Path(destination)
    config = read_config_file(source)
    refuse_existing(destination)
    grown = inflated_config(config, shape) | {"dtype": dtype}
    text = config.get("text_config", config)
    num_checked = _checkable(shape, head_dim_of(text), shape_of(text).layers)
    samples = zoo_inputs(source, num_prompts, seed)
    differences = [
        asdict(check(source, replace(shape, layers=num_checked), each, samples, seed, max_new_tokens))
        for each in dict.fromkeys(("float32", dtype))
    ]
    found: dict[str, Any] = {"dtype": dtype, "seed": seed, "checked_layers": num_checked, "differences": differences}
    tensors: dict[str, Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors |= load_file(file)
    inflation = Inflation(tensors, shape_of(text), shape, head_dim_of(text), seed)

    def write(folder: Path) -> None:
        found["num_parameters"] = _write_weights(inflation, folder, DTYPES[dtype])
        for file in source.iterdir():
            if file.is_file() and not file.name.endswith(WEIGHTS):
                shutil.copyfile(file, folder / file.name)
        (folder / "config.json").write_text(json.dumps(grown, indent=2) + "\n", encoding="utf-8")

    write_folder(destination, shape, found, write)
    return found


def check(
    source: Path, shape: Shape, dtype: str, samples: Sequence[Inputs], seed: int, max_new_tokens: int
) -> Difference:
    """Compare a source with its inflated model; raise InflationError if they differ beyond rounding."""
    model = load(source, DTYPES[dtype])
    return compare(model, inflate(model, shape, seed), samples, max_new_tokens).require_equal(source, shape)


def _checkable(shape: Shape, head_dim: int, least: int) -> int:
    """Return how many layers fit into half of the free memory in float32, at least one more than `least`."""
    layer_bytes = 4 * replace(shape, layers=1).num_parameters(head_dim)
    return max(min(shape.layers, least + 1), min(shape.layers, free_bytes() // 2 // layer_bytes))


def _write_weights(inflation: Inflation, folder: Path, dtype: torch.dtype) -> int:
    """Write the shards and, if there are several, their index; return the number of parameters."""
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    shard_bytes = total = 0
    for name, size in inflation.names():
        num = torch.Size(size).numel()
        if shards[-1] and shard_bytes + num * dtype.itemsize > MAX_SHARD_BYTES:
            shards.append([])
            shard_bytes = 0
        shards[-1].append((name, size))
        shard_bytes, total = shard_bytes + num * dtype.itemsize, total + num
    file_of = {}
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {}
        for name, size in names:
            tensors[name] = torch.empty(size, dtype=dtype)
            inflation.fill(name, tensors[name])
            file_of[name] = file
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {"metadata": {"total_size": total * dtype.itemsize}, "weight_map": file_of}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return total
