"""Inflated models as ordinary checkpoint folders, checked against their source before a byte is written.

Owns the folder: configuration, shards, the tokenizer's and processor's files, and `inflation.json`, which says what was
checked. Shards are made tensor by tensor, so a folder may be larger than memory. How tensors grow is
`benchmarks.inflate`'s.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from benchmarks.inflate import Inflation, inflate, inflated_config
from benchmarks.inflate_check import Difference, Inputs, compare, zoo_inputs
from benchmarks.inflate_shapes import InflationError, Shape, head_dim_of, shape_of
from models.backends.memory import free_bytes
from models.loading.checkpoints import DTYPES

NOTE = "inflation.json"
MAX_SHARD_BYTES = 2 << 30
WEIGHTS = (".safetensors", ".safetensors.index.json")


def load(folder: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """A model of the zoo through transformers' Auto classes, in evaluation mode."""
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    loader: Any = AutoModelForImageTextToText if "text_config" in config else AutoModelForCausalLM
    model: PreTrainedModel = loader.from_pretrained(folder, dtype=dtype).eval()
    return model


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder under the names that its files have."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
    return tensors


def inflate_folder(
    source: str | Path,
    destination: str | Path,
    shape: Shape,
    dtype: str = "bfloat16",
    seed: int = 0,
    num_prompts: int = 4,
    max_new_tokens: int = 48,
) -> dict[str, Any]:
    """Write `source`, a folder of the zoo, in another shape; returns what was checked, as `inflation.json` holds it.

    Checked are float32 and `dtype`. Where memory does not hold the whole model in float32, fewer layers are checked, of
    full width (extra layers are all alike); `checked_layers` says how many.

    Raises:
        InflationError: it cannot be inflated, its outputs differ, or the destination is there already.
    """
    source, destination = Path(source), Path(destination)
    if not (source / "config.json").is_file():
        raise InflationError(f"{source}: there is no config.json in it")
    if destination.exists():
        raise InflationError(f"{destination}: it is there already; name another folder or remove it")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    grown = inflated_config(config, shape)
    text = config.get("text_config", config)
    checked = _checkable(shape, head_dim_of(text), shape_of(text).layers)
    samples = zoo_inputs(source, num_prompts, seed)
    found = [
        check(source, replace(shape, layers=checked), each, samples, seed, max_new_tokens)
        for each in dict.fromkeys(("float32", dtype))
    ]
    told = {"dtype": dtype, "seed": seed, "checked_layers": checked, "differences": [asdict(one) for one in found]}
    grown["dtype"] = dtype
    inflation = Inflation(read_tensors(source), shape_of(text), shape, head_dim_of(text), seed)
    # Under another name until it is whole, so that nothing loads half a model.
    partial = destination.with_name(destination.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    told["num_parameters"] = _write_weights(inflation, partial, DTYPES[dtype])
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHTS):
            shutil.copyfile(file, partial / file.name)
    (partial / "config.json").write_text(json.dumps(grown, indent=2) + "\n", encoding="utf-8")
    (partial / NOTE).write_text(json.dumps({"shape": asdict(shape), **told}, indent=1) + "\n", encoding="utf-8")
    partial.rename(destination)
    return told


def check(
    source: Path, shape: Shape, dtype: str, samples: Sequence[Inputs], seed: int, max_new_tokens: int
) -> Difference:
    """Compare a source with itself in another shape, in one type.

    Raises:
        InflationError: the outputs differ by more than rounding.
    """
    model = load(source, DTYPES[dtype])
    found = compare(model, inflate(model, shape, seed), samples, max_new_tokens)
    if found.fault:
        raise InflationError(f"{source} in the shape {shape} is another model: {found.fault}")
    return found


def _checkable(shape: Shape, head_dim: int, least: int) -> int:
    """How many layers of a shape fit into half of the free memory in float32, at least one more than the source has."""
    layer_bytes = 4 * replace(shape, layers=1).num_parameters(head_dim)
    return max(min(shape.layers, least + 1), min(shape.layers, free_bytes() // 2 // layer_bytes))


def _write_weights(inflation: Inflation, folder: Path, dtype: torch.dtype) -> int:
    """Write the shards and, where there are several, their index; returns the number of parameters."""
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    held_bytes = total = 0
    for name, size in inflation.names():
        num = torch.Size(size).numel()
        if shards[-1] and held_bytes + num * dtype.itemsize > MAX_SHARD_BYTES:
            shards.append([])
            held_bytes = 0
        shards[-1].append((name, size))
        held_bytes, total = held_bytes + num * dtype.itemsize, total + num
    where = {}
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        made = {}
        for name, size in names:
            made[name] = torch.empty(size, dtype=dtype)
            inflation.fill(name, made[name])
            where[name] = file
        save_file(made, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {"metadata": {"total_size": total * dtype.itemsize}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return total
